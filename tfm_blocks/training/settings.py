"""The settings of a run: the types and rules of the config's keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, create_model, field_validator

from tfm_blocks.config.settings import (
    Above0,
    Count,
    CountOrZero,
    Filled,
    Fraction,
    ImprovableMetric,
    RuleError,
    Settings,
    read_settings,
)
from tfm_blocks.data.objectives import NEXT_TOKEN, ObjectiveSettings
from tfm_blocks.data.settings import DataSettings, LmSettings
from tfm_blocks.devices import kind_problem
from tfm_blocks.errors import shown
from tfm_blocks.metric_schema import OBJECTIVE, find_key
from tfm_blocks.tracking.loggers import LoggerSettings
from tfm_blocks.training.optimizer_settings import OptimizerSettings, settings_type
from tfm_blocks.training.schedules import STEP_TOKENS, AtLeast0, ScheduleSettings
from tfm_blocks.translation.settings import BleuTokenizer, Search


class DeviceSettings(Settings):
    """The processes of a run.

    devices: processes per node, each with its own device. num_nodes: number of nodes.
    accelerator: auto, cpu, or a device type of torch; auto: the accelerator of the machine if it has one.
    cluster: what started the processes; local: this package.
    strategy: ddp: each process holds all weights and optimizer state; fsdp2: each process holds a shard of them.
    """

    devices: Count
    accelerator: str
    num_nodes: Count = 1
    cluster: Literal["auto", "local", "torchrun", "slurm"] = "auto"
    strategy: Literal["ddp", "fsdp2"] = "ddp"

    @field_validator("accelerator")
    @classmethod
    def _is_a_kind_of_device(cls, accelerator: str) -> str:
        if problem := kind_problem(accelerator):
            raise RuleError(*problem)
        return accelerator


class TrainerSettings(DeviceSettings):
    """The length, the intervals and the devices of a run.

    steps: optimizer steps. validate_every, log_every: intervals in steps; the last step is always validated.
    checkpoint_every, checkpoint_minutes: the interval of checkpoints in steps and in minutes; null: none.
    checkpoint_keep: number of checkpoints that are kept. checkpoint_at: steps whose checkpoints are kept too.
    ema: decay of a moving average of the weights, which replaces them in validation and in the final model; null: none.
    activation_checkpointing: recompute each layer in the backward pass, which takes less memory and more time.
    compile: compile the trunk with torch.compile.
    keep_last: number of validations whose weights are kept, besides those that a resume needs for `average`.
    average: number of these whose mean is the final model; 0: the weights of the lowest validation loss.
    test_beam: beam size on the test set. test_patient: continue while an unfinished hypothesis can still win.
    test_alpha: exponent of the length penalty.
    validate_sentences: sentences that each validation translates. samples: how many of them are shown.
    clip: largest norm of the whole gradient; null: no clipping. bleu: sacreBLEU's tokenizer.
    patience_nan: a step whose loss or gradient is not finite is skipped; after this many in a row the run has diverged.
    workers: loader processes of each rank; null: 2 on an accelerator, 0 on a CPU.
    """

    steps: Count
    validate_every: Count
    log_every: Count
    checkpoint_every: Count | None
    checkpoint_minutes: Above0 | None
    checkpoint_keep: Count
    checkpoint_at: list[Count] = Field(default_factory=list)
    keep_last: CountOrZero
    average: CountOrZero
    ema: Fraction | None = None
    test_beam: int
    test_patient: bool
    test_alpha: float
    validate_sentences: CountOrZero
    samples: CountOrZero
    bleu: BleuTokenizer
    clip: Above0 | None
    patience_nan: Count = 10
    workers: CountOrZero | None = None
    activation_checkpointing: bool = False
    compile: bool = False
    precision: Literal["auto", "bf16", "fp32"]

    @field_validator("checkpoint_at")
    @classmethod
    def _are_reached(cls, wanted: list[int], info: ValidationInfo) -> list[int]:
        steps = info.data.get("steps", max(wanted, default=0))
        if late := [step for step in wanted if step > steps]:
            rule = f"has {', '.join(map(str, late))}, but the run ends after step {steps}"
            raise RuleError(rule, f"write steps up to {steps}, or a larger trainer.steps")
        return wanted

    @field_validator("average")
    @classmethod
    def _is_over_what_is_kept(cls, average: int, info: ValidationInfo) -> int:
        if info.data.keys() >= {"steps", "validate_every", "keep_last"}:
            steps, validate_every, keep_last = (info.data[key] for key in ("steps", "validate_every", "keep_last"))
            kept = min(keep_last, -(-steps // validate_every))
            if average > kept:
                rule = f"must be at most the {kept} validations whose weights are kept, but is {average}"
                often = steps // average  # 0: the run has fewer steps than validations
                changes = [f"trainer.validate_every={often}"] if often < validate_every else []
                changes += [f"trainer.keep_last={average}"] if keep_last < average else []
                other = f", or in a new run {' and '.join(changes)}" if often else ""
                raise RuleError(rule, f"write trainer.average={kept}{other}")
        return average

    @field_validator("ema")
    @classmethod
    def _is_the_only_mean(cls, ema: float | None, info: ValidationInfo) -> float | None:
        if ema is not None and info.data.get("average"):
            average = info.data["average"]
            rule = f"is {ema}, but trainer.average is {average}: only one of them can make the final weights"
            raise RuleError(rule, "write trainer.average=0 or trainer.ema=null")
        return ema

    @field_validator("ema", "compile")
    @classmethod
    def _has_whole_weights(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("strategy") == "fsdp2":
            rule = f"is {str(value).lower()}, which needs unsharded weights, but trainer.strategy is fsdp2"
            raise RuleError(rule, "write trainer.strategy=ddp")
        return value

    @field_validator("test_beam", "test_alpha")
    @classmethod
    def _can_be_searched_with(cls, value: float, info: ValidationInfo) -> float:
        name = str(info.field_name).removeprefix("test_")
        try:
            Search(**{name: value})  # type: ignore[arg-type]
        except ValueError as error:
            raise RuleError(str(error), f"the usual value is {getattr(Search, name)}") from None
        return value

    @field_validator("test_patient")
    @classmethod
    def _is_a_search_by_beam(cls, patient: bool, info: ValidationInfo) -> bool:
        if patient and info.data.get("test_beam") == 1:
            raise RuleError("needs beam search, but trainer.test_beam is 1", "raise trainer.test_beam, or write false")
        return patient

    def averaged_steps(self, last: int) -> list[int]:
        """Return the steps of the validations that `average` takes the mean of, if the run ends after step `last`."""
        validated = [*range(self.validate_every, last, self.validate_every), last]
        return validated[-self.average :] if self.average else []

    @property
    def test_search(self) -> Search:
        return Search(beam=self.test_beam, patient=self.test_patient, alpha=self.test_alpha)


class EarlyStoppingSettings(Settings):
    """The criterion that stops a run early.

    monitor: a validation metric. patience: validations in a row without improvement; null: never. min_delta: a smaller
    improvement does not count.
    """

    monitor: ImprovableMetric = OBJECTIVE
    patience: Count | None = None
    min_delta: AtLeast0 = 0.0


class CallbackSettings(Settings):
    """Callbacks by name. The names are a closed set, so a config cannot import code."""

    early_stopping: EarlyStoppingSettings = EarlyStoppingSettings()


class WeightSettings(Settings):
    """A weight of a loss that changes linearly from `start` to `end` in the `steps` after step `after`."""

    start: AtLeast0
    end: AtLeast0
    steps: Count
    after: CountOrZero = 0

    def at(self, step: int) -> float:
        """Return the weight in a step; the first step is 1."""
        passed = min(max(step - self.after, 0) / self.steps, 1.0)
        return self.start + passed * (self.end - self.start)


def _as_schedule(weight: object, info: ValidationInfo) -> object:
    """Return the schedule of a constant weight. Raises RuleError."""
    if isinstance(weight, Mapping | WeightSettings) or (weight is None and info.field_name in PARTS):
        return weight
    address = f"losses.{info.field_name}"
    help = f"write {address}=0.1 or {address}={{start: 0.3, end: 0.1, steps: 1000}}"
    if info.field_name == "blocks":
        help = f"write {address}={{NODE: 0.1}}"
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise RuleError(f"must be a float or a mapping, but is {shown(weight)}", help)
    if not 0 <= weight < math.inf:
        raise RuleError(f"must be at least 0, but is {weight}", help)
    return {"start": float(weight), "end": float(weight), "steps": 1}


_WEIGHT = {"anyOf": [{"type": "number", "minimum": 0}, {"type": "object"}]}
Weight = Annotated[WeightSettings, BeforeValidator(_as_schedule), WithJsonSchema(_WEIGHT)]
PartWeight = Annotated[
    WeightSettings | None,
    BeforeValidator(_as_schedule),
    WithJsonSchema({"anyOf": [*_WEIGHT["anyOf"], {"type": "null"}]}),
]


class LossSettings(Settings):
    """The weights of losses, whose weighted sum is minimised: each a number, or a schedule {start, end, steps, after}.

    z_loss: of the square of log Z, the logarithm of the sum of the exponentials of the logits; 1e-4 is usual.
    ce, kl: of the cross entropy and the divergence from the teacher of objective=distil; null: 0.5.
    hidden: of the difference of its objective.hidden; null: 1.
    generator, replaced: of the cross entropy of the generator of objective=replaced_token, and of the binary cross
    entropy of the model; null: 1 and 50.
    ahead: of the mean cross entropy of later tokens of objective=several_tokens; null: 0.3.
    blocks: factors of the auxiliary losses of blocks, by the address of a node or its beginning.
    """

    z_loss: Weight = WeightSettings(start=0.0, end=0.0, steps=1)
    ce: PartWeight = None
    kl: PartWeight = None
    hidden: PartWeight = None
    generator: PartWeight = None
    replaced: PartWeight = None
    ahead: PartWeight = None
    blocks: dict[str, Weight] | None = None

    def weight(self, name: str, step: int) -> float:
        """Return the weight of a loss in a step."""
        schedule: WeightSettings | None = getattr(self, name)
        return PARTS[name] if schedule is None else schedule.at(step)

    @property
    def has_z_loss(self) -> bool:
        """Return True if z-loss has a weight above 0 in any step."""
        return bool(self.z_loss.start or self.z_loss.end)

    def factor(self, address: str, step: int) -> float:
        """Return the factor of the auxiliary loss of a node, by the longest beginning of its address."""
        parts, factors = address.split("."), self.blocks or {}
        names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next((factors[name].at(step) for name in names if name in factors), 1.0)

    def names_with(self, blocks: Sequence[str], objective: ObjectiveSettings) -> list[str]:
        """Return the names of the losses that are logged besides the cross entropy."""
        parts = [name for name in objective.losses if name != "ce"]
        return [*blocks, *(["z_loss"] if self.has_z_loss else []), *parts]


# the weights of the parts of an objective, unless `losses` has others
PARTS = {"ce": 0.5, "kl": 0.5, "hidden": 1.0, "generator": 1.0, "replaced": 50.0, "ahead": 0.3}


class RunSettings(Settings):
    """All settings of a run except the model."""

    seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    label_smoothing: Fraction
    losses: LossSettings = LossSettings()
    objective: ObjectiveSettings = NEXT_TOKEN
    init_from: Filled | None = None
    plugins: list[str]
    data: DataSettings
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    trainer: TrainerSettings
    logger: LoggerSettings
    callbacks: CallbackSettings = CallbackSettings()

    @field_validator("callbacks")
    @classmethod
    def _monitor_what_is_measured(cls, callbacks: CallbackSettings, info: ValidationInfo) -> CallbackSettings:
        stop = callbacks.early_stopping
        data, objective, trainer = (info.data.get(key) for key in ("data", "objective", "trainer"))
        if stop.patience is None or data is None or objective is None or trainer is None:
            return callbacks
        if reason := why_unmeasured(stop.monitor, data, objective, trainer):
            rule = f"early_stopping monitors {stop.monitor}, {reason}"
            raise RuleError(rule, f"write callbacks.early_stopping.monitor={OBJECTIVE}")
        return callbacks


def why_unmeasured(metric: str, data: DataSettings, objective: ObjectiveSettings, trainer: TrainerSettings) -> str:
    """Return a clause that says why a run with these settings does not measure a validation metric, or ''."""
    key = find_key(metric)
    head, corpus, _ = key.name.partition("{corpus}")
    corpora = [name for name, part in (getattr(data, "mix", None) or {}).items() if part.val is not None]
    if corpus and metric.removeprefix(head) not in corpora:
        return f"but the corpora of data.mix with validation text are: {', '.join(corpora) or 'none'}"
    if "{" in metric or not key.is_of(measured_kinds(data, objective)):
        return "which a run of this data and objective does not measure"
    if "translated" not in key.kinds:
        return ""
    reason = "trainer.validate_sentences is 0" if not trainer.validate_sentences else ""
    reason = "plain text is not translated" if isinstance(data, LmSettings) else reason
    reason = reason if objective.generates else f"objective={objective.name} generates no text"
    return f"which is a score of translations, but {reason}" if reason else ""


def measured_kinds(data: DataSettings, objective: ObjectiveSettings) -> set[str]:
    """Return the kinds of a run with these settings, by the names of `Key.kinds`."""
    answered, replaced = data.kind == "probe", objective.name == "replaced_token"
    predict = getattr(data, "predict", "class") if objective.name == "label" else ""
    kinds = {
        "translated": not answered and not predict,
        "answered": answered,
        "documented": data.kind == "lm" and objective.generates,
        "tokens": not answered and not predict,
        "replaced": replaced,
        "probabilities": not replaced and predict not in ("several", "number"),
        "classes": predict in ("class", "words"),
        "several": predict == "several",
        "number": predict == "number",
    }
    return {kind for kind, is_of_it in kinds.items() if is_of_it}


def run_settings() -> type[RunSettings]:
    """Return the type of the settings of a run, with all registered optimizers."""
    fields: dict[str, Any] = {"optimizer": (settings_type(), ...)}
    return create_model("RunSettings", __base__=RunSettings, __doc__=RunSettings.__doc__, **fields)


def read_run(config: Mapping[str, Any]) -> RunSettings:
    """Read the settings from a resolved config, which also has the model and its knobs.

    Raises ConfigError with all problems.
    """
    known = {key: config[key] for key in RunSettings.model_fields if key in config}
    data = config.get("data")
    step_tokens = data["step_tokens"] or 0 if isinstance(data, Mapping) and "step_tokens" in data else None
    return read_settings(run_settings(), known, {STEP_TOKENS: step_tokens})
