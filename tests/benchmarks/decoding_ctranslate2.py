"""Compare greedy and beam search with CTranslate2 on the same weights, alternating in one process.

    pip install -c constraints.txt -e '.[ctranslate2]'
    python tests/benchmarks/decoding_ctranslate2.py --size tiny --beam 4
    python tests/benchmarks/decoding_ctranslate2.py --size base --int8

Translate the sentences of tests/benchmarks/decoding.py in float32. With --int8, also translate them in int8 on both
sides. Print the median output tokens/s of each side, the ratios, and the number of sentences that both libraries
translate identically. With `--cpu-time`, use one thread and count its CPU seconds instead of wall time, for a machine
that also does other work.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ctranslate2
import torch
from decoding import LENGTH, SENTENCES, SIZES, VOCAB, sources
from torch import Tensor

import tfm_blocks as tfm
from tfm_blocks.exchange.ctranslate2.export import write_network
from tfm_blocks.launch.process_settings import keep_freed_memory
from tfm_blocks.network.graph import Network
from tfm_blocks.network.packed import packed, quantized
from tfm_blocks.translation.beam import beam_search, gnmt
from tfm_blocks.translation.search import EOS, PAD, Bounds, one_by_one

TOKENS = ["<pad>", "<s>", "</s>", "<unk>", *(f"t{number}" for number in range(4, VOCAB))]
IDS = {token: number for number, token in enumerate(TOKENS)}


def with_eos(src_BS: Tensor) -> Tensor:
    """Return the sentences with eos as their last token. The exported model adds eos itself."""
    return src_BS.scatter(1, (src_BS != PAD).sum(1, keepdim=True) - 1, EOS)


Translate = Callable[[Tensor], list[list[int]]]
"""Translate src_BS and return the ids of each translation."""

CONTEXTS = {"float32": packed, "int8": quantized}  # enter one; `tfm translate` enters it once for all its input


def ours(model: Network, beam: int) -> Translate:
    lengths_B = torch.full((SENTENCES,), LENGTH)
    bounds = Bounds(lengths_B, lengths_B, torch.empty(SENTENCES, 0, dtype=torch.int64))

    def translate(src_BS: Tensor) -> list[list[int]]:
        if beam == 1:
            return [hypothesis.ids for hypothesis in one_by_one(model, {"src": src_BS}, bounds)]
        return [best.ids for best, *_ in beam_search(model, {"src": src_BS}, bounds, beam=beam, penalty=gnmt(0.6))]

    return translate


def theirs(model: Network, precision: str, beam: int) -> Translate:
    with tempfile.TemporaryDirectory() as folder:
        write_network(model, TOKENS, Path(folder), precision, "base")
        translator = ctranslate2.Translator(folder, intra_threads=torch.get_num_threads(), compute_type=precision)

    def translate(src_BS: Tensor) -> list[list[int]]:
        texts = [[TOKENS[token_id] for token_id in row if token_id not in (PAD, EOS)] for row in src_BS.tolist()]
        results = translator.translate_batch(
            texts, beam_size=beam, min_decoding_length=LENGTH, max_decoding_length=LENGTH, return_scores=False
        )
        return [[IDS[token] for token in result.hypotheses[0]] for result in results]

    return translate


def measure(
    size: dict[str, int], beam: int, rounds: int, precisions: Sequence[str], clock: Callable[[], float]
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the median output tokens/s of each side, and the number of identical translations of each precision.

    Only the translations of the last round are compared.
    """
    model = tfm.build("base", vocab=VOCAB, **size).eval()
    sides = {f"tfm-blocks {name}": ours(model, beam) for name in precisions}
    sides |= {f"ctranslate2 {name}": theirs(model, name, beam) for name in precisions}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    generator = torch.Generator().manual_seed(1)
    for _ in range(rounds + 1):
        src_BS, outputs = with_eos(sources(generator)), {}
        for name, side in sides.items():
            time.sleep(0.5)  # wait: the other side's threads spin for a while after their work
            with CONTEXTS[name.split()[1]](model):
                start = clock()
                outputs[name] = side(src_BS)
                seconds = clock() - start
            speeds[name].append(sum(map(len, outputs[name])) / seconds)
    pairs = {name: (outputs[f"tfm-blocks {name}"], outputs[f"ctranslate2 {name}"]) for name in precisions}
    identical = {
        name: sum(our_ids == their_ids for our_ids, their_ids in zip(*pair, strict=True))
        for name, pair in pairs.items()
    }
    return {name: statistics.median(values[1:]) for name, values in speeds.items()}, identical


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    keep_freed_memory()  # keep freed memory on both sides, as `tfm translate` does
    if arguments.cpu_time:
        torch.set_num_threads(1)
    precisions = ["float32", "int8"] if arguments.int8 else ["float32"]
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    medians, identical = measure(SIZES[arguments.size], arguments.beam, arguments.rounds, precisions, clock)
    for name, speed in medians.items():
        print(f"{name:19} {speed:10,.0f} output tokens/s")
    for name in precisions:
        ratio = medians[f"tfm-blocks {name}"] / medians[f"ctranslate2 {name}"]
        print(f"{name}: ratio {ratio:.2f}; {identical[name]} of {SENTENCES} sentences the same")
    if arguments.int8:
        for side in ("tfm-blocks", "ctranslate2"):
            print(f"{side}: int8 / float32 {medians[f'{side} int8'] / medians[f'{side} float32']:.2f}")
