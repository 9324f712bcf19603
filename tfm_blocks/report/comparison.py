"""Comparison of runs: how they differ, what they scored, and which differences are significant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.errors import config_error, counted, listed, shown, suggest
from tfm_blocks.metric_schema import FINAL_SCORES
from tfm_blocks.report.differences import (
    NO_MODELS,
    Factors,
    Group,
    Groups,
    ModelGrid,
    Runs,
    arrange,
    find_factors,
    group_seeds,
    label_runs,
    makes_another,
)
from tfm_blocks.report.display import DISPLAY_ALL, Display
from tfm_blocks.report.rates import (
    Curves,
    RateCurve,
    best_groups,
    curve_of,
    leave_out_choosing_seeds,
    rate_curves,
    rate_notes,
)
from tfm_blocks.runs.listing import find_runs
from tfm_blocks.runs.saved_run import SavedRun

if TYPE_CHECKING:
    from tfm_blocks.report.baseline_tests import BaselineTest
    from tfm_blocks.report.matrix import Matrix

NO_BASELINE = "the matrix has no baseline, because --only leaves out the model of --baseline"
NAMED = 3  # runs that a note names; the others are counted
SIZE_KEYS = [f"data.{key}" for key in ("train", "val", "test", "train_lengths", "test_lengths", "first")]
PRUNED = "pruned"  # state of a job of a sweep
SAME_TOKENS = 0.01  # relative difference below which numbers of tokens count as equal


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs, which differ in `factors`. `notes` name what is missing or not comparable.

    `curves` have the validation losses over learning rates. `best_rate_groups` are the groups with the best rate of
    each curve, and those without a curve. `grid` arranges them by model and task. `matrix` has their scores, if a
    metric was requested or there are several models and several tasks. `renamed` groups have their names in the grid.
    """

    runs: Runs
    factors: Factors
    groups: Groups
    curves: Curves = ()
    best_rate_groups: Groups = ()
    grid: ModelGrid = NO_MODELS
    matrix: Matrix | None = None
    baseline: Group | None = None
    baseline_tests: Sequence[BaselineTest] = ()
    notes: Sequence[str] = ()
    renamed: bool = False

    def label(self, group: Group) -> str:
        """Return the display name of a group, or else its label."""
        place = next((place for place, other in self.grid.groups.items() if other is group), None)
        if not self.renamed or place is None:
            return group.label
        model, task = self.grid.labels[place[0]], self.grid.tasks[place[1]]
        return model if len(self.grid.tasks) == 1 else f"{model}, {task}"


def compare_runs(
    paths: Sequence[Path],
    baseline: str | None = None,
    scores: str | None = None,
    metric: str | None = None,
    *,
    held_out_seeds: bool = False,
    several_lengths: bool = False,
    tested: bool = True,
    display: Display = DISPLAY_ALL,
) -> Comparison:
    """Compare runs, given by their folders or by folders that contain them, and test them against the baseline.

    `scores` names scores that `tfm evaluate --test` kept, instead of the scores of the training. `metric` is the score
    of the matrix. `held_out_seeds` leaves out the runs by which learning rates were chosen. Runs of `several_lengths`
    may have read different numbers of tokens, and have no notes on rates. Only with `tested` there are tests against
    the baseline, which read test sets. `display` chooses and names models and tasks. Raises RunError, and ConfigError
    if the baseline is not one of the runs, or no run has such scores or seeds.
    """
    records = find_runs(paths)
    runs = _with_saved([run for run in records if run.settings or run.state != PRUNED] or records, scores)
    differences = find_factors(runs)
    factors = [factor for factor in differences if makes_another(factor.key)]
    groups = _shorten_labels(group_seeds(runs, factors), factors)
    curves = rate_curves(groups, factors)
    chosen = _find_group(groups, curves, baseline) if baseline else None
    if held_out_seeds:
        groups, curves, chosen = _hold_out(display, groups, curves, factors, chosen)
    compared, noted = best_groups(groups, curves), groups
    whole = arrange(compared, factors)
    grid = display.apply(whole)
    if display.only or display.order:
        compared, curves, noted, chosen = _shown(display, whole, grid, groups, curves, chosen)
    notes = list(_find_notes(grid, noted, curves, held_out=held_out_seeds, several_lengths=several_lengths))
    notes += _absent(records, runs, scores)
    matrix = _score(grid, metric, chosen) if metric or grid.crossed else None
    notes += [NO_BASELINE] * bool(matrix and chosen and chosen not in compared)
    tests, untested = _test(compared, chosen, whole) if chosen and tested else ([], [])
    notes, renamed = [*notes, *untested], bool(display.names)
    return Comparison(runs, differences, groups, curves, compared, grid, matrix, chosen, tests, notes, renamed)


