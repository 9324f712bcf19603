"""Compare attention in processes that call `torch.set_num_threads` and in processes that call `set_threads`, alternating.

    python tests/benchmarks/threads.py --threads 2

Attention runs forward and backward in float32. Print the medians over all processes, in milliseconds, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
from torch.nn import functional as F

from tfm_blocks.devices import set_threads
from tfm_blocks.launch.process_settings import keep_freed_memory

SHAPES = [(100, 8, 6, 64), (100, 8, 10, 64), (128, 4, 32, 32), (32, 8, 32, 64), (16, 8, 128, 64)]
SIDES = {"torch.set_num_threads": torch.set_num_threads, "set_threads": set_threads}
CALLS = 40


def measure() -> list[float]:
    """Return the median milliseconds for each shape."""
    medians = []
    for shape in SHAPES:
        qkv_BHTK = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            F.scaled_dot_product_attention(*qkv_BHTK).sum().backward()
            times.append(1e3 * (time.perf_counter() - start))
        medians.append(statistics.median(times))
    return medians


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4, help="run this many processes of each side")
    parser.add_argument("--side", choices=SIDES, help="measure only this side, in this process")
    arguments = parser.parse_args()
    if arguments.side:
        keep_freed_memory()
        SIDES[arguments.side](arguments.threads)
        print(json.dumps(measure()))
        sys.exit()
    results: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    for side in list(SIDES) * arguments.rounds:
        command = [sys.executable, *sys.argv, "--side", side]
        results[side].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print("B, H, T, K          " + "  ".join(SIDES) + "  ratio")
    for shape, *processes in zip(SHAPES, *(zip(*results[side], strict=True) for side in SIDES), strict=True):
        theirs, ours = map(statistics.median, processes)
        print(f"{', '.join(map(str, shape)):18} {theirs:22.2f} {ours:12.2f} {theirs / ours:6.2f}")
