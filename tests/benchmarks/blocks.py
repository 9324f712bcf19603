"""Compare each block with the library layer it was tested with: forward and backward time, alternating in one process.

    python tests/benchmarks/blocks.py [--lengths 512 4096] [--width 512] [--heads 8] [--rounds 5] [--threads 2] [--only NAME …]
    python tests/benchmarks/blocks.py --growth [--lengths 1024 2048 4096 8192 16384]
    python tests/benchmarks/blocks.py --mixers [--lengths 512 2048 8192]

Without `--lengths`, the lengths are 512 and 4,096; beside loops over positions, 512, 2,048 and 8,192, up to the largest
that is practical for the loop: at 8,192, a step of a loop takes minutes.
Print the median milliseconds of one sequence. A median covers `--rounds` rounds, or all rounds of one second if those
are more. Print the ratio of our time to the library's. Mark our block if the ratio exceeds 1.1.
With --growth, measure only the blocks whose cost should grow linearly with the length. Print the exponent of growth
since half the length (1 is linear, 2 quadratic). Keep freed memory, as in training.
With --mixers, measure every registered block that mixes positions beside `attention`, and print the ratio of their
times. At n = 8,192, blocks that store all attention weights need more than 10 GB.
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
from block_pairs import LINEAR, LONGEST, PAIRS, Layer, mixers

from tfm_blocks.devices import set_threads
from tfm_blocks.launch.process_settings import keep_freed_memory

Key = TypeVar("Key")
MAX_RATIO = 1.1  # mark our block if its time exceeds the library's by this factor


def step(layer: Layer, n: int, width: int) -> Callable[[], None]:
    """Return a step: forward and backward of one sequence, with the gradients of its input and of the parameters."""
    x_BND, weight = torch.randn(1, n, width, requires_grad=True), torch.randn(1, n, width)

    def run() -> None:
        (layer(x_BND) * weight).sum().backward()

    return run


def alternate(steps: dict[Key, Callable[[], None]], rounds: int) -> dict[Key, float]:
    """Return the median milliseconds of each step. The steps take turns after one warm-up round.

    The order reverses after each round. Rounds continue for at least one second.
    """
    times: dict[Key, list[float]] = {name: [] for name in steps}
    order, end = list(steps.items()), time.perf_counter() + 1
    while len(times[order[0][0]]) <= rounds or time.perf_counter() < end:
        for name, run in order:
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
        order.reverse()
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def compare(options: argparse.Namespace) -> None:
    print("| block | as | n | ours, ms | theirs, ms | ratio | |\n|---|---|---|---|---|---|---|")
    for name, (make, theirs) in PAIRS.items():
        if options.only and name not in options.only:
            continue
        for n in options.lengths or ((512, 2048, 8192) if name in LONGEST else (512, 4096)):
            if n > LONGEST.get(name, n):
                continue
            torch.manual_seed(0)
            layers = {"ours": make(options.width, options.heads, n), "theirs": theirs(options.width, options.heads, n)}
            medians = alternate({key: step(layer, n, options.width) for key, layer in layers.items()}, options.rounds)
            our_ms, their_ms = medians["ours"], medians["theirs"]
            ratio = our_ms / their_ms
            mark = "slower" if ratio > MAX_RATIO else ""
            cells = (name, theirs.__doc__, n, f"{our_ms:.1f}", f"{their_ms:.1f}", f"{ratio:.2f}", mark)
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def growth(options: argparse.Namespace) -> None:
    lengths = options.lengths or (1024, 2048, 4096, 8192, 16384)
    print("| block | " + " | ".join(f"n = {n:,}" for n in lengths) + " |")
    print("|---" * (len(lengths) + 1) + "|")
    for name, make in LINEAR.items():
        if options.only and name not in options.only:
            continue
        layer = make(options.width, options.heads, 0)
        medians = alternate({n: step(layer, n, options.width) for n in lengths}, options.rounds)
        cells = [f"{medians[lengths[0]]:.1f}"]
        for before, n in pairwise(lengths):
            cells.append(f"{medians[n]:.1f} (n^{math.log(medians[n] / medians[before]) / math.log(n / before):.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def compare_mixers(options: argparse.Namespace) -> None:
    lengths, makers = options.lengths or (512, 2048, 8192), mixers()
    print("| block | " + " | ".join(f"n = {n:,}, ms | times attention" for n in lengths) + " |")
    print("|---" * (2 * len(lengths) + 1) + "|")
    attention = makers.pop("attention")(options.width, options.heads, 0)
    for name, make in makers.items():
        if options.only and name not in options.only:
            continue
        layers = {"attention": attention, name: make(options.width, options.heads, 0)}
        cells = []
        for n in lengths:
            steps = {key: step(layer, n, options.width) for key, layer in layers.items()}
            medians = alternate(steps, options.rounds)
            cells += [f"{medians[name]:.1f}", f"{medians[name] / medians['attention']:.2f}"]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--mixers", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=sorted({*PAIRS, *LINEAR, *mixers()}))
    options = parser.parse_args()
    keep_freed_memory()
    set_threads(options.threads)
    print(f"width {options.width}, {options.heads} heads, {options.threads} threads, torch {torch.__version__}")
    print(f"forward + backward of one sequence in float32, medians of {options.rounds}\n")
    (growth if options.growth else compare_mixers if options.mixers else compare)(options)


if __name__ == "__main__":
    main()
