"""Compare greedy and beam search with Hugging Face's MarianMT.generate of the same size, alternating in one process.

    python tests/benchmarks/decoding.py --size tiny --beam 4

Translate 64 sentences of 12 to 24 tokens into 24 output tokens each. The models have a vocabulary of 10,000 and random
weights in float32. Print the median output tokens/s of each side and the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

import tfm_blocks as tfm
from tfm_blocks.data.layout import BOS, EOS, PAD
from tfm_blocks.network.graph import Network
from tfm_blocks.network.packed import packed
from tfm_blocks.translation.beam import beam_search, gnmt
from tfm_blocks.translation.search import Bounds, one_by_one

VOCAB, SENTENCES, LENGTH = 10_000, 64, 24
SIZES = {
    "base": {"d_model": 512, "d_ff": 2048, "heads": 8, "layers": 6},
    "tiny": {"d_model": 128, "d_ff": 256, "heads": 4, "layers": 4},
}


def sources(generator: torch.Generator, sentences: int = SENTENCES) -> Tensor:
    """Return src_BS: padded sentences of 12 to 24 tokens."""
    src_BS = torch.randint(4, VOCAB, (sentences, 24), generator=generator)
    lengths_B = torch.randint(12, 25, (sentences,), generator=generator)
    return src_BS.masked_fill(torch.arange(24) >= lengths_B[:, None], PAD)


Side = Callable[[Tensor], int]
"""Translate src_BS and return the number of output tokens."""


def ours(model: Network, beam: int) -> Side:
    output_lengths_B = torch.full((SENTENCES,), LENGTH)
    bounds = Bounds(output_lengths_B, output_lengths_B, torch.empty(SENTENCES, 0, dtype=torch.int64))

    def run(src_BS: Tensor) -> int:
        if beam == 1:
            return sum(hypothesis.length for hypothesis in one_by_one(model, {"src": src_BS}, bounds))
        beams = beam_search(model, {"src": src_BS}, bounds, beam=beam, penalty=gnmt(0.6))
        return sum(best[0].length for best in beams)

    return run


def marian(size: dict[str, int], beam: int) -> Side:
    layers, heads, inner = size["layers"], size["heads"], size["d_ff"]
    config = MarianConfig(
        vocab_size=VOCAB, d_model=size["d_model"], encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=inner, decoder_ffn_dim=inner,
        activation_function="relu", scale_embedding=True, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS,
        decoder_start_token_id=BOS, forced_eos_token_id=None, max_position_embeddings=64, attn_implementation="sdpa",
    )  # fmt: skip
    model = MarianMTModel(config).eval()

    @torch.inference_mode()
    def run(src_BS: Tensor) -> int:
        out_BT = model.generate(
            src_BS, attention_mask=(src_BS != PAD).long(), num_beams=beam, do_sample=False, use_cache=True,
            min_new_tokens=LENGTH, max_new_tokens=LENGTH,
        )  # fmt: skip
        return (out_BT.shape[1] - 1) * SENTENCES

    return run


def measure(size: dict[str, int], beam: int, rounds: int) -> dict[str, float]:
    """Return the median output tokens/s of each side."""
    generator = torch.Generator().manual_seed(1)
    model = tfm.build("base", vocab=VOCAB, **size).eval()
    sides = {"tfm-blocks": ours(model, beam), "marian": marian(size, beam)}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    with packed(model):  # pack the weights once, as `tfm translate` does for all its input
        for _ in range(rounds + 1):
            src_BS = sources(generator)
            for name, side in sides.items():
                start = time.perf_counter()
                tokens = side(src_BS)
                speeds[name].append(tokens / (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in speeds.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    medians = measure(SIZES[arguments.size], arguments.beam, arguments.rounds)
    for name, speed in medians.items():
        print(f"{name:12} {speed:10,.0f} output tokens/s")
    print(f"ratio {medians['tfm-blocks'] / medians['marian']:.2f}")
