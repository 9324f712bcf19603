"""The ladder of `tfm compare --scaling`: runs of several sizes and lengths, and the law of their losses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfm_blocks.errors import ConfigError, Problem, listed
from tfm_blocks.metric_schema import OBJECTIVE
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.weights import list_weights
from tfm_blocks.report.comparison import NAMED, Comparison
from tfm_blocks.report.differences import MODEL, Factor, Group
from tfm_blocks.runs.model import read_spec
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.scoring.scaling_law import LadderFit, LadderPoint, fit_ladder, rungs
from tfm_blocks.scoring.significance import correct

LOOKED_UP = frozenset({"embedding", "position"})  # roles of weights of which a token reads one row
RUNG = ("schedule", "trainer", "data")  # config groups that differ between the rungs of a ladder
SMALL = 4_000_000  # parameters below which the learning rates can decide more than the architectures


@dataclass(frozen=True)
class Ladder:
    """The final losses of runs of several sizes and lengths, and their scaling law.

    `with_trends` is a second fit, in which the factor of each model may change with compute; None if the runs do not
    determine it. `notes` name the runs that are left out, and what the sizes cannot show.
    """

    fit: LadderFit
    with_trends: LadderFit | None
    notes: Sequence[str]

    @property
    def largest(self) -> float:
        """Return the largest compute of a run, in operations."""
        return max(point.compute for point in self.fit.points)

    def corrected(self) -> dict[int, float]:
        """Return the p-value of the factor of each model but the baseline, corrected for all of them (Holm 1979)."""
        return correct({model: self.fit.factor(model).p for model in range(1, len(self.fit.models))})

    def corrected_trends(self) -> dict[int, float]:
        """Return the p-value of the change of each factor with compute, corrected for all models."""
        if self.with_trends is None:
            return {}
        return correct({model: self.with_trends.trend(model).p for model in range(1, len(self.fit.models))})


def read_ladder(comparison: Comparison, plugins: Sequence[str] = ()) -> Ladder:
    """Fit a scaling law to the losses of the last validations of the finished runs of a comparison.

    Models differ in their name, or in another setting that is a name, such as `mixer`; numbers distinguish the rungs.
    Of several learning rates, only the best one of each model and size counts. Runs from which others branched off are
    left out, because their learning rate has not decayed. Raises ConfigError if the runs do not determine the law, or
    cannot be compared.
    """
    parents = {path for run in comparison.runs for path in _parent_folders(run)}
    left: dict[str, list[SavedRun]] = {}
    kept: list[tuple[Group, SavedRun, float]] = []
    groups = {id(run): group for group in comparison.best_rate_groups for run in group.counted}
    for run in comparison.runs:
        loss, group = run.last_validation_loss, groups.get(id(run))
        if reason := _why_left_out(run, parents, is_counted=group is not None):
            left.setdefault(reason, []).append(run)
        elif group and loss is not None:
            kept.append((group, run, loss))
    if not kept:
        rule = f"no finished run has a {OBJECTIVE}"
        raise ConfigError(Problem("--scaling", rule, help="train models of several sizes for several numbers of steps"))
    _expect_comparable([run for _, run, _ in kept])
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
    model_of_run = {id(run): point.model for point, (_, run, _) in zip(points, kept, strict=True)}
    models = _baseline_first(model_of_run, comparison)
    try:
        with_trends = fit_ladder(points, models, trend=True)
    except ConfigError:
        with_trends = None
    return Ladder(fit_ladder(points, models), with_trends, list(_notes(points, left)))


def _baseline_first(model_of_run: Mapping[int, str], comparison: Comparison) -> list[str]:
    """Return the models, that of the baseline first. Raises ConfigError if no run of the baseline is in the fit."""
    models = list(dict.fromkeys(model_of_run.values()))
    if baseline := comparison.baseline:
        named = [model_of_run[id(run)] for run in baseline.runs if id(run) in model_of_run]
        if not named:
            rule = f"{baseline.label} is not in the fit"
            raise ConfigError(Problem("--baseline", rule, help="name a finished run whose learning rate has decayed"))
        models.sort(key=lambda model: model not in named)
    return models


def _parent_folders(run: SavedRun) -> list[Path]:
    """Return where the run may be off which this one branched: its path, or its name beside this one."""
    parent = run.start.parent.rpartition("@")[0]
    return [Path(parent).resolve(), (run.folder.parent / Path(parent).name).resolve()] if parent else []


def _why_left_out(run: SavedRun, parents: Collection[Path], *, is_counted: bool) -> str:
    """Return why a run is not in the fit, or an empty text."""
    if run.state != "done":
        return "they are not done"
    if run.folder.resolve() in parents:
        return "others branched off them, so their learning rate has not decayed"
    if not is_counted:
        return "another learning rate is better, or a newer run has the same settings and seed"
    if run.last_validation_loss is None or "tokens_seen" not in run.numbers:
        return f"they have no {OBJECTIVE}, or no number of tokens"
    return ""


def _expect_comparable(runs: Sequence[SavedRun]) -> None:
    tokenizers = {run.tokenizer for run in runs}
    if len(tokenizers) > 1:
        rule = f"the runs have {len(tokenizers)} tokenizers, so their losses per token cannot be compared"
        raise ConfigError(Problem("--scaling", rule, help="train all runs with data.tokenizer=RUN of one of them"))


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
    return factor.key == MODEL or any(not _is_number(group.setting(factor)) for group in groups)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text in ("", "–", "null")
    return True


def _sizes(plugins: Sequence[str]) -> Callable[[SavedRun], float]:
    """Return a function that counts the parameters of a run without embeddings; an unembedding counts, tied or not."""
    known: dict[bytes, float] = {}

    def size_of(run: SavedRun) -> float:
        text = (run.folder / "model.json").read_bytes()
        if text not in known:
            weights = list_weights(network_without_values(read_spec(run.folder, plugins)))
            known[text] = sum(weight.size for weight in weights if not LOOKED_UP.issuperset(weight.roles))
        return known[text]

    return size_of


def _notes(points: Sequence[LadderPoint], left: Mapping[str, Sequence[SavedRun]]) -> Iterator[str]:
    for reason, runs in left.items():
        yield f"not in the fit: {listed([run.name for run in runs], NAMED)}: {reason}"
    if max(point.parameters for point in points) < SMALL:
        yield (
            f"all models have fewer than {SMALL:,} parameters, at which a learning rate that is not tuned can decide "
            "more than the architecture; check that larger models agree"
        )
