"""Measure the peak resident memory and the time from text files to batches.

    python tests/benchmarks/corpus_memory.py --pairs 5000000

Generate the text, about 1.7 GB for 5 million pairs. A line has 5 to 45 words, drawn by Zipf's law from a million words.
With `--documents blank_lines --megabytes 300`, prepare plain text in four files instead, with 1 to 39 lines a document.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tfm_blocks.data.layout import Layout, PlainText, Sides
from tfm_blocks.data.plan import Ranks, epoch_plan
from tfm_blocks.data.prepare import prepare
from tfm_blocks.data.settings import LmSettings, TextSettings

WORDS = 1_000_000
SHARDS = 4
SIZES = {"step_tokens": 25_000, "batch_tokens": 25_000}
CHUNK = 20_000
LETTERS = "etaoinshrdlucmfwypvbgkjqxzäöüßéèñç"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5_000_000)
    parser.add_argument(
        "--documents", choices=("lines", "blank_lines", "jsonl"), help="generate plain text instead of pairs"
    )
    parser.add_argument("--megabytes", type=int, default=300, help="set the size of the plain text")
    parser.add_argument("--vocab", type=int, default=37_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if (child := os.fork()) == 0:  # fork: the memory of the generator does not count
            if arguments.documents:
                generate_documents(Path(folder), arguments.documents, arguments.megabytes)
            else:
                generate_pairs(Path(folder), arguments.pairs)
            os._exit(0)
        os.waitpid(child, 0)
        if arguments.documents:
            report(Path(folder), document_settings(Path(folder), arguments.documents), PlainText(), arguments.vocab)
        else:
            report(Path(folder), pair_settings(Path(folder)), Sides(["src"]), arguments.vocab)


def sentences() -> Iterator[list[str]]:
    """Yield lists of CHUNK random sentences without end."""
    random = np.random.default_rng(1)
    weights = 1 / np.arange(1, len(LETTERS) + 1)
    letters = random.choice(list(LETTERS), size=(WORDS, 12), p=weights / weights.sum())
    words = ["".join(row[:size]) for row, size in zip(letters, random.integers(2, 13, WORDS), strict=True)]
    while True:
        ends = np.cumsum(random.integers(5, 46, CHUNK))
        drawn = [words[rank] for rank in (WORDS ** random.random(ends[-1])).astype(int) - 1]
        yield [" ".join(drawn[first:last]) + "." for first, last in zip([0, *ends], ends, strict=False)]


def generate_pairs(folder: Path, pairs: int) -> None:
    chunks = sentences()
    for name, count in (("train", pairs), ("val", 2000), ("test", 2000)):
        for side in ("src", "tgt"):
            with (folder / f"{name}.{side}").open("w", encoding="utf-8") as file:
                for first in range(0, count, CHUNK):
                    file.writelines(f"{line}\n" for line in next(chunks)[: count - first])


def generate_documents(folder: Path, kind: str, megabytes: int) -> None:
    random, chunks = np.random.default_rng(2), sentences()
    for name, size in (("val", 1), ("test", 1), *((f"train-{shard}", megabytes / SHARDS) for shard in range(SHARDS))):
        with (folder / f"{name}.txt").open("w", encoding="utf-8") as file:
            while file.tell() < size * 1e6:
                lines = next(chunks)
                ends = np.cumsum(random.integers(1, 40, CHUNK)).clip(max=CHUNK)
                texts = (
                    "\n".join(lines[first:last]) for first, last in zip([0, *ends], ends, strict=False) if first < last
                )
                if kind == "jsonl":
                    file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
                else:
                    file.writelines(f"{text}\n\n" for text in texts)


def pair_settings(folder: Path) -> TextSettings:
    files = {name: {"src": f"{name}.src", "tgt": f"{name}.tgt"} for name in ("train", "val", "test")}
    return TextSettings(kind="text", dir=str(folder), cache=str(folder / "cache"), **files, **SIZES, max_length=128)


def document_settings(folder: Path, kind: str) -> LmSettings:
    files = {"train": ["train-*.txt"], "val": ["val.txt"], "test": ["test.txt"]}
    return LmSettings(
        kind="lm", dir=str(folder), cache=str(folder / "cache"), **files, **SIZES, documents=kind, context=1024
    )


def report(folder: Path, settings: TextSettings | LmSettings, layout: Layout, vocab: int) -> None:
    size = sum(path.stat().st_size for path in folder.glob("*.*"))
    print(f"text: {size / 1e9:.2f} GB; at the start {peak()}")
    start, cpu = time.perf_counter(), time.process_time()
    prepare(settings, vocab)
    cpu = time.process_time() - cpu
    print(f"first preparation: {time.perf_counter() - start:.0f} s, {cpu:.0f} CPU seconds, {peak()}", flush=True)
    start = time.perf_counter()
    train = prepare(settings, vocab, tell=lambda line: None).train
    print(f"second, from the cache: {time.perf_counter() - start:.1f} s, {peak()}")
    start = time.perf_counter()
    plan = epoch_plan(layout.widths_NC(train), layout.labels_N(train), seed=1, epoch=0, **SIZES)
    print(f"plan of an epoch, {len(plan):,} steps: {time.perf_counter() - start:.1f} s, {peak()}")
    start = time.perf_counter()
    steps = range(min(1000, len(plan)))
    batches = (layout.batch(train, rows_B) for k in steps for rows_B in plan[k].share(Ranks(0, 1)))
    padded = sum(ids.numel() for batch in batches for ids in batch.inputs.values())
    real = sum(int(plan[k].widths_NC.sum()) for k in steps)
    print(f"batches of {len(steps):,} steps, {real / padded:.1%} full: {time.perf_counter() - start:.1f} s, {peak()}")


def peak() -> str:
    return f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"


if __name__ == "__main__":
    main()
