"""The tables of a comparison, and a comparison on a terminal, as Markdown, LaTeX, CSV or JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tfm_blocks.errors import counted, listed, printable
from tfm_blocks.metric_schema import FINAL_SCORES, METRIC_KEYS, OBJECTIVE, SPEED, find_key, find_score
from tfm_blocks.report.comparison import Comparison, share_validation_set
from tfm_blocks.report.differences import ABSENT, SEED, Factor, Group, show_setting
from tfm_blocks.report.matrix import Matrix
from tfm_blocks.report.matrix_tables import aggregates_table, matrix_rows, matrix_table, mean_rows
from tfm_blocks.report.rates import RateCurve
from tfm_blocks.report.screen import clock, print_json, print_table, screen, split_for_page
from tfm_blocks.report.table import (
    COUNT,
    P_VALUE,
    Cell,
    Column,
    Rows,
    Table,
    Value,
    csv_text,
    latex,
    markdown,
    markdown_text,
    mean_cell,
    numbers,
    p_cell,
    texts,
)
from tfm_blocks.runs.records import Measured, clipped_interval, spread_text
from tfm_blocks.runs.saved_run import SavedRun

SCORES = {score.name: score for score in FINAL_SCORES}
WITH_INTERVAL = [score.name for score in FINAL_SCORES if score.kind != "token"]
WITHOUT_INTERVAL = [score.name for score in FINAL_SCORES if score.kind == "token"]
TESTS = (
    "p, sentences: two-sided paired approximate randomization over test sentences (Riezler and Maxwell 2005), about "
    "twice the p of sacreBLEU's paired bootstrap, which --json has; a small p says that these trained models differ, "
    "and nothing about other seeds; p, seeds: the larger p of permutations of runs and of Welch's t-test; corrected: "
    "for all rows of the same score (Holm, Tarone); 95 %: intervals of the difference"
)
UNFOLDED = 2  # settings that only one value of a factor has and that are listed; more are counted
LISTED = 4  # settings of a factor that a row lists; the others are counted
SCORE = "{:.2f}"  # form


def tables_of(comparison: Comparison) -> list[Table]:
    """Return the tables of a comparison: runs, scores, means over seeds, baseline tests, matrix, other differences."""
    tables = [runs_table(comparison)]
    if any(run.scored_on for run in comparison.runs):
        tables.append(scores_table(comparison))
    if comparison.curves:
        tables.append(rates_table(comparison.curves))
    if any(len(group.counted) > 1 for group in comparison.best_rate_groups):
        tables.append(seeds_table(comparison))
    if comparison.baseline and comparison.baseline_tests:
        tables.append(baseline_table(comparison, comparison.baseline))
    if comparison.matrix:
        tables += tables_of_matrix(comparison.matrix)
    return tables + [factor_table(factor) for factor in comparison.factors if factor.others]


def tables_of_matrix(matrix: Matrix) -> list[Table]:
    """Return the matrix, and the scores over all tasks if there are several seeds."""
    return [matrix_table(matrix), *([aggregates_table(matrix)] if matrix.has_aggregates else [])]


def runs_table(comparison: Comparison) -> Table:
    """Return a row for each run: its settings, its size and cost, and its best validations."""
    seeds = [SEED] if len({run.settings.get(SEED) for run in comparison.runs if run.settings}) > 1 else []
    parents = ["branched off"] if any(run.start.parent for run in comparison.runs) else []
    keys = [key.name for key in METRIC_KEYS if key.best and any(key.name in run.best for run in comparison.runs)]
    columns = [
        *texts("run", "state", *parents, *seeds, *(factor.key for factor in comparison.factors)),
        *numbers(COUNT, "parameters", "multiply-adds"),
        Column("tokens/s", find_key(SPEED).form),
        Column("time", COUNT),
        *numbers("{:.4g}", *(f"best {name}" for name in keys)),
    ]
    rows = [
        [
            run.name,
            run.state,
            *([run.start.parent] if parents else []),
            *(show_setting(run.settings[key]) if key in run.settings else "" for key in seeds),
            *(factor.value_of(run) for factor in comparison.factors),
            *(run.numbers.get(name) for name in ("parameters", "multiply_adds", "tokens_per_second")),
            _time(run.numbers.get("seconds")),
            *(Cell(f"{one.value:.4g} @ {one.step:,}", one.value) if one else None for one in map(run.best.get, keys)),
        ]
        for run in _runs(comparison)
    ]
    return Table("runs", columns, rows)


def scores_table(comparison: Comparison) -> Table:
    """Return a row for each run whose final model was scored, with 95 % intervals."""
    scores, values = _scores(comparison, WITH_INTERVAL), _scores(comparison, WITHOUT_INTERVAL)
    rows = [
        [
            run.name,
            run.scored_on,
            *(_score(run.scores.get(name)) for name in scores),
            *(_value(run, name) for name in values),
        ]
        for run in _runs(comparison)
        if run.scored_on
    ]
    headings = [[SCORES[name].display for name in names] for names in (scores, values)]
    columns = texts("run", "scored on") + numbers(SCORE, *headings[0]) + numbers("{:.4g}", *headings[1])
    return Table("scores and their 95 % intervals", columns, rows)


def _runs(comparison: Comparison) -> Iterator[SavedRun]:
    """Return the runs, with the runs of a group next to each other."""
    return (run for group in comparison.groups for run in group.runs)


def _scores(comparison: Comparison, names: Sequence[str]) -> list[str]:
    """Return the names of the scores that at least one run has."""
    return [name for name in names if any(name in {**run.scores, **run.values} for run in comparison.runs)]


def rates_table(curves: Sequence[RateCurve]) -> Table:
    """Return a row for each learning rate of each model; a column marks the best rate."""
    form = find_key(OBJECTIVE).form
    columns = texts("model", "setting", "") + numbers("{:g}", "value") + numbers(COUNT, "seeds")
    rows: Rows = []
    for curve in curves:
        for rate in curve.rates:
            mark = f"{rate.diverged} diverged" if rate.diverged else ""
            if curve.is_chosen and rate is curve.best:
                mark = f"best, {curve.edge} of the grid" if curve.edge else "best"
            rows.append([curve.label, curve.key, mark, rate.value, len(rate.losses), mean_cell(rate.losses, form)])
    title = f"learning rates by the best {OBJECTIVE}: mean ± standard deviation"
    return Table(title, columns + numbers(form, OBJECTIVE), rows)


def seeds_table(comparison: Comparison) -> Table:
    """Return a row for each group: means and standard deviations over its finished runs.

    One task has a best model for each score that is computed in the same way for all groups.
    """
    several_tasks = len(comparison.grid.tasks) > 1
    scores = [SCORES[name] for name in _scores(comparison, [*WITH_INTERVAL, *WITHOUT_INTERVAL]) if SCORES[name].mean]
    loss = find_key(OBJECTIVE).form
    columns = [
        Column("model"),
        Column("seeds", COUNT),
        Column(f"best {OBJECTIVE}", loss, "" if several_tasks else "lower"),
        *(Column(score.display, score.mean, "" if several_tasks else score.better) for score in scores),
    ]
    groups, rows = comparison.best_rate_groups, []
    validated = [run for group in groups for run in group.counted if OBJECTIVE in run.best]
    methods: list[set[Any]] = [
        {run.method_of("loss") for run in validated if share_validation_set(validated)},
        *({method for group in groups for method in group.methods(score.name)} for score in scores),
    ]
    for group in groups:
        finished = [run for run in group.counted if run.scored_on]
        best = [run.best[OBJECTIVE].value for run in finished if OBJECTIVE in run.best]
        done = len(finished)
        means = [mean_cell(best, loss)]
        for score in scores:
            means.append(mean_cell(group.scores_over_seeds(score.name), score.mean))
        complete = done == len(group.counted)
        means = [
            replace(cell, ranked=complete and len(own) == 1) if cell else None
            for cell, own in zip(means, methods, strict=True)
        ]
        count = str(done) if complete else f"{done} of {len(group.counted)}"
        rows.append([comparison.label(group), Cell(count, done), *means])
    return Table("over seeds: mean ± standard deviation", columns, rows)


def baseline_table(comparison: Comparison, baseline: Group) -> Table:
    """Return a row for each score of each other group."""
    tests = [f"{what}, {over}" for over in ("sentences", "seeds") for what in ("95 %", "p", "corrected")]
    columns = texts("model", "score") + numbers(P_VALUE, "difference", *tests)
    rows: Rows = []
    for test in comparison.baseline_tests:
        score = find_score(test.score)
        form = score.difference
        without = test.seeds_without_score
        mark = f" ({counted(without, 'seed')} without score)" if without else ""
        difference = Cell(form.format(test.difference) + mark, test.difference)
        sentences = interval(test.sentences_interval, form), p_cell(test.sentences), p_cell(test.sentences_corrected)
        seeds = interval(test.seeds_interval, form), p_cell(test.seeds), p_cell(test.seeds_corrected)
        rows.append([comparison.label(test.group), score.display, difference, *sentences, *seeds])
    return Table(f"against {comparison.label(baseline)}", columns, rows, keys=2, note=TESTS)


def interval(ends: tuple[float, float] | None, form: str) -> Cell | None:
    """Return a cell with both ends of an interval."""
    return Cell(f"[{form.format(ends[0])}, {form.format(ends[1])}]", ends[0]) if ends else None


def factor_table(factor: Factor) -> Table:
    """Return the settings that vary with a factor; each row lists what distinguishes its value from most values.

    Settings that no other value has are counted if there are more than a few, since they follow from the value.
    """
    counts = [Counter(column) for column in zip(*factor.values.values(), strict=True)]
    rows = []
    for value, row in factor.values.items():
        settings = list(zip(factor.others, row, counts, strict=True))
        own = [key for key, setting, count in settings if setting != ABSENT and count[ABSENT] == count.total() - 1]
        folded = own if len(own) > UNFOLDED else []
        rare = [
            f"{key} {setting}"
            for key, setting, count in settings
            if 2 * count[setting] <= count.total() and setting != ABSENT and key not in folded
        ]
        rows.append([value, ", ".join([listed(rare, LISTED), *_folded(folded)] if rare else _folded(folded))])
    return Table(f"what else differs by {factor.key}", texts(factor.key, "unlike most"), rows)


def _folded(keys: Sequence[str]) -> list[str]:
    """Count settings by the first part of their key, such as `5 settings of optimizer`."""
    counts = Counter(key.partition(".")[0] for key in keys)
    return [f"{counted(count, 'setting')} of {first} that the others lack" for first, count in counts.items()]


def _time(seconds: float | None) -> Cell | None:
    """Return a duration as `1:02:03`, or as `4.2 s` below a minute."""
    if seconds is None:
        return None
    return Cell(f"{seconds:.1f} s" if seconds < 60 else clock(seconds), seconds)


def _score(score: Measured | None) -> Value:
    """Format a score: `± x` if its interval is symmetric, as for most BLEU; both ends for others and for a fraction.

    An interval without a width is not shown, because it comes from rows that do not vary.
    """
    if score is None or not score.high > score.low:
        return score.value if score else None
    if score.signature:
        return Cell(f"{score.value:.2f} {spread_text(score.value, score.low, score.high)}", score.value)
    return Cell(f"{score.value:.2f} ({score.low:.1f}–{score.high:.1f})", score.value)


def _value(run: SavedRun, name: str) -> Value:
    """Format a logged score and its interval, if known: the larger of the score and half the width has four digits."""
    value, half = run.values.get(name), run.halves.get(name)
    if value is None or not half:
        return value
    decimals = max(0, 3 - math.floor(math.log10(max(abs(value), half))))
    form = f"{{:z.{decimals}f}}"
    return Cell(f"{form.format(value)} {spread_text(value, *clipped_interval(name, value, half), form)}", value)


def show_tables(tables: Sequence[Table], notes: Sequence[str]) -> None:
    """Print the tables, then the notes."""
    for table in tables:
        print_table(table)
    for note in notes:
        screen().print(f"note: {note}")


def print_markdown(tables: Sequence[Table], notes: Sequence[str]) -> None:
    """Print the tables and notes as Markdown."""
    for table in tables:
        print(markdown(table), end="\n\n")
    for note in notes:
        print(f"- {markdown_text(note)}")


def print_latex(tables: Sequence[Table], notes: Sequence[str]) -> None:
    """Print the tables as LaTeX, split into parts that fit a page, and the notes as comments."""
    for table in tables:
        for part in split_for_page(table):
            print(latex(part), end="\n\n")
    for note in notes:
        print(f"% {printable(' '.join(note.split()))}")


def print_csv(comparison: Comparison) -> None:
    """Print an unrounded row for each run; runs that differ only by their seed have the same group."""
    rows: list[dict[str, Any]] = []
    taken = {"group", "run", "state", "reason", *(name for run in comparison.runs for name in run.numbers)}
    columns = [f"settings.{factor.key}" if factor.key in taken else factor.key for factor in comparison.factors]
    for label, run in ((group.label, run) for group in comparison.groups for run in group.runs):
        row: dict[str, Any] = {"group": label, "run": str(run.folder), "state": run.state, "reason": run.reason}
        row |= {name: factor.value_of(run) for name, factor in zip(columns, comparison.factors, strict=True)}
        row |= {"seed": run.settings.get("seed", ""), **run.numbers}
        for name, best in run.best.items():
            row |= {f"best {name}": best.value, f"step of best {name}": best.step}
        for name, score in run.scores.items():
            row |= {name: score.value, f"{name} low": score.low, f"{name} high": score.high}
        row |= {f"{name} half": half for name, half in run.halves.items()}
        rows.append(row | {f"{run.scored_on}/{name}": value for name, value in run.values.items()})
    _print_csv(rows)


def print_matrix_csv(matrix: Matrix) -> None:
    """Print an unrounded row for each cell of the matrix."""
    _print_csv([{**row, "values": " ".join(map(str, row["values"]))} for row in matrix_rows(matrix)])


def _print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    print(csv_text(Table("", texts(*names), [[row.get(name) for name in names] for row in rows])), end="")


def print_comparison_json(comparison: Comparison) -> None:
    """Print all values, unrounded."""
    factors = {
        factor.key: {value: dict(zip(factor.others, others, strict=True)) for value, others in factor.values.items()}
        for factor in comparison.factors
    }
    curves: list[dict[str, Any]] = []
    for curve in comparison.curves:
        rates = [{"value": rate.value, "losses": list(rate.losses), "diverged": rate.diverged} for rate in curve.rates]
        best = {"best": curve.best.value if curve.is_chosen else None, "edge": curve.edge}
        curves.append({"model": curve.label, "key": curve.key, **best, "values": rates})
    groups = []
    for group in comparison.groups:
        runs = []
        for run in group.runs:
            settings = {factor.key: factor.value_of(run) for factor in comparison.factors}
            runs.append(run.describe() | {"seed": run.settings.get("seed"), "settings": settings})
        groups.append({"group": group.label, "runs": runs})
    record = {
        "differences": factors,
        "groups": groups,
        "learning_rates": curves,
        "baseline": comparison.baseline.label if comparison.baseline else None,
        "matrix": list(matrix_rows(comparison.matrix)) if comparison.matrix else [],
        "all_tasks": list(mean_rows(comparison.matrix)) if comparison.matrix else [],
        "against": [{**vars(test), "group": test.group.label} for test in comparison.baseline_tests],
        "notes": comparison.notes,
    }
    print_json(record)


def print_matrix_json(matrix: Matrix, notes: Sequence[str]) -> None:
    """Print the cells of the matrix and the notes, unrounded."""
    print_json({"matrix": list(matrix_rows(matrix)), "all_tasks": list(mean_rows(matrix)), "notes": notes})
