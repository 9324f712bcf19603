"""Peak resident memory and time from text files to batches: python tests/benchmarks/corpus_memory.py --pairs 5000000.

The text is generated, about 1.7 GB for 5 million pairs: words drawn by Zipf's law from a million, 5 to 45 a line.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from tfm_blocks.data.layout import Sides
from tfm_blocks.data.plan import epoch_plan
from tfm_blocks.data.prepare import prepare
from tfm_blocks.data.settings import TextSettings

WORDS = 1_000_000
CHUNK = 20_000
LETTERS = "etaoinshrdlucmfwypvbgkjqxzäöüßéèñç"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pairs", type=int, default=5_000_000)
    arguments.add_argument("--vocab", type=int, default=37_000)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if (child := os.fork()) == 0:  # so that the generator's memory is not counted
            generate(Path(folder), chosen.pairs)
            os._exit(0)
        os.waitpid(child, 0)
        report(Path(folder), chosen.vocab)


def generate(folder: Path, pairs: int) -> None:
    random = np.random.default_rng(1)
    weights = 1 / np.arange(1, len(LETTERS) + 1)
    letters = random.choice(list(LETTERS), size=(WORDS, 12), p=weights / weights.sum())
    words = ["".join(row[:size]) for row, size in zip(letters, random.integers(2, 13, WORDS), strict=True)]
    for name, count in (("train", pairs), ("val", 2000), ("test", 2000)):
        for side in ("src", "tgt"):
            with (folder / f"{name}.{side}").open("w", encoding="utf-8") as file:
                for start in range(0, count, CHUNK):
                    ends = np.cumsum(random.integers(5, 46, min(CHUNK, count - start)))
                    drawn = [words[rank] for rank in (WORDS ** random.random(ends[-1])).astype(int) - 1]
                    lines = (" ".join(drawn[first:last]) for first, last in zip([0, *ends], ends, strict=False))
                    file.writelines(f"{line}.\n" for line in lines)


def report(folder: Path, vocab: int) -> None:
    settings = TextSettings(
        kind="text",
        dir=str(folder),
        cache=str(folder / "cache"),
        **{name: {"src": f"{name}.src", "tgt": f"{name}.tgt"} for name in ("train", "val", "test")},
        step_tokens=25_000,
        batch_tokens=25_000,
        max_length=128,
    )
    size = sum(path.stat().st_size for path in folder.glob("*.*"))
    print(f"text: {size / 1e9:.2f} GB; at the start {peak()}")
    begun = time.perf_counter()
    prepare(settings, vocab)
    print(f"first preparation: {time.perf_counter() - begun:.0f} s, {peak()}")
    begun = time.perf_counter()
    train = prepare(settings, vocab, tell=lambda line: None).train
    print(f"second, from the cache: {time.perf_counter() - begun:.1f} s, {peak()}")
    begun = time.perf_counter()
    layout = Sides(["src"])
    widths_NC, labels_N = layout.widths_NC(train), layout.labels_N(train)
    sizes = {"step_tokens": settings.step_tokens, "batch_tokens": settings.batch_tokens}
    plan = epoch_plan(widths_NC, labels_N, seed=1, epoch=0, **sizes)
    print(f"plan of an epoch, {len(plan):,} steps: {time.perf_counter() - begun:.1f} s, {peak()}")
    begun = time.perf_counter()
    steps = range(min(1000, len(plan)))
    batches = (layout.batch(train, rows_B) for k in steps for rows_B in plan[k].share(0, 1))
    padded = sum(ids.numel() for batch in batches for ids in batch.inputs.values())
    real = sum(int(plan[k].widths_NC.sum()) for k in steps)
    print(f"batches of {len(steps):,} steps, {real / padded:.1%} full: {time.perf_counter() - begun:.1f} s, {peak()}")


def peak() -> str:
    return f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"


if __name__ == "__main__":
    main()
