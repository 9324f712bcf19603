"""Compare training steps of processes that keep freed memory and of processes that return it, alternating.

    python tests/benchmarks/kept_memory.py --size tiny --precision bf16

Run the step of training_step.py. Print the medians over all processes of tokens/s and of the pages that a step requests
from the system. Print the ratio of the speeds.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys

import torch
from training_step import SIZES, batch_of, ours, speed

from tfm_blocks.launch.process_settings import keep_freed_memory

SIDES = ("given back", "kept")


def measure(side: str, size: dict[str, int], steps: int, bf16: bool) -> list[tuple[float, int]]:
    """Return tokens/s and page faults of each step in this process, after three warm-up steps."""
    if side == "kept":
        keep_freed_memory()
    generator = torch.Generator().manual_seed(1)
    model, loss = ours(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    measurements = []
    for _ in range(steps + 3):
        batch = batch_of(size["pairs"], generator)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tokens_per_second = speed(loss, optimizer, batch, bf16)
        measurements.append((tokens_per_second, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))
    return measurements[3:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=4, help="run this many processes of each side")
    parser.add_argument("--side", choices=SIDES, help="measure only this side, in this process")
    arguments = parser.parse_args()
    if arguments.side:
        bf16 = arguments.precision == "bf16"
        print(json.dumps(measure(arguments.side, SIZES[arguments.size], arguments.steps, bf16)))
        sys.exit()
    results: dict[str, list[tuple[float, int]]] = {side: [] for side in SIDES}
    for side in SIDES * arguments.rounds:
        command = [sys.executable, *sys.argv, "--side", side]
        results[side] += json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    speeds = {side: statistics.median(speed for speed, _ in steps) for side, steps in results.items()}
    for side, steps in results.items():
        print(
            f"{side:10} {speeds[side]:8,.0f} tokens/s {statistics.median(faults for _, faults in steps):10,.0f} faults a step"
        )
    print(f"ratio {speeds['kept'] / speeds['given back']:.2f}")
