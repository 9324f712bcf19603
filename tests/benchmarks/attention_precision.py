"""Compare bfloat16 attention on the CPU: torch's own against ours, which upcasts to float32.

    python tests/benchmarks/attention_precision.py

Alternate both sides in one process. Time the forward and backward pass of queries, keys and values in bfloat16, without
their projections. Print medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.blocks.layers.dot_product import dot_product_attention

SHAPES = [(100, 4, 20, 32), (30, 4, 60, 32), (20, 8, 25, 64), (2, 8, 512, 64), (1, 8, 2048, 64)]  # B H T K


def seconds(attention, q_k_v: list[Tensor]) -> float:
    """Return the seconds of one forward and backward pass."""
    start = time.perf_counter()
    y_BHTK = attention(*q_k_v)
    y_BHTK.backward(torch.ones_like(y_BHTK))
    return time.perf_counter() - start


def measure(shape: tuple[int, int, int, int], rounds: int) -> tuple[float, float]:
    """Return the median milliseconds of attention in bfloat16 and of attention upcast to float32."""
    B, H, T, K = shape
    x_BT3HK = torch.randn(B, T, 3, H, K, dtype=torch.bfloat16)
    q_k_v = [part.transpose(1, 2).requires_grad_() for part in x_BT3HK.unbind(2)]
    mask_B11T = torch.ones(B, 1, 1, T, dtype=torch.bool)
    sides = [
        partial(F.scaled_dot_product_attention, attn_mask=mask_B11T),
        partial(dot_product_attention, mask=mask_B11T),
    ]
    times = [[seconds(side, q_k_v) for side in sides] for _ in range(rounds + 2)][2:]
    bfloat16_ms, upcast_ms = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    return bfloat16_ms, upcast_ms


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    for shape in SHAPES:
        bfloat16_ms, upcast_ms = measure(shape, rounds)
        print(f"B H T K = {shape}: bfloat16 {bfloat16_ms:7.2f} ms, widened {upcast_ms:7.2f} ms")
