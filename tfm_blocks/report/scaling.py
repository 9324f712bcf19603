"""`tfm compare --scaling`: a ladder of runs of several sizes and lengths, the law of their losses, and its answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

from tfm_blocks.errors import ConfigError, config_error, listed
from tfm_blocks.metric_schema import BITS_PER_BYTE, EQUAL_LOSS, OBJECTIVE, FinalScore, find_score
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.weights import count_without_embeddings
from tfm_blocks.report.comparison import NAMED, Comparison, share_validation_set, unlike_contexts
from tfm_blocks.report.differences import (
    ABSENT,
    RATES,
    RUNG,
    Factor,
    Group,
    Groups,
    Runs,
    label_setting,
    names_models,
    settings_of,
    show_setting,
    without_seed,
)
from tfm_blocks.report.rates import SMALL, best_groups, rate_curves
from tfm_blocks.runs.files import Setting, read_bytes
from tfm_blocks.runs.folder import MODEL as MODEL_FILE
from tfm_blocks.runs.model import read_spec
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.scoring.scaling_law import ALIKE, TERMS, Estimate, LadderFit, LadderPoint, fit_ladder, fit_smaller
from tfm_blocks.scoring.significance import correct


@dataclass(frozen=True)
class Ladder:
    """The final losses of runs of several sizes and lengths, and their scaling law.

    `with_trends` is a second fit, in which the factor of each model may change with compute; None if the runs do not
    determine it. `notes` name the runs that are left out, and what the sizes cannot show. `score` stands in place of
    the loss.
    """

    fit: LadderFit
    with_trends: LadderFit | None
    notes: Sequence[str]
    score: FinalScore | None = None

    @property
    def measure(self) -> str:
        """Return the name of what the law describes: the loss, `1 - exact match`, or `bits per byte`."""
        if self.score is None:
            return OBJECTIVE
        return f"1 - {self.score.display}" if self.score.in_percent else self.score.display

    @property
    def axis_label(self) -> str:
        """Return the label of an axis of the loss or score."""
        return self.measure if self.score else "validation loss"

    @property
    def largest(self) -> float:
        """Return the largest compute of a run, in operations."""
        return max(point.compute for point in self.fit.points)

    @cached_property
    def smaller(self) -> LadderFit | str:
        """Return the fit without the largest size of each model, or why there is none."""
        try:
            return fit_smaller(self.fit.points, self.fit.models)
        except ConfigError as error:
            return error.problems[0].rule

    def corrected(self, fit: LadderFit | None, statistic: Callable[[LadderFit, int], Estimate]) -> dict[int, float]:
        """Return the p-value of a statistic of each model but the baseline, corrected for all of them (Holm 1979)."""
        return correct({model: statistic(fit, model).p for model in range(1, len(fit.models))} if fit else {})


def read_ladder(comparison: Comparison, plugins: Sequence[str] = (), metric: str | None = None) -> Ladder:
    """Fit a scaling law to the losses of the last validations of the finished runs of a comparison.

    Models differ in their name, or in another setting that is a name, such as `mixer`; numbers distinguish the rungs.
    Of several learning rates of a model and size, only the one with the most runs counts, or of these the one with the
    most finished runs, or of these the best one; others were only tried. Runs from which others branched off before any
    decay are left out. With `metric`, the distance of this score from 100 % stands in place of the loss. Raises
    ConfigError if the runs do not determine the law, or cannot be compared, and RunError if a run has no model.
    """
    parents = {path for run in comparison.runs for path in _parent_folders(run)}
    score = find_score(metric) if metric else None
    kept, left = _select_runs(comparison, parents, score)
    runs = [run for _, run, _ in kept]
    _expect_comparable(runs, score)
    rows = [settings_of(run) for run in runs]
    keys = [key for factor in comparison.factors if (key := _naming_key(factor, rows))]
    points = [
        LadderPoint(
            model=", ".join(label_setting(key, show_setting(row.get(key, ABSENT))) for key in keys) or run.model,
            parameters=size,
            tokens=run.numbers["tokens_seen"],
            loss=loss,
            with_embeddings=whole,
        )
        for row, (_, run, loss), (size, whole) in zip(rows, kept, map(_sizes(plugins), runs), strict=True)
    ]
    _expect_seeds({id(point): group for point, (group, *_) in zip(points, kept, strict=True)}, points)
    usable = [run for run in comparison.runs if not _why_left_out(run, parents, 1.0, is_counted=True)]
    models = _baseline_first(runs, points, comparison.baseline, usable)
    try:
        with_trends = fit_ladder(points, models, trend=True)
    except ConfigError:
        with_trends = None
    fit = fit_ladder(points, models)
    contexts: Iterable[str] = []
    if score is None or score.name == BITS_PER_BYTE:
        contexts = unlike_contexts(runs, score.display if score else "loss per token")
    return Ladder(fit, with_trends, [*_notes(fit, runs, left), *contexts], score)


def _select_runs(
    comparison: Comparison, parents: Collection[Path], score: FinalScore | None
) -> tuple[list[tuple[Group, SavedRun, float]], dict[str, list[SavedRun]]]:
    """Return the runs in the fit with their groups and losses, and the others by reason. Raises ConfigError."""
    left: dict[str, list[SavedRun]] = {}
    kept: list[tuple[Group, SavedRun, float]] = []
    tried = _groups_with_most_runs(comparison.groups)
    best = best_groups(tried, rate_curves(tried, comparison.factors))
    groups = {id(run): group for group in best for run in group.counted}
    for run in comparison.runs:
        loss, group = _distance(run, score) if score else run.last_validation_loss, groups.get(id(run))
        if reason := _why_left_out(run, parents, loss, is_counted=group is not None):
            left.setdefault(reason, []).append(run)
        elif score and loss is not None and loss <= 0:
            rule = f"{run.name} has 100 % of {score.display}, and no law has a distance of 0"
            raise config_error("--metric", rule, "choose a harder score, or leave it out for the loss")
        elif group and loss is not None:
            kept.append((group, run, loss))
    if not kept:
        rule = f"no finished run has a {score.display if score else OBJECTIVE}"
        raise config_error("--scaling", rule, "train models of several sizes for several numbers of steps")
    return kept, left


def _naming_key(factor: Factor, rows: Sequence[Mapping[str, Setting]]) -> str:
    """Return the first setting of a factor that distinguishes the models of a scaling law, or an empty text."""
    for key in (factor.key, *factor.others):
        if names_models(key, {show_setting(row.get(key, ABSENT)) for row in rows}):
            return key
    return ""


def _of_all_lengths(run: SavedRun) -> frozenset[tuple[str, Hashable]]:
    """Return the settings of a run that its model and size share over all lengths, rates and seeds."""
    return frozenset(item for item in without_seed(run).items() if item[0].partition(".")[0] not in RUNG)


def _groups_with_most_runs(groups: Groups) -> list[Group]:
    """Return the groups of each model and size whose learning rate has the most runs, over all lengths.

    Unfinished runs count, too: otherwise a rate that was only tried would stand in for results that diverged or were
    started and are not done. Of rates with equal numbers of runs, the ones with the most finished runs remain.
    """
    counts: dict[Hashable, dict[Hashable, tuple[int, int]]] = {}  # numbers of runs and of finished runs
    keys: list[tuple[Hashable, Hashable]] = []
    for group in groups:
        run = group.runs[0]
        size, rate = _of_all_lengths(run), tuple(run.settings.get(key) for key in RATES)
        keys.append((size, rate))
        rates = counts.setdefault(size, {})
        runs, done = rates.get(rate, (0, 0))
        rates[rate] = runs + len(group.counted), done + sum(one.state == "done" for one in group.counted)
    most = {size: max(rates.values()) for size, rates in counts.items()}
    return [group for group, (size, rate) in zip(groups, keys, strict=True) if counts[size][rate] == most[size]]


def _distance(run: SavedRun, score: FinalScore) -> float | None:
    """Return the distance of a score in percent from 100 %, as a fraction, or the bits per byte.

    Raises ConfigError for another score.
    """
    if score.name == BITS_PER_BYTE:
        return run.value_of(score.name)
    if not score.in_percent or score.better != "higher":
        rule = f"is {score.display}, but in place of the loss stands bits per byte or a score whose best value is 100 %"
        raise config_error("--metric", rule, "write --metric accuracy@64, or leave it out for the loss")
    value = run.value_of(score.name)
    return None if value is None else 1 - value / 100


def _expect_comparable(runs: Runs, score: FinalScore | None) -> None:
    """Raise ConfigError if the losses, or the scores, have different methods or were computed on different sets."""
    if score:
        if len({(run.test_set, run.method_of(score.name)) for run in runs}) > 1:
            rule = f"the {score.display} of the runs was not computed in the same way on the same test set"
            raise config_error("--scaling", rule, "leave out the runs with another test set")
        return
    if (count := len({run.tokenizer for run in runs})) > 1:
        rule = f"the runs have {count} tokenizers, so their losses per token cannot be compared"
        help = f"write --metric {BITS_PER_BYTE}, or train all runs with data.tokenizer=RUN of one of them"
        raise config_error("--scaling", rule, help)
    if len({run.method_of("loss") for run in runs}) > 1:
        rule = "the runs have different objectives or label_smoothing, so their losses cannot be compared"
        raise config_error("--scaling", rule, "name only runs of one objective and one label_smoothing")
    if not share_validation_set(runs):
        rule = "the runs have different validation sets, so their losses cannot be compared"
        raise config_error("--scaling", rule, "train all runs with the same data.val and the same files")


def _baseline_first(kept: Runs, points: Sequence[LadderPoint], baseline: Group | None, usable: Runs) -> list[str]:
    """Return the models, the baseline's first. Raises ConfigError if no run of the baseline can be in the fit."""
    models = list(dict.fromkeys(point.model for point in points))
    if baseline:
        same = {_of_all_lengths(run) for run in baseline.runs if run in usable}
        named = [point.model for run, point in zip(kept, points, strict=True) if _of_all_lengths(run) in same]
        if not named:
            rule = f"{baseline.label} is not in the fit"
            raise config_error("--baseline", rule, "name a finished run whose learning rate has decayed")
        models.sort(key=lambda model: model not in named)
    return models


