"""Compare attention after `torch.set_num_threads` and after this package's `set_threads`.

    python tests/benchmarks/threads.py --threads 2

Alternate in one process, forward and backward in float32. Print the median milliseconds of both, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.nn import functional as F

from tfm_blocks.distributed.threads import set_threads
from tfm_blocks.launch.process_settings import keep_freed_memory

SHAPES = [(100, 8, 6, 64), (100, 8, 10, 64), (128, 4, 32, 32), (32, 8, 32, 64), (16, 8, 128, 64)]
SIDES = {"torch.set_num_threads": torch.set_num_threads, "set_threads": set_threads}


def seconds(qkv_BHTK: list[torch.Tensor]) -> float:
    start = time.perf_counter()
    F.scaled_dot_product_attention(*qkv_BHTK).sum().backward()
    return time.perf_counter() - start


def measure(shape: tuple[int, ...], threads: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each side; a call before each measured one is not counted."""
    qkv_BHTK = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name, set_number in SIDES.items():
            set_number(threads)
            seconds(qkv_BHTK)
            times[name].append(1e3 * seconds(qkv_BHTK))
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    keep_freed_memory()
    print("B, H, T, K          " + "  ".join(SIDES) + "  ratio")
    for shape in SHAPES:
        medians = list(measure(shape, arguments.threads, arguments.rounds).values())
        print(f"{', '.join(map(str, shape)):18} {medians[0]:22.2f} {medians[1]:12.2f} {medians[0] / medians[1]:6.2f}")
