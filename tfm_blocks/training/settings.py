"""The settings of a run: what the config's keys must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tfm_blocks.data.settings import DataSettings, read_data
from tfm_blocks.errors import ConfigError, Problem, suggest
from tfm_blocks.registry.settings import read_settings
from tfm_blocks.registry.values import Rate
from tfm_blocks.translation.settings import BleuTokenizer, Search


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Adam, or AdamW whose decay is apart from the gradient. The schedule says the learning rate."""

    name: Literal["adam", "adamw"]
    betas: list[Rate]
    eps: float
    weight_decay: float

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers that torch refuses."""
        if len(self.betas) != 2:
            _refuse("optimizer.betas", f"must be two numbers, but is {self.betas}", "write optimizer.betas=[0.9,0.98]")
        _at_least("optimizer.eps", self.eps, 0)
        _at_least("optimizer.weight_decay", self.weight_decay, 0)


@dataclass(frozen=True, kw_only=True)
class NoamSettings:
    """scale · d_model^-0.5 · min(step^-0.5, step · warmup^-1.5)."""

    name: Literal["noam"]
    d_model: int
    warmup: int
    scale: float

    def __post_init__(self) -> None:
        """Raises ConfigError for what the formula has no value for."""
        _at_least("schedule.d_model", self.d_model, 1)
        _at_least("schedule.warmup", self.warmup, 1)
        _above_0("schedule.scale", self.scale)


@dataclass(frozen=True, kw_only=True)
class InverseSqrtSettings:
    """Linear from 0 to `peak` in `warmup` steps, then peak · (warmup / step)^0.5."""

    name: Literal["inverse_sqrt"]
    peak: float
    warmup: int

    def __post_init__(self) -> None:
        """Raises ConfigError for what the formula has no value for."""
        _above_0("schedule.peak", self.peak)
        _at_least("schedule.warmup", self.warmup, 1)


@dataclass(frozen=True, kw_only=True)
class LinearSettings:
    """Linear from 0 to `peak` in `warmup` steps, then linear to 0 at the end of `steps`."""

    name: Literal["linear"]
    peak: float
    warmup: int
    steps: int

    def __post_init__(self) -> None:
        """Raises ConfigError for what the formula has no value for."""
        _above_0("schedule.peak", self.peak)
        _at_least("schedule.warmup", self.warmup, 1)
        if self.warmup > self.steps:
            rule = f"must be at most the {self.steps} steps of the schedule, but is {self.warmup}"
            _refuse("schedule.warmup", rule, "lower it, or train longer: trainer.steps")


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """How long, how often, on what.

    steps: optimizer steps. validate_every, log_every: in steps; the last step is always validated.
    keep_last: the weights of how many validations stay, for `tfm average` and `average`. average: of how many of them
    the mean is scored on the test set and left in the folder; 0: the weights of the lowest validation loss instead.
    test_beam: the hypotheses of a test sentence's search. test_alpha: the power of its length penalty.
    validate_sentences: of the validation set, how many are translated each time; samples: how many of those are shown.
    clip: largest norm of the whole gradient; null: no clipping. bleu: sacreBLEU's tokenizer.
    """

    steps: int
    validate_every: int
    log_every: int
    keep_last: int
    average: int
    test_beam: int
    test_alpha: float
    validate_sentences: int
    samples: int
    bleu: BleuTokenizer
    clip: float | None
    devices: int
    accelerator: Literal["auto", "cpu", "cuda"]
    precision: Literal["auto", "bf16", "fp32"]

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers below their least."""
        least = {
            "steps": 1,
            "validate_every": 1,
            "log_every": 1,
            "keep_last": 0,
            "average": 0,
            "test_beam": 1,
            "validate_sentences": 0,
            "samples": 0,
            "devices": 1,
        }
        for name, value in least.items():
            _at_least(f"trainer.{name}", getattr(self, name), value)
        kept = min(self.keep_last, -(-self.steps // self.validate_every))
        if self.average > kept:
            rule = f"must be at most the {kept} validations whose weights are kept, but is {self.average}"
            help = "lower it, raise trainer.keep_last, or lower trainer.validate_every"
            raise ConfigError(Problem("trainer.average", rule, help=help))
        try:
            _ = self.test_search
        except ValueError as error:
            _refuse("trainer.test_alpha", str(error), "0.6 is the usual power; a larger one makes translations longer")
        if self.clip is not None:
            _above_0("trainer.clip", self.clip)

    @property
    def test_search(self) -> Search:
        """How the test set is translated."""
        return Search(beam=self.test_beam, alpha=self.test_alpha)


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """Weights & Biases, beside metrics.csv."""

    name: Literal["wandb"]
    project: str
    entity: str | None


@dataclass(frozen=True, kw_only=True)
class CsvSettings:
    """metrics.csv alone."""

    name: Literal["csv"]


ScheduleSettings = NoamSettings | InverseSqrtSettings | LinearSettings
LoggerSettings = WandbSettings | CsvSettings
SCHEDULES: dict[str, type[Any]] = {"noam": NoamSettings, "inverse_sqrt": InverseSqrtSettings, "linear": LinearSettings}
LOGGERS: dict[str, type[Any]] = {"wandb": WandbSettings, "csv": CsvSettings}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything but the model."""

    seed: int
    label_smoothing: Rate
    plugins: list[str]
    data: DataSettings
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    trainer: TrainerSettings
    logger: LoggerSettings


@dataclass(frozen=True, kw_only=True)
class _Root:
    seed: int
    label_smoothing: Rate
    plugins: list[str]

    def __post_init__(self) -> None:
        _at_least("seed", self.seed, 0)


def read_run(config: Mapping[str, Any]) -> RunSettings:
    """The settings in a resolved config. Raises ConfigError."""
    root = read_settings(_Root, {key: config[key] for key in ("seed", "label_smoothing", "plugins")}, "")
    return RunSettings(
        **vars(root),
        data=read_data(config["data"]),
        optimizer=read_settings(OptimizerSettings, config["optimizer"], "optimizer"),
        schedule=_read_kind(SCHEDULES, config["schedule"], "schedule"),
        trainer=read_settings(TrainerSettings, config["trainer"], "trainer"),
        logger=_read_kind(LOGGERS, config["logger"], "logger"),
    )


def _read_kind(kinds: Mapping[str, type[Any]], mapping: Mapping[str, Any], address: str) -> Any:
    name = str(mapping.get("name"))
    if name not in kinds:
        raise ConfigError(Problem(f"{address}.name", f"no {address} is called {name!r}", help=suggest(name, kinds)))
    return read_settings(kinds[name], mapping, address)


def _at_least(address: str, value: float, least: float) -> None:
    if not value >= least:
        _refuse(address, f"must be at least {least}, but is {value}", f"write {address}={least} or more")


def _above_0(address: str, value: float) -> None:
    if not value > 0:
        _refuse(address, f"must be above 0, but is {value}", f"write {address}=… with a number above 0")


def _refuse(address: str, rule: str, help: str) -> None:
    raise ConfigError(Problem(address, rule, help=help))