def _parent_folders(run: SavedRun) -> list[Path]:
    """Return where the run may be off which this one branched: its path, or its name beside this one."""
    parent = run.start.parent.rpartition("@")[0]
    return [Path(parent).resolve(), (run.folder.parent / Path(parent).name).resolve()] if parent else []


def _why_left_out(run: SavedRun, parents: Collection[Path], loss: float | None, *, is_counted: bool) -> str:
    """Return why a run is not in the fit, or an empty text."""
    if run.state != "done":
        return "they are not done"
    if run.folder.resolve() in parents and "schedule.decay" not in run.settings:
        return "others branched off them, so their learning rate has not decayed"
    if not is_counted:
        return "another learning rate is better or has more runs, or a newer run has the same settings and seed"
    if loss is None or "tokens_seen" not in run.numbers:
        return f"they have no {OBJECTIVE} or score, or no number of tokens"
    return ""


def _expect_seeds(groups: Mapping[int, Group], points: Sequence[LadderPoint]) -> None:
    """Raise ConfigError if runs of a model, with sizes and lengths within 2 %, differ in more than their seed.

    Such models are not sizes of one model, but variants with equal budgets.
    """
    for one, other in combinations(points, 2):
        labels = {groups[id(point)].label for point in (one, other)}
        pairs = ((one.parameters, other.parameters), (one.tokens, other.tokens))
        if one.model == other.model and len(labels) > 1 and all(max(pair) < ALIKE * min(pair) for pair in pairs):
            rule = f"runs of {one.model} of one size and length, within 2 %, differ in more than their seed"
            help = f"compare them without --scaling, or leave out all but one of: {'; '.join(sorted(labels))}"
            raise config_error("--scaling", rule, help)


