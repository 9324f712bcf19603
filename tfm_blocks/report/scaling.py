"""`tfm compare --scaling`: a ladder of runs of several sizes and lengths, the law of their losses, and its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tfm_blocks.errors import ConfigError, Problem, listed
from tfm_blocks.metric_schema import BITS_PER_BYTE, OBJECTIVE, FinalScore, find_score
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.weights import count_without_embeddings
from tfm_blocks.report.comparison import NAMED, Comparison
from tfm_blocks.report.differences import ABSENT, MODEL, RATES, Factor, Group, without_seed
from tfm_blocks.report.rates import SMALL, best_groups, rate_curves
from tfm_blocks.runs.files import read_bytes
from tfm_blocks.runs.folder import MODEL as MODEL_FILE
from tfm_blocks.runs.model import read_spec
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.scoring.scaling_law import Estimate, LadderFit, LadderPoint, fit_ladder, fit_smaller, rungs
from tfm_blocks.scoring.significance import correct

RUNG = ("schedule", "trainer", "data")  # config groups that differ between the rungs of a ladder


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
        """Return the name of the loss or score."""
        return self.score.display if self.score else OBJECTIVE

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
    Of several learning rates of a model and size, only the one with the most results counts, or of these the best one;
    others were only tried. Runs from which others branched off before any decay are left out. With
    `metric`, the distance of this score from 100 % stands in place of the loss. Raises ConfigError if the runs do not
    determine the law, or cannot be compared, and RunError if a run has no model.
    """
    parents = {path for run in comparison.runs for path in _parent_folders(run)}
    score = find_score(metric) if metric else None
    kept, left = _select_runs(comparison, parents, score)
    if not (score and score.name == BITS_PER_BYTE) and (count := len({run.tokenizer for _, run, _ in kept})) > 1:
        rule = f"the runs have {count} tokenizers, so their losses per token cannot be compared"
        help = f"write --metric {BITS_PER_BYTE}, or train all runs with data.tokenizer=RUN of one of them"
        raise ConfigError(Problem("--scaling", rule, help=help))
    factors = [factor for factor in comparison.factors if _names_models(factor, [group for group, *_ in kept])]
    size_of = _sizes(plugins)
    points = [
        LadderPoint(
            model=", ".join(group.setting(factor) for factor in factors) or run.model,
            parameters=size_of(run),
            tokens=run.numbers["tokens_seen"],
            loss=loss,
        )
        for group, run, loss in kept
    ]
    _expect_seeds({id(point): group for point, (group, *_) in zip(points, kept, strict=True)}, points)
    usable = [run for run in comparison.runs if not _why_left_out(run, parents, 1.0, is_counted=True)]
    models = _baseline_first([run for _, run, _ in kept], points, comparison.baseline, usable)
    try:
        with_trends = fit_ladder(points, models, trend=True)
    except ConfigError:
        with_trends = None
    fit = fit_ladder(points, models)
    return Ladder(fit, with_trends, list(_notes(fit, left)), score)


def _select_runs(
    comparison: Comparison, parents: Collection[Path], score: FinalScore | None
) -> tuple[list[tuple[Group, SavedRun, float]], dict[str, list[SavedRun]]]:
    """Return the runs in the fit with their groups and losses, and the others by reason. Raises ConfigError."""
    left: dict[str, list[SavedRun]] = {}
    kept: list[tuple[Group, SavedRun, float]] = []
    tried = _groups_with_most_results(comparison.groups)
    best = best_groups(tried, rate_curves(tried, comparison.factors))
    groups = {id(run): group for group in best for run in group.counted}
    for run in comparison.runs:
        loss, group = _distance(run, score) if score else run.last_validation_loss, groups.get(id(run))
        if reason := _why_left_out(run, parents, loss, is_counted=group is not None):
            left.setdefault(reason, []).append(run)
        elif group and loss is not None:
            kept.append((group, run, loss))
    if not kept:
        rule = f"no finished run has a {score.display if score else OBJECTIVE}"
        raise ConfigError(Problem("--scaling", rule, help="train models of several sizes for several numbers of steps"))
    return kept, left


