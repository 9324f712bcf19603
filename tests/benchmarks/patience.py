"""Compare both stopping rules of beam search, and beams of growing size, on the sentences of a trained run.

    python tests/benchmarks/patience.py runs/NAME --src FILE

Alternate both rules in one process. For each beam and length penalty, print the median CPU seconds of both rules, and
the number of sentences whose translation by the patient rule scores better. Then print the CPU time of a sentence for
beams of 2 to 256.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from tfm_blocks.data.files import read_lines
from tfm_blocks.launch.process_settings import keep_freed_memory
from tfm_blocks.network.packed import packed
from tfm_blocks.translation.settings import LARGEST_BEAM, LengthPenalty, Search
from tfm_blocks.translation.translator import Translation, Translator

PENALTIES: tuple[tuple[LengthPenalty, float], ...] = (
    ("gnmt", 0.6),
    ("gnmt", 1.0),
    ("gnmt", 1.5),
    ("plain", 1.0),
    ("plain", 1.5),
)
TOLERANCE = 1e-5  # ignore smaller differences of scores: a different batch alone causes them


def timed(translator: Translator, lines: Sequence[str], search: Search) -> tuple[float, list[Translation]]:
    """Return the CPU seconds and the best translation of each sentence."""
    start = time.process_time()
    beams = translator.search(lines, search)
    return time.process_time() - start, [beam[0] for beam in beams]


def compare(translator: Translator, lines: Sequence[str], search: Search, rounds: int) -> str:
    """Return a row: seconds of the first and the patient rule, their ratio, sentences with a better score, tokens."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    translations = {}
    for _ in range(rounds):
        for patient in seconds:
            elapsed, translations[patient] = timed(translator, lines, replace(search, patient=patient))
            seconds[patient].append(elapsed)
    first, second = (statistics.median(seconds[patient]) for patient in (False, True))
    better = sum(
        patient_rule.score > first_rule.score + TOLERANCE
        for first_rule, patient_rule in zip(*translations.values(), strict=True)
    )
    tokens = [sum(len(best.ids) for best in translations[patient]) / len(lines) for patient in (False, True)]
    return f"{first:8.2f} {second:8.2f} {second / first:6.2f} {better:7} {tokens[0]:7.2f} {tokens[1]:7.2f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--src", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)  # use one thread: CPU seconds of several threads include their waiting
    model = Translator.load(arguments.run)
    texts = list(islice(read_lines(arguments.src, "--src"), arguments.lines))
    with packed(model.network):
        print("beam penalty     first  patient  ratio  better  tokens before and after")
        for beam in (4, 5):
            for penalty, alpha in PENALTIES:
                row = compare(model, texts, Search(beam=beam, penalty=penalty, alpha=alpha), arguments.rounds)
                print(f"{beam:4} {penalty:5} {alpha} {row}", flush=True)
        for beam in (2, 4, 8, 16, 32, 64, 128, LARGEST_BEAM):
            elapsed, _ = timed(model, texts[:8], Search(beam=beam))
            print(f"beam {beam:3}: {elapsed / 8:.3f} s a sentence", flush=True)
