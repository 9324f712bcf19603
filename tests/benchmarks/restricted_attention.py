"""Compare restricted and dense self-attention: forward + backward of the whole blocks, alternating in one process.

python tests/benchmarks/restricted_attention.py [--r 128] [--heads 8] [--width 512] [--rounds 5] [--threads 2] [--bf16]

For each length n, print the median milliseconds of the block with its projections and of the attention alone. Print the
time ratios and the exponent of growth since half the length (1 is linear, 2 quadratic). Print the peak memory of one
forward and backward: the rise of a process's resident size (ru_maxrss) after the block and its input were created.
Measure the memory of each block and length in a fresh process.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tfm_blocks.blocks.attention import Attention
from tfm_blocks.blocks.layers.banded import banded_attention
from tfm_blocks.blocks.restricted import RestrictedAttention
from tfm_blocks.devices import set_threads

LENGTHS = (2048, 4096, 8192, 16384)
LONGEST_DENSE = 8192  # skip 16384: one dense step takes a quarter of a minute
MEBIBYTE = 2**20
COLUMNS = ("restricted block", "dense block", "restricted attention", "dense attention", "restricted MiB", "dense MiB")

Step = Callable[[], None]


def block_step(kind: str, n: int, options: argparse.Namespace) -> Step:
    """Return a step: forward and backward of one whole block, with the gradient of its input."""
    torch.manual_seed(0)
    if kind == "dense":
        block: torch.nn.Module = Attention(D=options.width, E=None, heads=options.heads)
    else:
        block = RestrictedAttention(D=options.width, heads=options.heads, r=options.r)
    x_BTD = torch.randn(1, n, options.width, requires_grad=True)
    keep_BT, weight_BTD = torch.ones(1, n, dtype=torch.bool), torch.randn(1, n, options.width)
    return lambda: run(lambda: block(x_BTD, keep_BT=keep_BT), weight_BTD, options.bf16)


def attention_step(kind: str, n: int, options: argparse.Namespace) -> Step:
    """Return a step: forward and backward of the attention alone, without projections."""
    q, k, v = torch.randn(3, 1, n, options.heads, options.width // options.heads).transpose(2, 3)
    inputs = [part.requires_grad_() for part in (q, k, v)]
    keep_BT, weight_BHTK = torch.ones(1, n, dtype=torch.bool), torch.randn_like(q)

    def attend() -> Tensor:
        if kind == "dense":
            return functional.scaled_dot_product_attention(*inputs)
        return banded_attention(*inputs, keep_BT, r=options.r, causal=False, dropout=0.0)

    return lambda: run(attend, weight_BHTK, options.bf16)


def run(forward: Callable[[], Tensor], weight: Tensor, bf16: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        y = forward()
    y.backward(weight.to(y.dtype))


def alternate(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each step. The steps take turns after one warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def resident_peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure_peak(kind: str, n: int, options: argparse.Namespace) -> float:
    """Return the mebibytes by which one step raises the peak of this process.

    A short step runs first: it triggers all one-time loading.
    """
    set_threads(options.threads)
    block_step(kind, 256, options)()
    step = block_step(kind, n, options)
    before = resident_peak()
    step()
    return (resident_peak() - before) / MEBIBYTE


def peak_memory(kind: str, n: int, options: argparse.Namespace) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure_peak, (kind, n, options))


def kinds(n: int) -> list[str]:
    return ["restricted", "dense"] if n <= LONGEST_DENSE else ["restricted"]


def measure(options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Return the figures of each length by name."""
    # Measure memory first: on Linux a new process starts with its parent's peak, which must still be small.
    rows = {n: {f"{kind} MiB": peak_memory(kind, n, options) for kind in kinds(n)} for n in LENGTHS}
    for n, row in rows.items():
        steps = {f"{kind} block": block_step(kind, n, options) for kind in kinds(n)}
        steps |= {f"{kind} attention": attention_step(kind, n, options) for kind in kinds(n)}
        row |= alternate(steps, options.rounds)
    return rows


def print_table(rows: dict[int, dict[str, float]]) -> None:
    print("| n | " + " | ".join(COLUMNS) + " | block ratio | attention ratio |")
    print("|---" * (len(COLUMNS) + 3) + "|")
    for n, row in rows.items():
        cells = [with_growth(rows, n, name) for name in COLUMNS]
        for part in ("block", "attention"):
            dense = row.get(f"dense {part}")
            cells.append(f"{dense / row[f'restricted {part}']:.1f}x" if dense else "–")
        print(f"| {n} | " + " | ".join(cells) + " |")


def with_growth(rows: dict[int, dict[str, float]], n: int, name: str) -> str:
    """Return the figure, followed by the exponent of its growth since half the length."""
    if name not in rows[n]:
        return "–"
    value, half = rows[n][name], rows.get(n // 2, {}).get(name)
    return f"{value:,.0f}" + (f" (n^{math.log2(value / half):.2f})" if half else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--r", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="measure under bf16 autocast")
    options = parser.parse_args()
    set_threads(options.threads)
    precision = "bf16 autocast" if options.bf16 else "fp32"
    print(f"r = {options.r}, {options.heads} heads, width {options.width}, {precision}, {options.threads} threads")
    print(f"torch {torch.__version__}; medians of {options.rounds}, forward + backward; block and attention in ms\n")
    print_table(measure(options))


if __name__ == "__main__":
    main()
