"""Read dashboards from conf/dashboard/NAME.yaml, and check that runs log everything that their panels show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from tfm_blocks.compose.folders import CONF, GLOBAL_GROUPS, OF_A_SWEEP, group_files, list_options, read_yaml
from tfm_blocks.config.settings import RuleError, Settings, read_settings
from tfm_blocks.errors import ConfigError, Place, Problem, suggest
from tfm_blocks.language.files import display_path
from tfm_blocks.metric_schema import FACTS, MEDIA, METRIC_KEYS, TRAIN_KEYS, VAL_KEYS

GROUP = "dashboard"
STEP = "step"
NOT_LOGGED = frozenset({"defaults", "hydra", "resume", "match"})  # keys of train.yaml that are not settings of a run
Keys = Annotated[list[str], Field(min_length=1)]


class Panel(Settings):
    """A panel. Exactly one of the first seven fields must be set; it decides the kind of panel.

    lines: metrics `over` steps or another metric. bars: the value of each run. scatter: the values of two keys.
    parallel: parallel coordinates, one line per run. importance: the importance of each setting for a metric.
    media: samples or images. differences: the configs next to each other. log: logarithmic axes.
    The context of the validators is the settings that runs log.
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
    def _are_metrics(cls, value: Any) -> Any:
        return _known(value, METRICS)

    @field_validator("bars", "importance")
    @classmethod
    def _are_single_metrics(cls, value: Any) -> Any:
        return _known(value, SINGLE)

    @field_validator("over")
    @classmethod
    def _is_an_axis(cls, value: str) -> str:
        return str(_known(value, [STEP, *SINGLE]))

    @field_validator("media")
    @classmethod
    def _are_media(cls, value: Any) -> Any:
        return _known(value, MEDIA)

    @field_validator("scatter", "parallel")
    @classmethod
    def _are_values(cls, value: Any, info: ValidationInfo) -> Any:
        return _known(value, [*SINGLE, *(info.context or ())])


class Dashboard(Settings):
    """Panels by section, in a workspace called `name`.

    group: settings by whose values runs are grouped. rest: the name of a last section with a panel for each metric of
    training and validation that has no panel; without such metrics there is no section.
    """

    name: str
    group: list[str] = Field(default_factory=list)
    sections: Annotated[dict[str, Annotated[list[Panel], Field(min_length=1)]], Field(min_length=1)]
    rest: str | None = None

    @field_validator("group")
    @classmethod
    def _are_settings(cls, value: Any, info: ValidationInfo) -> Any:
        return _known(value, info.context or ())

    @property
    def all_sections(self) -> dict[str, list[Panel]]:
        """Return the sections, with a section for `rest`."""
        drawn = {name for panels in self.sections.values() for panel in panels for name in panel.lines or ()}
        rest = [Panel(lines=[key.name]) for key in (*TRAIN_KEYS, *VAL_KEYS) if key.name not in drawn]
        return {**self.sections, self.rest: rest} if self.rest and rest else self.sections


METRICS = {key.name: key for key in METRIC_KEYS}
SINGLE = [name for name in METRICS if "{" not in name]


def _known(value: Any, known: Iterable[str]) -> Any:
    for name in [value] if isinstance(value, str) else value or ():
        if name not in known:
            raise RuleError(f"shows {name}, which no run logs", suggest(name, known))
    return value


def settings_logged(folders: list[Path]) -> set[str]:
    """Return the config keys that W&B has for a run: facts, knobs of models, and settings with their groups."""
    keys = {f"facts.{name}" for name in FACTS} | {"model", "sweep_name"}
    for key, value in read_yaml(CONF / "train.yaml").items():
        if key not in NOT_LOGGED:
            keys |= set(_addresses(value, key)) if isinstance(value, dict) else {key}
    for path in list_options("model", folders).values():
        keys |= read_yaml(path).keys() - {"defaults", "model"}
    for group in {path.name for path in CONF.iterdir() if path.is_dir()} - {
        "model",
        GROUP,
        *GLOBAL_GROUPS,
        *OF_A_SWEEP,
    }:
        for path in [path for name in list_options(group, folders) for path in group_files(group, name, folders)]:
            keys |= set(_addresses(read_yaml(path), group))
    return keys


def _addresses(mapping: Mapping[str, Any], prefix: str) -> Iterable[str]:
    for name, value in mapping.items():
        if name == "defaults":
            continue
        yield f"{prefix}.{name}"
        if isinstance(value, dict):
            yield from _addresses(value, f"{prefix}.{name}")


def dashboards(folders: list[Path]) -> dict[str, Path]:
    """Return the files of all dashboards by name."""
    return list_options(GROUP, folders)


def read_dashboard(name: str, folders: list[Path]) -> Dashboard:
    """Read a dashboard. Raises ConfigError if it does not exist, or shows a key that no run logs."""
    known = dashboards(folders)
    if name not in known:
        raise ConfigError(Problem(GROUP, f"there is no dashboard called {name!r}", help=suggest(name, known)))
    settings = settings_logged(folders)
    try:
        return read_settings(Dashboard, read_yaml(known[name]), settings)
    except ConfigError as error:
        place = Place(display_path(known[name]))
        raise ConfigError(
            [
                Problem(f"{GROUP}.{name}.{problem.address}", problem.rule, place, help=problem.help)
                for problem in error.problems
            ]
        ) from None
