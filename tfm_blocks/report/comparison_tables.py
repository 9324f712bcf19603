"""The tables of a comparison, independent of the output format."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from tfm_blocks.metric_schema import FINAL_SCORES, METRIC_KEYS, OBJECTIVE, SPEED, FinalScore, find_key
from tfm_blocks.report.comparison import Comparison
from tfm_blocks.report.differences import SEED, Factor, Group, show_setting
from tfm_blocks.report.rates import rates_sheet
from tfm_blocks.report.screen import clock
from tfm_blocks.report.table import Cell, Sheet
from tfm_blocks.runs.record import Measured, RunRecord

if TYPE_CHECKING:
    from tfm_blocks.report.baseline_tests import Against

SCORES = {score.name: score for score in FINAL_SCORES}
WITH_INTERVAL = [score.name for score in FINAL_SCORES if score.kind != "token"]
WITHOUT_INTERVAL = [score.name for score in FINAL_SCORES if score.kind == "token"]


def sheets_of(comparison: Comparison) -> list[Sheet]:
    """Return the tables of a comparison: runs, scores, means over seeds, baseline tests, other differences."""
    found = [runs_sheet(comparison)]
    if any(run.scored_on for run in comparison.runs):
        found.append(scores_sheet(comparison))
    if comparison.curves:
        found.append(rates_sheet(comparison.curves))
    if any(len(group.counted) > 1 for group in comparison.compared):
        found.append(seeds_sheet(comparison))
    if comparison.baseline:
        found.append(against_sheet(comparison, comparison.baseline))
    return found + [factor_sheet(factor) for factor in comparison.factors if factor.others]


def runs_sheet(comparison: Comparison) -> Sheet:
    """Return a row for each run: its settings, its size and cost, and its best validations."""
    seeds = len({run.settings.get(SEED) for run in comparison.runs if run.settings}) > 1
    best = [key.name for key in METRIC_KEYS if key.best and any(key.name in run.best for run in comparison.runs)]
    words = ["run", "state", *([SEED] if seeds else []), *(factor.key for factor in comparison.factors)]
    rows = []
    for run in _runs(comparison):
        settings = [_text(Group("", [run]).setting(factor)) for factor in comparison.factors]
        seed = [_text(show_setting(run.settings[SEED]) if SEED in run.settings else "")] if seeds else []
        rows.append(
            [_text(run.name), _text(run.state), *seed, *settings, *_sizes(run), *(_best(run, name) for name in best)]
        )
    numbers = ["parameters", "multiply-adds", "tokens/s", "time", *(f"best {name}" for name in best)]
    return Sheet("runs", [*words, *numbers], rows, len(words))


def scores_sheet(comparison: Comparison) -> Sheet:
    """Return a row for each run whose final model was scored, with 95 % intervals."""
    scores = _scores(comparison)
    rows = [
        [
            _text(run.name),
            _text(run.scored_on),
            *(_score(run.scores.get(name)) for name in scores),
            *(_number(run.values.get(name), "{:.4g}") for name in WITHOUT_INTERVAL),
        ]
        for run in _runs(comparison)
        if run.scored_on
    ]
    return Sheet("scores and their 95 % intervals", ["run", "scored on", *scores, *WITHOUT_INTERVAL], rows, 2)


def _runs(comparison: Comparison) -> Iterator[RunRecord]:
    """Return the runs, with the runs of a group next to each other."""
    return (run for group in comparison.groups for run in group.runs)


def _scores(comparison: Comparison) -> list[str]:
    return [name for name in WITH_INTERVAL if any(name in run.scores for run in comparison.runs)]


def seeds_sheet(comparison: Comparison) -> Sheet:
    """Return a row for each group: means and standard deviations over its counted runs."""
    scores = [SCORES[name] for name in (*_scores(comparison), *WITHOUT_INTERVAL) if SCORES[name].mean]
    columns = ["model", "seeds", f"best {OBJECTIVE}", *(score.name for score in scores)]
    rows = []
    for group in comparison.compared:
        best = [run.best[OBJECTIVE].value for run in group.counted if OBJECTIVE in run.best]
        spread = [_spread(best, find_key(OBJECTIVE).form)]
        spread += [_spread(_over_seeds(group, score), score.mean) for score in scores]
        done = sum(bool(run.scored_on) for run in group.counted)
        count = str(done) if done == len(group.counted) else f"{done} of {len(group.counted)}"
        rows.append([_text(group.label), Cell(count, done), *spread])
    return Sheet("over seeds: mean ± standard deviation", columns, rows, 1)


def _over_seeds(group: Group, score: FinalScore) -> list[float]:
    """Return the values to average: the mean of a score with an interval needs one test set and one method."""
    if score.kind == "token":
        return [run.values[score.name] for run in group.counted if score.name in run.values]
    return group.over_seeds(score.name)


def against_sheet(comparison: Comparison, baseline: Group) -> Sheet:
    """Return a row for each score of each other group."""
    tests = [f"{what}, {over}" for over in ("sentences", "seeds") for what in ("95 %", "p", "corrected")]
    rows = [_against(one) for one in comparison.against]
    return Sheet(f"against {baseline.label}", ["model", "score", "difference", *tests], rows, 2, keys=2)


def _against(one: Against) -> list[Cell]:
    form = SCORES[one.score].difference
    return [
        _text(one.group.label),
        _text(one.score),
        _number(one.difference, form),
        _interval(one.sentences_interval, form),
        *(_number(p, "{:.4f}") for p in (one.sentences, one.sentences_corrected)),
        _interval(one.seeds_interval, form),
        *(_number(p, "{:.4f}") for p in (one.seeds, one.seeds_corrected)),
    ]


def _interval(ends: tuple[float, float] | None, form: str) -> Cell:
    return Cell("") if ends is None else Cell(f"[{form.format(ends[0])}, {form.format(ends[1])}]", ends[0])


def factor_sheet(factor: Factor) -> Sheet:
    """Return the settings that vary with a factor; each row lists what distinguishes its value from most values."""
    counts = [Counter(column) for column in zip(*factor.values.values(), strict=True)]
    rows = []
    for value, row in factor.values.items():
        rare = [
            f"{key} {one}"
            for key, one, count in zip(factor.others, row, counts, strict=True)
            if 2 * count[one] <= count.total()
        ]
        rows.append([_text(value), _text(", ".join(rare))])
    return Sheet(f"what else differs by {factor.key}", [factor.key, "unlike most"], rows, 2)


def show_seconds(seconds: float) -> str:
    """Return a duration as `1:02:03`, or as `4.2 s` below a minute."""
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


def _sizes(run: RunRecord) -> list[Cell]:
    parameters, cost, speed = (run.numbers.get(name) for name in ("parameters", "multiply_adds", "tokens_per_second"))
    seconds = run.numbers.get("seconds")
    time = Cell(show_seconds(seconds), seconds) if seconds is not None else Cell("")
    return [_number(parameters, "{:,.0f}"), _number(cost, "{:,.0f}"), _number(speed, find_key(SPEED).form), time]


def _best(run: RunRecord, name: str) -> Cell:
    best = run.best.get(name)
    return Cell(f"{best.value:.4g} @ {best.step:,}", best.value) if best else Cell("")


def _score(score: Measured | None) -> Cell:
    """Format a score: `± x` if its interval is symmetric, as for BLEU; both ends for a fraction."""
    if score is None:
        return Cell("")
    if math.isnan(score.low):
        return _number(score.value, "{:.2f}")
    if score.signature:
        return Cell(f"{score.value:.2f} ± {score.value - score.low:.2f}", score.value)
    return Cell(f"{score.value:.2f} ({score.low:.1f}–{score.high:.1f})", score.value)


def _spread(values: Sequence[float], form: str) -> Cell:
    if not values:
        return Cell("")
    spread = f" ± {form.format(stdev(values))}" if len(values) > 1 else ""
    return Cell(form.format(fmean(values)) + spread, fmean(values))


def _text(text: str) -> Cell:
    return Cell(text)


def _number(value: float | None, form: str) -> Cell:
    return Cell("") if value is None else Cell(form.format(value), value)
