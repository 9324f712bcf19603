"""Compare training steps: plain, with recomputed layers, and with a compiled trunk, alternating in one process.

    python tests/benchmarks/training_options.py --size tiny --steps 10 --sides plain recomputed compiled

Run the step of training_step.py. Print the median tokens/s, their ratio to the plain step, the loss of the first step
at dropout 0, and the megabytes that a forward pass keeps for the backward pass.
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
from tfm_blocks.training.objective import Objective

SIDES = ("plain", "recomputed", "compiled")


class Side:
    """Hold the network of one side, its optimizer and its measured speeds."""

    def __init__(self, name: str, size: dict[str, int], dropout: float) -> None:
        knobs = {key: size[key] for key in ("d_model", "d_ff", "heads", "layers")}
        self.network = tfm.build("base", vocab=VOCAB, dropout=dropout, **knobs).train()
        self.network.recomputes = name == "recomputed"
        trunk = torch.compile(self.network.trunk_with_losses, dynamic=True) if name == "compiled" else None
        self.objective = Objective(self.network, SMOOTHING, trunk)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4, fused=True)
        self.speeds: list[float] = []

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the mean loss over target tokens."""
        src_BS, tgt_BT, labels_BT = batch
        collated_batch = collated({"src": src_BS, "tgt": tgt_BT}, labels_BT)
        return self.objective.loss(collated_batch)[0] / len(collated_batch.kept_N)

    def kept_bytes(self, batch: tuple[Tensor, Tensor, Tensor]) -> int:
        """Return the bytes of tensors, other than weights, that a forward pass of the trunk keeps."""
        weights = {weight.untyped_storage().data_ptr() for weight in self.network.parameters()}
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            address = tensor.untyped_storage().data_ptr()
            if address not in weights:
                sizes[address] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            x_BTD, _ = self.network.trunk_with_losses({"src": batch[0], "tgt": batch[1]})
        del x_BTD
        return sum(sizes.values())


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
        side, start = Side(name, SIZES[arguments.size], 0.0), time.perf_counter()
        loss = float(side.loss(first))
        line = f"{name:11} loss {loss:.6f}, the first forward pass {time.perf_counter() - start:.1f} s"
        print(line + ("" if name == "compiled" else f", keeps {side.kept_bytes(first) / 1e6:,.0f} MB"), flush=True)
    sides = {name: Side(name, SIZES[arguments.size], 0.1) for name in arguments.sides}
    for _ in range(arguments.steps + 2):
        batch = batch_of(SIZES[arguments.size]["pairs"], generator)
        for side in sides.values():
            side.speeds.append(speed(side.loss, side.optimizer, batch, arguments.precision == "bf16"))
    medians = {name: statistics.median(side.speeds[2:]) for name, side in sides.items()}
    for name, median in medians.items():
        print(f"{name:11} {median:8,.0f} tokens/s, {median / medians[arguments.sides[0]]:.2f} of {arguments.sides[0]}")
