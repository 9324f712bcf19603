"""Training steps as they are, with layers that are computed again, and with a compiled trunk, alternating in one process.

    python tests/benchmarks/training_options.py --size tiny --steps 10 --sides plain recomputed compiled

The step is that of training_step.py. Prints medians of tokens/s, their ratio to the plain step, the loss of the first
step at dropout 0, and the megabytes that a forward pass keeps for the backward.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor
from training_step import SIZES, SMOOTHING, VOCAB, batch_of, speed

import tfm_blocks as tfm
from tfm_blocks.data.layout import batch_of as collated
from tfm_blocks.training.loss import Objective

SIDES = ("plain", "recomputed", "compiled")


class Side:
    """One of the sides, its optimizer and what was measured."""

    def __init__(self, name: str, size: dict[str, int], dropout: float) -> None:
        knobs = {key: size[key] for key in ("d_model", "d_ff", "heads", "layers")}
        self.network = tfm.build("base", vocab=VOCAB, dropout=dropout, **knobs).train()
        self.network.recomputes = name == "recomputed"
        trunk = torch.compile(self.network.trunk_with_losses, dynamic=True) if name == "compiled" else None
        self.objective = Objective(self.network, SMOOTHING, trunk)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4, fused=True)
        self.speeds: list[float] = []

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The mean over target tokens."""
        src_BS, tgt_BT, labels_BT = batch
        made = collated({"src": src_BS, "tgt": tgt_BT}, labels_BT)
        return self.objective.loss(made)[0] / len(made.kept_N)

    def kept(self, batch: tuple[Tensor, Tensor, Tensor]) -> int:
        """Bytes of tensors, other than weights, that a forward pass of the trunk keeps."""
        own = {one.untyped_storage().data_ptr() for one in self.network.parameters()}
        found: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            place = tensor.untyped_storage().data_ptr()
            if place not in own:
                found[place] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            x_BTD, _ = self.network.trunk_with_losses({"src": batch[0], "tgt": batch[1]})
        del x_BTD
        return sum(found.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=SIDES)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    first = batch_of(SIZES[arguments.size]["pairs"], generator)
    for name in arguments.sides:
        side, begun = Side(name, SIZES[arguments.size], 0.0), time.perf_counter()
        loss = float(side.loss(first))
        told = f"{name:11} loss {loss:.6f}, the first forward pass {time.perf_counter() - begun:.1f} s"
        print(told + ("" if name == "compiled" else f", keeps {side.kept(first) / 1e6:,.0f} MB"), flush=True)
    sides = {name: Side(name, SIZES[arguments.size], 0.1) for name in arguments.sides}
    for _ in range(arguments.steps + 2):
        batch = batch_of(SIZES[arguments.size]["pairs"], generator)
        for side in sides.values():
            side.speeds.append(speed(side.loss, side.optimizer, batch, arguments.precision == "bf16"))
    medians = {name: statistics.median(side.speeds[2:]) for name, side in sides.items()}
    for name, median in medians.items():
        print(f"{name:11} {median:8,.0f} tokens/s, {median / medians[arguments.sides[0]]:.2f} of {arguments.sides[0]}")
