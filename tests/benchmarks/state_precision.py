"""Compare bfloat16 and float32 products of the state in retention and the delta rule, under bfloat16 autocast.

    python tests/benchmarks/state_precision.py [--rounds 9]

Alternate both sides. Print the error of a forward pass relative to float64. Print the median milliseconds of a forward
and backward pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from copy import deepcopy
from unittest import mock

import torch
from torch import Tensor

from tfm_blocks.blocks import linear_attention
from tfm_blocks.blocks.layers.decay import CHUNK, by_chunks


def in_autocast(read, memory_BHKV: Tensor, *x_BHT: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `by_chunks` without switching autocast off."""
    outputs = []
    for chunk in zip(*(torch.split(tensor_BHT, CHUNK, 2) for tensor_BHT in x_BHT), strict=True):
        y_BHCV, memory_BHKV = read(memory_BHKV, *chunk)
        outputs.append(y_BHCV)
    return torch.cat(outputs, 2), memory_BHKV


def keep_of(x_BTD: Tensor) -> Tensor:
    return torch.ones(x_BTD.shape[:2], dtype=torch.bool)


def measure(block: torch.nn.Module, x_BTD: Tensor, side) -> tuple[Tensor, float]:
    """Return the output and the milliseconds of one forward and backward pass."""
    with mock.patch.object(linear_attention, "by_chunks", side):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            y_BTD = block(x_BTD, keep_BT=keep_of(x_BTD))
        y_BTD.float().square().mean().backward()
        return y_BTD.detach(), 1000 * (time.perf_counter() - start)


def compare(name: str, block: torch.nn.Module, rows: int, length: int, rounds: int) -> None:
    x_BTD = torch.randn(rows, length, 512)
    for parameter_name, parameter in block.named_parameters():
        if "." in parameter_name:
            torch.nn.init.normal_(parameter, std=512**-0.5)
        else:
            with torch.no_grad():
                block.initialise(parameter_name, torch.Generator().manual_seed(1))
    exact_BTD = deepcopy(block).double()(x_BTD.double(), keep_BT=keep_of(x_BTD)).detach()
    sides = {"bfloat16": in_autocast, "float32": by_chunks}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, function in sides.items():
            y_BTD, elapsed = measure(block, x_BTD, function)
            times[side] += [elapsed] if number else []
            if number == rounds:
                error = float((y_BTD.double() - exact_BTD).norm() / exact_BTD.norm())
                print(
                    f"{name} {rows} x {length}, {side}: {100 * error:.2f} % error, {statistics.median(times[side]):.0f} ms"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    for rows, length in ((60, 25), (2, 512), (1, 2000)):
        compare("retention", linear_attention.Retention(512, heads=8), rows, length, arguments.rounds)
        compare("gated_delta_rule", linear_attention.GatedDeltaRule(512, heads=8), rows, length, arguments.rounds)
