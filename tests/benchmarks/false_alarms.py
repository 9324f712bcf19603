"""Run an A/A test: count how often `tfm compare` calls one model under two sets of seeds different.

Train a small model under many seeds. Compare disjoint sets of runs with each other, so that all comparisons are
independent. The same command resumes.

    python tests/benchmarks/false_alarms.py FOLDER --comparisons 200 --seeds 3
"""

import argparse
import contextlib
import io
import itertools
import os
import sys
from pathlib import Path

from scipy.stats import binom

import tfm_blocks as tfm
from tfm_blocks.report.differences import Group
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.scoring.corpus import MEASURES
from tfm_blocks.scoring.significance import correct, seed_test

ALPHA = 0.05
SIZE = ["d_model=16", "d_ff=32", "heads=2", "layers=1", "vocab=300", "dropout=0.1", "logger=csv"]
TEXT = ["data.train=300", "data.val=20", "data.test=20", "data.step_tokens=200"]
LENGTH = ["trainer.steps=20", "trainer.validate_every=20", "trainer.validate_sentences=1", "schedule.warmup=10"]


def train(folder: Path, seed: int) -> Path:
    """Return the run of a seed; train it if it does not exist."""
    run = folder / "runs" / f"seed-{seed}"
    if not (run / "weights.safetensors").is_file():
        os.chdir(folder)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            tfm.train("tiny", overrides=[*SIZE, *TEXT, *LENGTH], seed=seed, name=f"seed-{seed}")
    return run


def finished_runs(folder: Path, count: int) -> list[Path]:
    """Return the first `count` runs of the folder by seed; train missing runs with the next seeds."""
    finished = {
        int(path.parent.name[5:]) for path in folder.glob("runs/seed-*/status.json") if '"done"' in path.read_text()
    }
    seeds = (seed for seed in itertools.count(1) if seed not in finished)
    finished |= set(itertools.islice(seeds, max(0, count - len(finished))))
    return [train(folder, seed) for seed in sorted(finished)[:count]]


def p_values(first: list[Path], second: list[Path]) -> dict[str, tuple[float, float]]:
    """Return the p-value over seeds and the corrected p-value of each score, corrected for all scores."""
    groups = [Group("", [SavedRun(run) for run in runs]) for runs in (first, second)]
    tests = [seed_test(*(group.scores_over_seeds(name) for group in groups)) for name in MEASURES]
    p = {index: test.p for index, test in enumerate(tests) if test}
    corrected = correct(p, {index: test.least for index, test in enumerate(tests) if test})
    return {name: (p[index], corrected[index]) for index, name in enumerate(MEASURES) if index in p}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--comparisons", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    folder, side, count = arguments.folder.resolve(), arguments.seeds, arguments.comparisons
    folder.mkdir(parents=True, exist_ok=True)
    runs = finished_runs(folder, 2 * side * count)
    pairs = [runs[first : first + 2 * side] for first in range(0, len(runs), 2 * side)]
    results = [p_values(pair[:side], pair[side:]) for pair in pairs]
    low, high = (int(bound) for bound in binom.interval(0.95, count, ALPHA))
    print(f"{count} independent comparisons of {side} and {side} seeds; at {ALPHA:.0%}, {low} to {high} are expected")
    for name in results[0]:
        print(f"{name}: {sum(scores[name][0] <= ALPHA for scores in results)} rejections")
    print(f"any score, corrected: {sum(min(p for _, p in scores.values()) <= ALPHA for scores in results)} rejections")


if __name__ == "__main__":
    sys.exit(main())