def _find_notes(
    grid: ModelGrid, groups: Groups, curves: Curves, *, held_out: bool, several_lengths: bool
) -> Iterator[str]:
    """Yield what is missing or not comparable, and how learning rates were chosen."""
    columns: dict[int, list[Group]] = defaultdict(list)
    for (_, column), group in grid.groups.items():
        columns[column].append(group)
    runs = [run for group in groups for run in group.runs]
    parts = [[run for group in column for run in group.runs] for column in columns.values()]
    for part in parts if len(parts) > 1 else [runs]:
        yield from unlike(part, several_lengths=several_lengths)
    yield from find_notes(runs)
    if left := [run for group in groups for run in group.runs if run not in group.counted]:
        why = "a newer run, or one that is done, has the same settings and the same seed"
        yield f"not counted over seeds or against a baseline: {_names(left)}: {why}"
    if not several_lengths:
        yield from rate_notes(curves, list(columns.values()), held_out=held_out)


def _test(groups: Groups, baseline: Group, grid: ModelGrid) -> tuple[list[BaselineTest], list[str]]:
    from tfm_blocks.report.baseline_tests import compare_groups  # imports sacreBLEU

    return compare_groups(groups, baseline, grid)


def _shorten_labels(groups: Groups, factors: Factors) -> list[Group]:
    """Return the groups; those at the best rate are named only by what differs among them, such as no rate."""
    compared = best_groups(groups, rate_curves(groups, factors))
    varying = [factor for factor in factors if len({group.setting(factor) for group in compared}) > 1]
    chosen = {id(group) for group in compared}
    return [Group(label_runs(one.runs, varying), one.runs) if id(one) in chosen else one for one in groups]


def matrix_of(comparison: Comparison) -> Matrix | None:
    """Return the matrix, also of a single task or model; None if no run has a score."""
    return comparison.matrix or _score(comparison.grid, None, comparison.baseline)


def _score(grid: ModelGrid, metric: str | None, baseline: Group | None) -> Matrix | None:
    from tfm_blocks.report.matrix import score_matrix  # imports mpmath

    matrix = score_matrix(grid, metric, baseline)
    return matrix if matrix.cells else None


def _with_saved(runs: Runs, name: str | None) -> Runs:
    """Return the runs with the scores of this name, if it is given. Raises ConfigError if no run has them."""
    if name is None:
        return runs
    known = sorted({name for run in runs for name in run.saved_names})
    if name not in known:
        help = suggest(name, known) if known else "tfm evaluate RUNS --beam 4 --test writes scores"
        raise config_error("--scores", f"no run has scores called {shown(name)}", help)
    return [run.with_saved_scores(name) for run in runs]


def _find_group(groups: Groups, curves: Curves, baseline: str) -> Group:
    """Return the group with this label, or with a run of this name or folder, at the best rate of its model."""
    path = Path(baseline)
    for group in groups:
        for run in group.runs:
            if baseline in (run.name, group.label) or path.resolve() == run.folder.resolve():
                return _at_best_rate(group, curves)
    rule = f"must be one of the runs that are compared, but is {baseline}"
    names = [run.name for group in groups for run in group.runs]
    raise config_error("--baseline", rule, suggest(path.name, names))


