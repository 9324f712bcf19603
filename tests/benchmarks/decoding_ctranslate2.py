"""Greedy and beam search against CTranslate2 with the same weights, alternating in one process.

    pip install -c constraints.txt -e '.[ctranslate2]'
    python tests/benchmarks/decoding_ctranslate2.py --size tiny --beam 4
    python tests/benchmarks/decoding_ctranslate2.py --size base --int8

The sentences of tests/benchmarks/decoding.py, float32; with --int8 also int8 on both sides. Prints the median of output
tokens/s of each side, ratios, and the sentences that both libraries translate the same. `--cpu-time` counts the seconds
of one thread instead of the wall time, for a machine that others use.
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

PIECES = ["<pad>", "<s>", "</s>", "<unk>", *(f"t{number}" for number in range(4, VOCAB))]
IDS = {piece: number for number, piece in enumerate(PIECES)}


def ended(src_BS: Tensor) -> Tensor:
    """The sentences with eos as their last token, which the exported model adds itself."""
    return src_BS.scatter(1, (src_BS != PAD).sum(1, keepdim=True) - 1, EOS)


Translate = Callable[[Tensor], list[list[int]]]
"""src_BS -> ids of each translation."""

CONTEXTS = {"float32": packed, "int8": quantized}  # `tfm translate` enters one for all its input


def ours(model: Network, beam: int) -> Translate:
    whole_B = torch.full((SENTENCES,), LENGTH)
    bounds = Bounds(whole_B, whole_B, torch.empty(SENTENCES, 0, dtype=torch.int64))

    def translate(src_BS: Tensor) -> list[list[int]]:
        if beam == 1:
            return [one.ids for one in one_by_one(model, {"src": src_BS}, bounds)]
        return [one.ids for one, *_ in beam_search(model, {"src": src_BS}, bounds, beam=beam, penalty=gnmt(0.6))]

    return translate


def theirs(model: Network, precision: str, beam: int) -> Translate:
    with tempfile.TemporaryDirectory() as folder:
        write_network(model, PIECES, Path(folder), precision, "base")
        translator = ctranslate2.Translator(folder, intra_threads=torch.get_num_threads(), compute_type=precision)

    def translate(src_BS: Tensor) -> list[list[int]]:
        texts = [[PIECES[piece] for piece in row if piece not in (PAD, EOS)] for row in src_BS.tolist()]
        found = translator.translate_batch(
            texts, beam_size=beam, min_decoding_length=LENGTH, max_decoding_length=LENGTH, return_scores=False
        )
        return [[IDS[piece] for piece in one.hypotheses[0]] for one in found]

    return translate


def measure(
    size: dict[str, int], beam: int, rounds: int, precisions: Sequence[str], clock: Callable[[], float]
) -> tuple[dict[str, float], dict[str, int]]:
    """Median output tokens/s of each side, and per precision the sentences of the last round both translate the same."""
    model = tfm.build("base", vocab=VOCAB, **size).eval()
    sides = {f"tfm-blocks {name}": ours(model, beam) for name in precisions}
    sides |= {f"ctranslate2 {name}": theirs(model, name, beam) for name in precisions}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    generator = torch.Generator().manual_seed(1)
    for _ in range(rounds + 1):
        src_BS, outputs = ended(sources(generator)), {}
        for name, side in sides.items():
            time.sleep(0.5)  # the other side's threads spin for a while after their work
            with CONTEXTS[name.split()[1]](model):
                begin = clock()
                outputs[name] = side(src_BS)
                seconds = clock() - begin
            speeds[name].append(sum(map(len, outputs[name])) / seconds)
    pairs = {name: (outputs[f"tfm-blocks {name}"], outputs[f"ctranslate2 {name}"]) for name in precisions}
    same = {name: sum(one == other for one, other in zip(*pair, strict=True)) for name, pair in pairs.items()}
    return {name: statistics.median(values[1:]) for name, values in speeds.items()}, same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    keep_freed_memory()  # for both sides, as `tfm translate` does
    if arguments.cpu_time:
        torch.set_num_threads(1)
    precisions = ["float32", "int8"] if arguments.int8 else ["float32"]
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    found, same = measure(SIZES[arguments.size], arguments.beam, arguments.rounds, precisions, clock)
    for name, speed in found.items():
        print(f"{name:19} {speed:10,.0f} output tokens/s")
    for name in precisions:
        ratio = found[f"tfm-blocks {name}"] / found[f"ctranslate2 {name}"]
        print(f"{name}: ratio {ratio:.2f}; {same[name]} of {SENTENCES} sentences the same")
    if arguments.int8:
        for side in ("tfm-blocks", "ctranslate2"):
            print(f"{side}: int8 / float32 {found[f'{side} int8'] / found[f'{side} float32']:.2f}")