def _of_all_lengths(run: SavedRun) -> frozenset[tuple[str, Hashable]]:
    """Return the settings of a run that its model and size share over all lengths, rates and seeds."""
    return frozenset(item for item in without_seed(run).items() if item[0].partition(".")[0] not in RUNG)


def _groups_with_most_results(groups: Sequence[Group]) -> list[Group]:
    """Return the groups of each model and size whose learning rate has the most finished runs, over all lengths."""
    counts: dict[Hashable, Counter[Hashable]] = {}
    keys: list[tuple[Hashable, Hashable]] = []
    for group in groups:
        run = group.runs[0]
        keys.append((_of_all_lengths(run), tuple(run.settings.get(key) for key in RATES)))
        done = sum(run.state == "done" for run in group.counted)
        counts.setdefault(keys[-1][0], Counter())[keys[-1][1]] += done
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
        raise ConfigError(Problem("--metric", rule, help="write --metric accuracy@64, or leave it out for the loss"))
    value = run.value_of(score.name)
    if value is not None and value >= score.high:
        rule = f"{run.name} has 100 % of {score.display}, and no law has a distance of 0"
        raise ConfigError(Problem("--metric", rule, help="choose a harder score, or leave it out for the loss"))
    return None if value is None else 1 - value / 100


def _baseline_first(
    kept: Sequence[SavedRun], points: Sequence[LadderPoint], baseline: Group | None, usable: Sequence[SavedRun]
) -> list[str]:
    """Return the models, the baseline's first. Raises ConfigError if no run of the baseline can be in the fit."""
    models = list(dict.fromkeys(point.model for point in points))
    if baseline:
        same = {_of_all_lengths(run) for run in baseline.runs if run in usable}
        named = [point.model for run, point in zip(kept, points, strict=True) if _of_all_lengths(run) in same]
        if not named:
            rule = f"{baseline.label} is not in the fit"
            raise ConfigError(Problem("--baseline", rule, help="name a finished run whose learning rate has decayed"))
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
        return "another learning rate is better or has more results, or a newer run has the same settings and seed"
    if loss is None or "tokens_seen" not in run.numbers:
        return f"they have no {OBJECTIVE} or score, or no number of tokens"
    return ""


def _expect_seeds(groups: Mapping[int, Group], points: Sequence[LadderPoint]) -> None:
    """Raise ConfigError if runs of a model, size and length differ in more than their seed."""
    for rung in rungs(points):
        labels = {groups[id(point)].label for point in rung}
        if len(labels) > 1:
            rule = f"runs of {rung[0].model} of one size and length differ in more than their seed"
            help = f"compare them without --scaling, or leave out all but one of: {'; '.join(sorted(labels))}"
            raise ConfigError(Problem("--scaling", rule, help=help))


def _names_models(factor: Factor, groups: Sequence[Group]) -> bool:
    """Return True if the factor distinguishes models: it is no setting of a rung and has a value that is no number."""
    if factor.key.partition(".")[0] in RUNG:
        return False
    texts = {group.setting(factor) for group in groups} - {"", ABSENT, "null"}
    return factor.key == MODEL or not all(map(_is_number, texts))


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def _sizes(plugins: Sequence[str]) -> Callable[[SavedRun], float]:
    """Return a function that counts the parameters of a run without embeddings; an unembedding counts, tied or not."""
    known: dict[bytes, float] = {}

    def size_of(run: SavedRun) -> float:
        text = read_bytes(run.folder / MODEL_FILE)
        if text not in known:
            known[text] = count_without_embeddings(network_without_values(read_spec(run.folder, plugins)))
        return known[text]

    return size_of


def _notes(fit: LadderFit, left: Mapping[str, Sequence[SavedRun]]) -> Iterator[str]:
    for reason, runs in left.items():
        yield f"not in the fit: {listed([run.name for run in runs], NAMED)}: {reason}"
    for name in fit.unseen:
        yield (
            f"the law attributes less than 0.1 % of each loss to the {name}, so its exponent and extrapolations mean "
            f"nothing; add runs that differ more in their {name}"
        )
    if max(point.parameters for point in fit.points) < SMALL:
        yield (
            f"all models have fewer than {SMALL:,} parameters, at which a learning rate that is not tuned can decide "
            "more than the architecture; check that larger models agree"
        )
