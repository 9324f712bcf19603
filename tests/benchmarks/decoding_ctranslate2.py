"""Greedy and beam search against CTranslate2 with the same weights, alternating in one process.

    pip install -c constraints.txt -e '.[ctranslate2]'
    python tests/benchmarks/decoding_ctranslate2.py --size tiny --beam 4

The sentences of tests/benchmarks/decoding.py, float32. Prints the median of output tokens/s of each side, the ratio, and
how many sentences both translate the same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import ctranslate2
import torch
from decoding import LENGTH, SENTENCES, SIZES, VOCAB, sources
from torch import Tensor

import tfm_blocks as tfm
from tfm_blocks.exchange.ctranslate2.export import write_network
from tfm_blocks.network.packed import packed
from tfm_blocks.translation.beam import beam_search, gnmt
from tfm_blocks.translation.search import EOS, PAD, Bounds, one_by_one

PIECES = ["<pad>", "<s>", "</s>", "<unk>", *(f"t{number}" for number in range(4, VOCAB))]
IDS = {piece: number for number, piece in enumerate(PIECES)}


def ended(src_BS: Tensor) -> Tensor:
    """The sentences with eos as their last token, which the exported model adds itself."""
    return src_BS.scatter(1, (src_BS != PAD).sum(1, keepdim=True) - 1, EOS)


def measure(size: dict[str, int], beam: int, rounds: int) -> tuple[dict[str, float], int]:
    """Median output tokens/s of each side, and the sentences of the last round that both translate the same."""
    model = tfm.build("base", vocab=VOCAB, **size).eval()
    whole_B = torch.full((SENTENCES,), LENGTH)
    bounds = Bounds(whole_B, whole_B, torch.empty(SENTENCES, 0, dtype=torch.int64))
    with tempfile.TemporaryDirectory() as folder:
        write_network(model, PIECES, Path(folder), "float32", "base")
        translator = ctranslate2.Translator(folder, intra_threads=torch.get_num_threads())

    def ours(src_BS: Tensor) -> list[list[int]]:
        if beam == 1:
            return [one.ids for one in one_by_one(model, {"src": src_BS}, bounds)]
        return [one.ids for one, *_ in beam_search(model, {"src": src_BS}, bounds, beam=beam, penalty=gnmt(0.6))]

    def theirs(src_BS: Tensor) -> list[list[int]]:
        texts = [[PIECES[piece] for piece in row if piece not in (PAD, EOS)] for row in src_BS.tolist()]
        found = translator.translate_batch(
            texts, beam_size=beam, min_decoding_length=LENGTH, max_decoding_length=LENGTH, return_scores=False
        )
        return [[IDS[piece] for piece in one.hypotheses[0]] for one in found]

    sides = {"tfm-blocks": ours, "ctranslate2": theirs}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    generator = torch.Generator().manual_seed(1)
    with packed(model):  # as `tfm translate` does for all its input
        for _ in range(rounds + 1):
            src_BS, outputs = ended(sources(generator)), []
            for name, side in sides.items():
                time.sleep(0.5)  # the other side's threads spin for a while after their work
                begin = time.perf_counter()
                outputs.append(side(src_BS))
                speeds[name].append(sum(map(len, outputs[-1])) / (time.perf_counter() - begin))
    same = sum(one == other for one, other in zip(*outputs, strict=True))
    return {name: statistics.median(values[1:]) for name, values in speeds.items()}, same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    found, same = measure(SIZES[arguments.size], arguments.beam, arguments.rounds)
    for name, speed in found.items():
        print(f"{name:12} {speed:10,.0f} output tokens/s")
    print(f"ratio {found['tfm-blocks'] / found['ctranslate2']:.2f}; {same} of {SENTENCES} sentences the same")
