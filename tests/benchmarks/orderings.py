"""Test published orderings of architectures on probe tasks: train both sides under five seeds, test each difference.

Compare each model at its best learning rate. Correct the p-values of all orderings together. The same command resumes.

    python tests/benchmarks/orderings.py --parallel 2
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tfm_blocks.report.comparison import compare_runs
from tfm_blocks.report.differences import Group
from tfm_blocks.runs.saved_run import Setting
from tfm_blocks.scoring.significance import correct, seed_test

LITE = ["experiment=probe/lite", "attention_position=null"]
RATES = "schedule.peak=1e-3,3e-3,1e-2,3e-2"
HIGH_RATES = "schedule.peak=3e-3,1e-2,3e-2"
TUNED = ["seed=1,2,3,4,5", "sweep.tune=schedule.peak"]
BETA = ["mixer=gated_delta_rule", "beta_max=1.0,2.0"]
SWEEPS = {
    "parity": [
        *LITE, "data=parity", "mixer=lstm,attention,retention", "trainer.steps=2000", "schedule.peak=5e-3",
        "seed=1,2,3,4,5",
    ],
    "parity-beta": [*LITE, "data=parity", *BETA, RATES, *TUNED],
    "word-problem": [*LITE, "data=word_problem", *BETA, RATES, *TUNED],
    "mqar": [*LITE, "data=mqar", "data.pairs=4,16", "mixer=attention,retention", "d_model=32", HIGH_RATES, *TUNED],
    "recall": [
        *LITE, "data=in_context_recall,noisy_recall", "data.vocab=64", "mixer=gated_delta_rule,retention", HIGH_RATES,
        *TUNED,
    ],
    "copying": [*LITE, "data=selective_copying", "mixer=gated_delta_rule,retention", RATES, *TUNED],
    "memorisation": [*LITE, "data=memorisation", "mixer=gated_delta_rule,attention", RATES, *TUNED],
    "sort": [*LITE, "data=bucket_sort", "mixer=lstm,attention,rnn", RATES, *TUNED],
    "scan": [
        "experiment=probe/scan", "data.split=length", "data.cutoff=26", "attention_position=null,rotary",
        "position=sinusoidal,none", "sweep.together=[attention_position,position]", "trainer.steps=2000",
        "trainer.validate_every=1000", "seed=1,2,3,4,5",
    ],
    "reach": [
        "experiment=probe/lite", "data=compression", "mixer=restricted_attention", "near=none", "schedule.peak=1e-2",
        "layers=1,1,2,2,3,3", "r=15,16,8,9,5,6", "sweep.together=[layers,r]", "seed=1,2,3,4,5",
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Ordering:
    """Claim that models of `sweep` with the settings `better` score higher than models with the settings `worse`."""

    claim: str
    sweep: str
    better: dict[str, Setting]
    worse: dict[str, Setting]
    score: str = "scaled accuracy"


def mixers(better: str, worse: str, **both: Setting) -> tuple[dict[str, Setting], dict[str, Setting]]:
    """Return the settings of two mixers on the same task."""
    return {"mixer": better, **both}, {"mixer": worse, **both}


def betas(**both: Setting) -> tuple[dict[str, Setting], dict[str, Setting]]:
    """Return the settings of the delta rule with and without negative eigenvalues."""
    return {"beta_max": 2.0, **both}, {"beta_max": 1.0, **both}


def radii(layers: int, r: int, smaller_r: int) -> tuple[dict[str, Setting], dict[str, Setting]]:
    """Return the settings of r and of `smaller_r`, with the same number of layers."""
    return {"layers": layers, "r": r}, {"layers": layers, "r": smaller_r}


LONG = "scaled accuracy@256"
ORDERINGS = [
    Ordering("parity at length 256: LSTM > attention", "parity", *mixers("lstm", "attention"), LONG),
    Ordering("parity at length 256: LSTM > retention", "parity", *mixers("lstm", "retention"), LONG),
    Ordering("parity at length 256: delta rule, β ≤ 2 > β ≤ 1", "parity-beta", *betas(), LONG),
    Ordering("word problem of S₃: delta rule, β ≤ 2 > β ≤ 1", "word-problem", *betas()),
    Ordering("mqar, 4 pairs: attention > retention", "mqar", *mixers("attention", "retention", **{"data.pairs": 4})),
    Ordering("mqar, 16 pairs: attention > retention", "mqar", *mixers("attention", "retention", **{"data.pairs": 16})),
    Ordering(
        "in-context recall: delta rule > retention", "recall",
        *mixers("gated_delta_rule", "retention", **{"data.task": "in_context_recall"}),
    ),
    Ordering(
        "noisy recall: delta rule > retention", "recall",
        *mixers("gated_delta_rule", "retention", **{"data.task": "noisy_recall"}),
    ),
    Ordering("selective copying: delta rule > retention", "copying", *mixers("gated_delta_rule", "retention")),
    Ordering("memorisation: attention > delta rule", "memorisation", *mixers("attention", "gated_delta_rule")),
    Ordering("bucket sort, longer: LSTM > RNN", "sort", *mixers("lstm", "rnn"), "scaled accuracy@100"),
    Ordering("bucket sort, longer: attention > RNN", "sort", *mixers("attention", "rnn"), "scaled accuracy@100"),
    Ordering(
        "SCAN, length split: rotary > absolute positions", "scan",
        {"attention_position": "rotary"}, {"attention_position": None}, "exact",
    ),
    Ordering("restricted attention, distance 15: 1 layer, r = 16 > r = 15", "reach", *radii(1, 16, 15)),
    Ordering("restricted attention, distance 15: 2 layers, r = 9 > r = 8", "reach", *radii(2, 9, 8)),
    Ordering("restricted attention, distance 15: 3 layers, r = 6 > r = 5", "reach", *radii(3, 6, 5)),
]  # fmt: skip


def train(name: str, overrides: list[str], parallel: int) -> None:
    """Train the unfinished jobs of a sweep."""
    options = ["logger=csv", f"sweep.name=orderings-{name}", f"sweep.parallel={parallel}"]
    subprocess.run([sys.executable, "-m", "tfm_blocks", "train", "-m", *options, *overrides], check=True)


def find_group(groups: list[Group], settings: dict[str, Setting]) -> Group:
    """Return the only group with these settings."""
    (group,) = [
        candidate
        for candidate in groups
        if all(candidate.runs[0].settings.get(key, "") == value for key, value in settings.items())
    ]
    return group


def main() -> None:
    """Train the sweeps, test the orderings and print a row for each ordering."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", type=int, default=1, help="train this many runs concurrently")
    parser.add_argument("--only", nargs="*", choices=SWEEPS, help="train and test only these sweeps")
    arguments = parser.parse_args()
    names = arguments.only or list(SWEEPS)
    for name in names:
        train(name, SWEEPS[name], arguments.parallel)
    groups = {name: list(compare_runs([Path("runs", f"orderings-{name}")]).best_rate_groups) for name in names}
    rows = {}
    for ordering in ORDERINGS:
        if ordering.sweep in names:
            sides = [find_group(groups[ordering.sweep], side) for side in (ordering.better, ordering.worse)]
            rows[ordering.claim] = sides, [side.scores_over_seeds(ordering.score) for side in sides]
    tests = {}
    for claim, (_, (better, worse)) in rows.items():
        test = tests[claim] = seed_test(worse, better)
        if test is None:
            sys.exit(f"{claim}: two runs of each side need a score, but there are {len(better)} and {len(worse)}")
    p_values = correct(
        {claim: test.p for claim, test in tests.items()}, {claim: test.least for claim, test in tests.items()}
    )
    print("| ordering | better | other | difference, 95 % interval | p | corrected |\n|---|---|---|---|---|---|")
    for claim, test in tests.items():
        better, worse = (f"{fmean(values):.1f} ({group.runs[0].settings['schedule.peak']:g})"
                         for group, values in zip(*rows[claim], strict=True))  # fmt: skip
        low, high = test.interval or (test.difference, test.difference)
        print(
            f"| {claim} | {better} | {worse} | {test.difference:+.1f} [{low:+.1f}, {high:+.1f}] "
            f"| {test.p:.2g} | {p_values[claim]:.2g} |"
        )


if __name__ == "__main__":
    main()