def _at_best_rate(group: Group, curves: Curves) -> Group:
    """Return the group with the best rate of the same model on the same task."""
    curve = curve_of(group, curves)
    return curve.best.group if curve else group


def _hold_out(
    display: Display, groups: Groups, curves: Curves, factors: Factors, baseline: Group | None
) -> tuple[list[Group], list[RateCurve], Group | None]:
    """Return the groups, curves and baseline without the seeds that chose the rates.

    Raises ConfigError if a group that is shown, or against which one is tested, has no other seeds.
    """
    grid = arrange(best_groups(groups, curves), factors)
    shown = list(display.apply(grid).groups.values())
    needed = [*shown, *(grid.counterpart(group, baseline) for group in shown if baseline)]
    kept, reduced = leave_out_choosing_seeds(groups, curves, needed)
    return kept, reduced, kept[groups.index(baseline)] if baseline else None


def _shown(
    display: Display, whole: ModelGrid, grid: ModelGrid, groups: Groups, curves: Curves, baseline: Group | None
) -> tuple[list[Group], list[RateCurve], list[Group], Group | None]:
    """Return the shown groups and their curves in the order of the grid, these groups at all rates, and the baseline.

    --only leaves out groups whose settings are unknown. The place of a baseline that is not shown is taken by a shown
    group of its model, if there is one.
    """
    compared = [group for _, group in sorted(grid.groups.items())]
    if not display.only:
        compared += [group for group in groups if not group.runs[0].settings]
    curves = [curve for group in compared for curve in curves if curve.best.group == group]
    at_all_rates = [group for group in groups if _at_best_rate(group, curves) in compared]
    rows = {row for (row, _), group in whole.groups.items() if group is baseline}
    others = (group for (row, _), group in sorted(whole.groups.items()) if row in rows and group in compared)
    return compared, curves, at_all_rates, baseline if baseline in compared else next(others, baseline)


def unlike(runs: Runs, *, several_lengths: bool = False) -> Iterator[str]:
    """Yield sentences on what is not comparable between runs that should be."""
    yield from _unlike(runs, "test set", lambda run: run.test_set, "their scores cannot be compared")
    yield from _unlike(runs, "tokenizer", lambda run: run.tokenizer, "loss and perplexity per token cannot be compared")
    yield from _unlike(runs, "objective", lambda run: run.predicted, "their losses cannot be compared")
    for name in (score.name for score in FINAL_SCORES if score.kind in ("corpus", "documents")):
        scored, what = [run for run in runs if name in run.scores], f"way to compute {name}"
        yield from _unlike(scored, what, methodcaller("method_of", name), f"{name} cannot be compared")
    for those in _by([run for run in runs if run.scored_on != "val"], _encoding).values():
        yield from _unlike(those, "validation set", _validation_set, "their validation losses cannot be compared")
    for those in _by(runs, _encoded_data).values():
        yield from _unlike(
            those,
            "training text",
            lambda run: run.start.text.get("text of train", ""),
            "it changed between the trainings",
        )
    if not several_lengths:
        done = [run for run in runs if run.state == "done" and "tokens_seen" in run.numbers]
        seen = [run.numbers["tokens_seen"] for run in done]
        least, most = min(seen, default=0), max(seen, default=0)
        if most - least > SAME_TOKENS * most:
            few, many = (_names([run for run in done if run.numbers["tokens_seen"] == end]) for end in (least, most))
            yield f"not comparable: {few} trained on {least:,.0f} target tokens, and {many} on {most:,.0f}"


def _encoding(run: SavedRun) -> str:
    """Return what turns a text into rows of ids: the vocabularies, and the context of packed text."""
    return str((run.tokenizer, run.start.text.get("vocabulary of sources"), run.settings.get("data.context")))


