"""Compare greedy and beam search with CTranslate2 on the same weights, alternating with a process of CTranslate2.

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
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from decoding import LENGTH, SENTENCES, SIZES, VOCAB, sources
from torch import Tensor

import tfm_blocks as tfm
from tfm_blocks.data.layout import EOS, PAD
from tfm_blocks.exchange.ctranslate2.export import write_network
from tfm_blocks.launch.process_settings import keep_freed_memory
from tfm_blocks.network.graph import Network
from tfm_blocks.network.packed import packed, quantized
from tfm_blocks.translation.beam import beam_search, gnmt
from tfm_blocks.translation.search import Bounds, one_by_one

TOKENS = ["<pad>", "<s>", "</s>", "<unk>", *(f"t{number}" for number in range(4, VOCAB))]
IDS = {token: number for number, token in enumerate(TOKENS)}
SIDE = Path(__file__).with_name("ctranslate2_side.py")


def with_eos(src_BS: Tensor) -> Tensor:
    """Return the sentences with eos as their last token. The exported model adds eos itself."""
    return src_BS.scatter(1, (src_BS != PAD).sum(1, keepdim=True) - 1, EOS)


Translate = Callable[[Tensor], tuple[float, list[list[int]]]]
"""Translate src_BS; return the seconds and the ids of each translation."""

CONTEXTS = {"float32": packed, "int8": quantized}  # enter one; `tfm translate` enters it once for all its input
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def ours(model: Network, precision: str, beam: int, clock: str) -> Translate:
    def search(src_BS: Tensor) -> list[list[int]]:
        lengths_B = torch.full((len(src_BS),), LENGTH)
        bounds = Bounds(lengths_B, lengths_B, torch.empty(len(src_BS), 0, dtype=torch.int64))
        if beam == 1:
            return [hypothesis.ids for hypothesis in one_by_one(model, {"src": src_BS}, bounds)]
        return [best.ids for best, *_ in beam_search(model, {"src": src_BS}, bounds, beam=beam, penalty=gnmt(0.6))]

    def translate(src_BS: Tensor) -> tuple[float, list[list[int]]]:
        with CONTEXTS[precision](model):
            start = CLOCKS[clock]()
            outputs = search(src_BS)
            return CLOCKS[clock]() - start, outputs

    return translate


def theirs(model: Network, precision: str, beam: int, clock: str) -> Translate:
    with tempfile.TemporaryDirectory() as folder:
        write_network(model, TOKENS, Path(folder), precision, "base")
        numbers = [str(number) for number in (beam, LENGTH, torch.get_num_threads())]
        side = subprocess.Popen(
            [sys.executable, str(SIDE), folder, precision, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def translate(src_BS: Tensor) -> tuple[float, list[list[int]]]:
            texts = [[TOKENS[token_id] for token_id in row if token_id not in (PAD, EOS)] for row in src_BS.tolist()]
            assert side.stdin and side.stdout
            print(json.dumps(texts), file=side.stdin, flush=True)
            line = side.stdout.readline()
            assert line, f"{SIDE.name} ended with status {side.wait()}"
            reply = json.loads(line)
            return reply[clock], [[IDS[token] for token in text] for text in reply["texts"]]

        translate(with_eos(sources(torch.Generator(), 1)))  # the model is loaded before the folder is deleted
    return translate


def measure(
    size: dict[str, int], beam: int, sentences: int, rounds: int, precisions: Sequence[str], clock: str
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the median output tokens/s of each side, and the number of identical translations of each precision.

    Only the translations of the last round are compared.
    """
    model = tfm.build("base", vocab=VOCAB, **size).eval()
    sides = {f"tfm-blocks {name}": ours(model, name, beam, clock) for name in precisions}
    sides |= {f"ctranslate2 {name}": theirs(model, name, beam, clock) for name in precisions}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    generator = torch.Generator().manual_seed(1)
    for _ in range(rounds + 1):
        src_BS, outputs = with_eos(sources(generator, sentences)), {}
        for name, side in sides.items():
            time.sleep(0.5)  # wait: the other side's threads spin for a while after their work
            seconds, outputs[name] = side(src_BS)
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
    parser.add_argument("--sentences", type=int, default=SENTENCES, help="sentences of a batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    keep_freed_memory()  # as `tfm translate` does
    if arguments.cpu_time:
        torch.set_num_threads(1)
    size, precisions = SIZES[arguments.size], ["float32", "int8"] if arguments.int8 else ["float32"]
    clock = "cpu" if arguments.cpu_time else "wall"
    medians, identical = measure(size, arguments.beam, arguments.sentences, arguments.rounds, precisions, clock)
    for name, speed in medians.items():
        print(f"{name:19} {speed:10,.0f} output tokens/s")
    for name in precisions:
        ratio = medians[f"tfm-blocks {name}"] / medians[f"ctranslate2 {name}"]
        print(f"{name}: ratio {ratio:.2f}; {identical[name]} of {arguments.sentences} sentences the same")
    if arguments.int8:
        for side in ("tfm-blocks", "ctranslate2"):
            print(f"{side}: int8 / float32 {medians[f'{side} int8'] / medians[f'{side} float32']:.2f}")
