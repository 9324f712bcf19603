"""Dashboards as files: conf/dashboard/NAME.yaml says which panels show what, and all of it is logged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from tfm_blocks.compose.folders import CONF, GLOBAL_GROUPS, OF_A_SWEEP, list_options, read_yaml
from tfm_blocks.config.settings import RuleError, Settings, read_settings
from tfm_blocks.errors import ConfigError, Place, Problem, suggest
from tfm_blocks.language.files import display_path
from tfm_blocks.metric_schema import FACTS, MEDIA, METRIC_KEYS, TRAIN_KEYS, VAL_KEYS

GROUP = "dashboard"
STEP = "step"
NOT_LOGGED = frozenset({"defaults", "hydra", "resume", "verify"})  # of train.yaml: what is no setting of a run
Keys = Annotated[list[str], Field(min_length=1)]


class Panel(Settings):
    """One picture: what it is, with its keys, is the one of the first seven that is given.

    lines: metrics `over` steps or another metric. bars: the value of each run. scatter: the values of two keys.
    parallel: a line for each run through the values of all. importance: how much each setting has to do with a score.
    media: samples or pictures. differences: the configs side by side. log: logarithmic axes.
    Validators are told the settings that runs log.
    """

    lines: Keys | None = None
    bars: Keys | None = None
    scatter: Annotated[list[str], Field(min_length=2, max_length=2)] | None = None
    parallel: Keys | None = None
    importance: str | None = None
    media: Keys | None = None
    differences: bool | None = None
    over: str = STEP
    log: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> Panel:
        if len(self.model_fields_set - {"over", "log"}) != 1:
            kinds = ", ".join(list(type(self).model_fields)[:7])
            raise RuleError(f"must be one of {kinds}", "write one of them, such as {lines: [val/loss]}")
        return self

    @field_validator("lines")
    @classmethod
    def _are_metrics(cls, given: Any) -> Any:
        return _known(given, METRICS)

    @field_validator("bars", "importance")
    @classmethod
    def _are_single_metrics(cls, given: Any) -> Any:
        return _known(given, SINGLE)

    @field_validator("over")
    @classmethod
    def _is_an_axis(cls, given: str) -> str:
        return str(_known(given, [STEP, *SINGLE]))

    @field_validator("media")
    @classmethod
    def _are_media(cls, given: Any) -> Any:
        return _known(given, [one.name for one in MEDIA])

    @field_validator("scatter", "parallel")
    @classmethod
    def _are_values(cls, given: Any, info: ValidationInfo) -> Any:
        return _known(given, [*SINGLE, *(info.context or ())])


class Dashboard(Settings):
    """Panels by section, in a workspace called `name`; `group`: settings by whose values runs are put together.

    rest: the name of a last section with a panel for each metric of training and validation that has no panel yet; the
    section is left out if each metric has one.
    """

    name: str
    group: list[str] = Field(default_factory=list)
    sections: Annotated[dict[str, Annotated[list[Panel], Field(min_length=1)]], Field(min_length=1)]
    rest: str | None = None

    @field_validator("group")
    @classmethod
    def _are_settings(cls, given: Any, info: ValidationInfo) -> Any:
        return _known(given, info.context or ())

    @property
    def all_sections(self) -> dict[str, list[Panel]]:
        """The sections with `rest`."""
        drawn = {name for panels in self.sections.values() for panel in panels for name in panel.lines or ()}
        rest = [Panel(lines=[key.name]) for key in (*TRAIN_KEYS, *VAL_KEYS) if key.name not in drawn]
        return {**self.sections, self.rest: rest} if self.rest and rest else self.sections


METRICS = {key.name: key for key in METRIC_KEYS}
SINGLE = [name for name in METRICS if "{" not in name]


def _known(given: Any, known: Iterable[str]) -> Any:
    for name in [given] if isinstance(given, str) else given or ():
        if name not in known:
            raise RuleError(f"shows {name}, which no run logs", suggest(name, known))
    return given


def settings_logged(folders: list[Path]) -> set[str]:
    """Facts, the knobs of models, and the settings of a run and its groups: all that W&B knows of a run's config."""
    found = {f"facts.{one.name}" for one in FACTS} | {"model", "sweep_name"}
    for key, value in read_yaml(CONF / "train.yaml").items():
        if key not in NOT_LOGGED:
            found |= set(_addresses(value, key)) if isinstance(value, dict) else {key}
    for path in list_options("model", folders).values():
        found |= read_yaml(path).keys() - {"defaults", "model"}
    for group in {path.name for path in CONF.iterdir() if path.is_dir()} - {
        "model",
        GROUP,
        *GLOBAL_GROUPS,
        *OF_A_SWEEP,
    }:
        for path in list_options(group, folders).values():
            found |= set(_addresses(read_yaml(path), group))
    return found


def _addresses(mapping: Mapping[str, Any], around: str) -> Iterable[str]:
    for name, value in mapping.items():
        if name == "defaults":
            continue
        yield f"{around}.{name}"
        if isinstance(value, dict):
            yield from _addresses(value, f"{around}.{name}")


def dashboards(folders: list[Path]) -> dict[str, Path]:
    """The files by name."""
    return list_options(GROUP, folders)


def read_dashboard(name: str, folders: list[Path]) -> Dashboard:
    """Raises ConfigError where there is none of that name, or where it shows what no run logs."""
    known = dashboards(folders)
    if name not in known:
        raise ConfigError(Problem(GROUP, f"there is no dashboard called {name!r}", help=suggest(name, known)))
    settings = settings_logged(folders)
    try:
        return read_settings(Dashboard, read_yaml(known[name]), settings)
    except ConfigError as error:
        place = Place(display_path(known[name]))
        raise ConfigError(
            [Problem(f"{GROUP}.{name}.{one.address}", one.rule, place, help=one.help) for one in error.problems]
        ) from None