def _sizes(plugins: Sequence[str]) -> Callable[[SavedRun], tuple[int, int]]:
    """Return a function that counts the parameters of a run without embeddings, and all of them.

    An unembedding counts in both, tied or not.
    """
    known: dict[bytes, tuple[int, int]] = {}

    def sizes_of(run: SavedRun) -> tuple[int, int]:
        text = read_bytes(run.folder / MODEL_FILE)
        if text not in known:
            network = network_without_values(read_spec(run.folder, plugins))
            known[text] = count_without_embeddings(network), network.parameter_count
        return known[text]

    return sizes_of


def unseen_reason(term: str) -> str:
    """Return what losses that do not show a term of the law leave open."""
    seen = f"less than 0.1 % of each loss is attributed to the {term}, so"
    if term == TERMS[-1]:
        return f"{seen} it is not determined; add longer runs of larger models"
    nothing = "neither its exponent nor a factor on it is determined, and extrapolations mean nothing"
    return f"{seen} {nothing}; add runs that differ more in their {term}"


def _notes(fit: LadderFit, runs: Runs, left: Mapping[str, Runs]) -> Iterator[str]:
    for reason, omitted in left.items():
        yield f"not in the fit: {listed([run.name for run in omitted], NAMED)}: {reason}"
    for name in fit.unseen():
        yield unseen_reason(name)
    objectives = {str(run.settings.get("objective.name", EQUAL_LOSS[0])) for run in runs}
    if hiding := sorted(objectives - {*EQUAL_LOSS}):
        yield (
            f"D counts only the predicted tokens: models with objective={' or '.join(hiding)} read more tokens, so "
            "6 N D is less than their compute"
        )
    if max(point.parameters for point in fit.points) < SMALL:
        yield (
            f"all models have fewer than {SMALL:,} parameters, at which a learning rate that is not tuned can decide "
            "more than the architecture; check that larger models agree"
        )