def _encoded_data(run: SavedRun) -> str:
    """Return the settings of the data with the encoding."""
    return str((_encoding(run), sorted(item for item in run.settings.items() if item[0].startswith("data."))))


def _validation_set(run: SavedRun) -> str:
    """Return a hash of the ids of the validation set, which depend on the encoding; empty if it is not known."""
    return run.start.text.get("text of val", "")


def share_validation_set(runs: Runs) -> bool:
    """Return True unless runs of one encoding are known to have different validation sets."""
    kinds = _by(runs, _encoding).values()
    return all(len({_validation_set(run) for run in those} - {""}) < 2 for those in kinds)


def unlike_contexts(runs: Runs, measure: str) -> Iterator[str]:
    """Yield sentences on runs whose `measure` is of texts packed into rows of different lengths."""
    so = f"a longer context lowers the {measure}"
    yield from _unlike(runs, "data.context", lambda run: str(run.settings.get("data.context") or ""), so)


def find_notes(runs: Runs) -> Iterator[str]:
    """Yield sentences on what is missing, and on versions of torch and precisions."""
    yield from _pooled(runs, ("versions", "torch"), "trained by several versions of torch")
    yield from _pooled(runs, ("precision", "name"), "trained in several precisions")
    for size, those in _by(runs, _size).items():
        if size:
            yield f"probe tasks in the size {size}: {_names(those)}"
    for reason, those in _by([run for run in runs if run.state != "done"], _ending).items():
        yield f"not done: {_names(those)}: {reason}"


def _absent(records: Runs, runs: Runs, scores: str | None) -> Iterator[str]:
    """Yield sentences on runs without the requested scores, and on jobs that were pruned."""
    if missing := [run for run in runs if scores and run.state == "done" and not run.scored_on]:
        weights = f"{scores} of their final weights: {_names(missing)}"
        yield f"without scores {weights}; tfm evaluate writes them with --test"
    if pruned := len(records) - len(runs):
        yield f"pruned before they began: {counted(pruned, 'job')} of a sweep"


def _ending(run: SavedRun) -> str:
    state = run.state or "nothing says how it ended"
    return f"{state} ({run.reason})" if run.reason else state


def _by(runs: Runs, of: Callable[[SavedRun], str]) -> dict[str, list[SavedRun]]:
    kinds: dict[str, list[SavedRun]] = {}
    for run in runs:
        kinds.setdefault(of(run), []).append(run)
    return kinds


def _unlike(runs: Runs, what: str, of: Callable[[SavedRun], str], so: str) -> Iterator[str]:
    """Yield a sentence for each set of runs whose value differs from the most frequent one."""
    kinds = _by([run for run in runs if of(run)], of).values()
    most = max(kinds, key=len, default=[])
    for other in kinds:
        if other is not most:
            yield f"not comparable: {_names(other)} used a different {what} from {_names(most)}; {so}"


def _pooled(runs: Runs, fact: tuple[str, str], how: str) -> Iterator[str]:
    """Yield a sentence if the runs differ in a fact of their start or resumes: `2.13.0`, or `2.13.0, then 2.14.0`."""
    kinds = _by(runs, lambda run: ", then ".join(run.start.values_of(*fact)))
    kinds.pop("", None)
    if len(kinds) > 1:
        kinds_text = "; ".join(f"{_names(those)} by {kind}" for kind, those in kinds.items())
        yield f"{how}, in which the same seed may give other weights: {kinds_text}"


def _size(run: SavedRun) -> str:
    """Return the size of a probe task with the settings that replace numbers of the size; empty for other tasks."""
    size = str(run.settings.get("data.size", ""))
    changed = [f"{key}={run.settings[key]}" for key in SIZE_KEYS if run.settings.get(key) is not None]
    return f"{size}, with {', '.join(changed)}" if size and changed else size


def _names(runs: Runs) -> str:
    return listed([run.name for run in runs], NAMED)
