"""Compare greedy continuations of prompts with Hugging Face's GPT-2 `generate`, alternating in one process.

    python tests/benchmarks/prompts.py

Continue 64 prompts of 64 tokens by 32 new tokens each. Both models have 6 layers of width 512 with 8 heads and inner
width 2,048, a vocabulary of 10,000 and random weights in float32. Print the median new tokens/s of each side by wall
time and by CPU time, and the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import tfm_blocks as tfm
from tfm_blocks.data.layout import BOS, EOS, PAD
from tfm_blocks.network.packed import packed
from tfm_blocks.translation.search import Bounds, one_by_one

VOCAB, PROMPTS, LENGTH, NEW = 10_000, 64, 64, 32
WIDTH, INNER, HEADS, LAYERS = 512, 2048, 8, 6

Side = Callable[[Tensor], int]
"""Continue prompts_BN, which begin with bos, and return the number of new tokens."""


def ours() -> tuple[Side, torch.nn.Module]:
    sizes = {"d_model": WIDTH, "d_ff": INNER, "heads": HEADS, "layers": LAYERS, "vocab": VOCAB}
    model = tfm.build("decoder_only", **sizes).eval()
    new_lengths_B = torch.full((PROMPTS,), NEW)
    bounds = Bounds(new_lengths_B, new_lengths_B, torch.empty(PROMPTS, 0, dtype=torch.int64))

    def run(prompts_BN: Tensor) -> int:
        return sum(hypothesis.length for hypothesis in one_by_one(model, {}, bounds, before_BN=prompts_BN))

    return run, model


def gpt2() -> Side:
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=1024, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=INNER,
        activation_function="relu", bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, attn_implementation="sdpa",
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()

    @torch.inference_mode()
    def run(prompts_BN: Tensor) -> int:
        out_BN = model.generate(
            prompts_BN, attention_mask=torch.ones_like(prompts_BN), do_sample=False, use_cache=True,
            min_new_tokens=NEW, max_new_tokens=NEW,
        )  # fmt: skip
        return (out_BN.shape[1] - prompts_BN.shape[1]) * PROMPTS

    return run


def measure(rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median new tokens/s of each side, by wall time and by CPU time."""
    generator = torch.Generator().manual_seed(1)
    our_side, model = ours()
    sides = {"tfm-blocks": our_side, "gpt2": gpt2()}
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    with packed(model):
        for _ in range(rounds + 1):
            prompts_BN = torch.randint(4, VOCAB, (PROMPTS, LENGTH), generator=generator)
            prompts_BN[:, 0] = BOS
            for name, side in sides.items():
                wall, cpu = time.perf_counter(), time.process_time()
                tokens = side(prompts_BN)
                elapsed = time.perf_counter() - wall, time.process_time() - cpu
                speeds[name].append((tokens / elapsed[0], tokens / elapsed[1]))
    return {
        name: (statistics.median(pair[0] for pair in values[1:]), statistics.median(pair[1] for pair in values[1:]))
        for name, values in speeds.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    medians = measure(parser.parse_args().rounds)
    for name, (speed, per_cpu) in medians.items():
        print(f"{name:12} {speed:10,.0f} new tokens/s  {per_cpu:10,.0f} a CPU second")
    wall_ratio, cpu_ratio = (medians["tfm-blocks"][index] / medians["gpt2"][index] for index in (0, 1))
    print(f"ratio {wall_ratio:.2f} by the clock, {cpu_ratio:.2f} a CPU second")
