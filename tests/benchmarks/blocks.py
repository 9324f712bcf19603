"""Blocks against the library layers that they were tested with: forward and backward, alternating in one process.

    python tests/benchmarks/blocks.py [--lengths 512 4096] [--width 512] [--heads 8] [--rounds 5] [--threads 2] [--only NAME …]
    python tests/benchmarks/blocks.py --growth [--lengths 1024 2048 4096 8192 16384]

Prints medians in milliseconds of one sequence, of `--rounds` or of as many as a second holds, ours over theirs, and a
mark where ours takes more than 1.1 times as long. With --growth: of the blocks whose cost is to grow with the length
alone, the exponent since half the length (1 is linear, 2 quadratic). As in training, freed memory is kept.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch
from block_pairs import LINEAR, PAIRS, Layer, ours

from tfm_blocks.launch.process_settings import keep_freed_memory

Key = TypeVar("Key")
MOST = 1.1  # times as long as the library's layer


def step(layer: Layer, n: int, width: int) -> Callable[[], None]:
    """Forward and backward of a layer on one sequence, the gradients of its input and parameters included."""
    x_BND, weight = torch.randn(1, n, width, requires_grad=True), torch.randn(1, n, width)

    def run() -> None:
        (layer(x_BND) * weight).sum().backward()

    return run


def alternate(steps: dict[Key, Callable[[], None]], rounds: int) -> dict[Key, float]:
    """Median milliseconds of each, taken in turns after one round of warming up, each side first in every second one.

    What is short has as many rounds as a second holds.
    """
    times: dict[Key, list[float]] = {name: [] for name in steps}
    order, end = list(steps.items()), time.perf_counter() + 1
    while len(times[order[0][0]]) <= rounds or time.perf_counter() < end:
        for name, one in order:
            begin = time.perf_counter()
            one()
            times[name].append((time.perf_counter() - begin) * 1e3)
        order.reverse()
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def compare(options: argparse.Namespace) -> None:
    print("| block | as | n | ours, ms | theirs, ms | ratio | |\n|---|---|---|---|---|---|---|")
    for name, (make, theirs) in PAIRS.items():
        if options.only and name not in options.only:
            continue
        for n in options.lengths or (512, 4096):
            torch.manual_seed(0)
            layers = {"ours": make(options.width, options.heads, n), "theirs": theirs(options.width, options.heads, n)}
            found = alternate({key: step(one, n, options.width) for key, one in layers.items()}, options.rounds)
            ratio = found["ours"] / found["theirs"]
            mark = "slower" if ratio > MOST else ""
            cells = (name, theirs.__doc__, n, f"{found['ours']:.1f}", f"{found['theirs']:.1f}", f"{ratio:.2f}", mark)
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def growth(options: argparse.Namespace) -> None:
    lengths = options.lengths or (1024, 2048, 4096, 8192, 16384)
    print("| block | " + " | ".join(f"n = {n:,}" for n in lengths) + " |")
    print("|---" * (len(lengths) + 1) + "|")
    for name, arguments in LINEAR.items():
        if options.only and name not in options.only:
            continue
        layer = ours(name, **arguments)(options.width, options.heads, 0)
        found = alternate({n: step(layer, n, options.width) for n in lengths}, options.rounds)
        cells = [f"{found[lengths[0]]:.1f}"]
        for before, n in pairwise(lengths):
            cells.append(f"{found[n]:.1f} (n^{math.log(found[n] / found[before]) / math.log(n / before):.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*PAIRS, *LINEAR])
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    print(f"width {options.width}, {options.heads} heads, {options.threads} threads, torch {torch.__version__}")
    print(f"forward + backward of one sequence in float32, medians of {options.rounds}\n")
    (growth if options.growth else compare)(options)


if __name__ == "__main__":
    main()
