"""Dashboards and sweeps for W&B: conf/dashboard/NAME.yaml as a workspace, and the file of `wandb sweep`.

Panels must show what runs log. The libraries of W&B are imported only for the conversion to a workspace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationInfo, field_validator, model_validator

from tfm_blocks.compose.command_line import Request
from tfm_blocks.compose.folders import CONF, GLOBAL_GROUPS, OF_A_SWEEP, group_files, list_options, read_yaml
from tfm_blocks.compose.sweep import Interval, list_parts
from tfm_blocks.config.settings import RuleError, Settings, read_settings
from tfm_blocks.errors import ConfigError, Place, Problem, RunError, config_error, cut, display_path, suggest
from tfm_blocks.metric_schema import METRIC_KEYS, TRAIN_KEYS, VAL_KEYS

GROUP = "dashboard"
STEP = "step"
WIDTH, HEIGHT, COLUMNS = 8, 6, 3  # of W&B's grid, which is 24 wide
NOT_LOGGED = frozenset(
    {"defaults", "hydra", "resume", "cooldown", "ladder", "match"}
)  # keys of train.yaml that are not settings of a run
GOALS = {"min": "minimize", "max": "maximize"}
DISTRIBUTIONS = {  # W&B's names, by (logarithmic, integer)
    (False, False): "uniform",
    (False, True): "int_uniform",
    (True, False): "log_uniform_values",
    (True, True): "q_log_uniform_values",
}
MEDIA = {  # tables and images that are logged at each validation
    "samples/val": "table of source, output and reference for the first validation sentences, "
    "the same in each validation",
    "samples/test": "the same table for the test set, logged once",
    "attention/1": "image of each attention head for a short validation sentence, the same in each validation",
    "attention/2": "the same images for another sentence",
}
LABEL_MEDIA = {  # of runs whose labels are classes
    "confusion/val": "image of the confusion matrix of the validation labels; `objective=label` with classes",
    "confusion/test": "the same image for the test labels, logged once",
}
FACTS = {  # known at the start of a run, besides its config: `facts.NAME`
    "model": "name of the model",
    "parameters": "number of parameters; tied and shared ones count once",
    "parameters_asked": "number of parameters with the requested vocabulary size, as in `tfm show`",
    "parameters_by_node": "number of parameters by node address",
    "optimizer_groups": "optimizer, range of rate factors, decay and size of each group of weights",
    "config_hash": "equal for runs that differ only in their seed, names or loggers, or in keys that a resume may "
    "change, except `trainer.steps`, `trainer.average` and `callbacks.early_stopping`",
    "git_commit": "commit of the folder in which the run started, with -dirty if files differ from it",
    "seed": "seed of weights, order and dropout",
    "resumed": "number of resumes",
    "command": "newest command line",
    "hardware": "kind and name of the device, number of devices, nodes and CPU cores",
    "precision": "chosen precision, and the reason",
    "versions": "versions of Python and the libraries",
}
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
        kinds = list(type(self).model_fields)[:7]
        if sum(bool(getattr(self, kind)) for kind in kinds) != 1:
            raise RuleError(f"must be one of {', '.join(kinds)}", "write one of them, such as {lines: [val/loss]}")
        return self

    @field_validator("lines", "bars", "scatter", "parallel", "importance", "media", "over")
    @classmethod
    def _is_logged(cls, value: Any, info: ValidationInfo) -> Any:
        values = [*SINGLE, *(info.context or ())]
        known: dict[str | None, Iterable[str]] = {
            "lines": METRICS, "over": [STEP, *SINGLE], "media": MEDIA | LABEL_MEDIA,
            "scatter": values, "parallel": values,
        }  # fmt: skip
        return _known(value, known.get(info.field_name, SINGLE))


class Dashboard(Settings):
    """Panels by section, in a workspace called `name`.

    group: settings by whose values runs are grouped. rest: the name of a last section with a panel for each metric of
    training and validation that has no panel; without such metrics there is no section. If `sections` has a section of
    this name, the panels are added to it.
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
        if not (self.rest and rest):
            return self.sections
        return {**self.sections, self.rest: [*self.sections.get(self.rest, ()), *rest]}


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
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    for group in groups - {"model", GROUP, *GLOBAL_GROUPS, *OF_A_SWEEP}:
        for name in list_options(group, folders):
            for path in group_files(group, name, folders):
                keys |= set(_addresses(read_yaml(path), group))
    return keys


def _addresses(mapping: Mapping[str, Any], prefix: str) -> Iterable[str]:
    for name, value in mapping.items():
        if name != "defaults":
            yield f"{prefix}.{name}"
            if isinstance(value, dict):
                yield from _addresses(value, f"{prefix}.{name}")


def read_dashboard(name: str, folders: list[Path]) -> Dashboard:
    """Read a dashboard. Raises ConfigError if it does not exist, or shows a key that no run logs."""
    known = list_options(GROUP, folders)
    if name not in known:
        raise config_error(GROUP, f"there is no dashboard called {name!r}", suggest(name, known))
    try:
        return read_settings(Dashboard, read_yaml(known[name]), settings_logged(folders))
    except ConfigError as error:
        place = Place(display_path(known[name]))
        problems = [replace(one, address=f"{GROUP}.{name}.{one.address}", place=place) for one in error.problems]
        raise ConfigError(problems) from None


def workspace(dashboard: Dashboard, project: str, entity: str) -> Any:
    """Return the workspace of a dashboard, not yet saved in W&B."""
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports.v2 import Layout

    sections = []
    for name, section in dashboard.all_sections.items():
        panels = [_convert(panel) for panel in section]
        for number, panel in enumerate(panels):
            panel.layout = Layout(x=number % COLUMNS * WIDTH, y=number // COLUMNS * HEIGHT, w=WIDTH, h=HEIGHT)
        sections.append(workspaces.Section(name=name, panels=panels, is_open=True))
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=dashboard.name,
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="Step"),
        runset_settings=workspaces.RunsetSettings(groupby=[workspaces.Config(name) for name in dashboard.group]),
    )


def rendered(workspace: Any) -> dict[str, Any]:
    """Return the JSON that W&B's server would receive. This uses a private method, because no public one exists."""
    view: dict[str, Any] = json.loads(workspace._to_model().model_dump_json(by_alias=True, exclude_none=True))
    return view


def save_workspace(workspace: Any) -> str:
    """Save the workspace in W&B and return its URL. Raises RunError."""
    import wandb

    try:
        workspace.save()
    except (wandb.Error, OSError, ValueError) as error:
        rule = f"the workspace {workspace.name} could not be saved: {cut(str(error))}"
        help = "wandb login stores a key; --entity and --project choose the workspace's project"
        raise RunError(Problem("W&B", rule, help=help)) from None
    return str(workspace.url)


def _convert(panel: Panel) -> Any:
    """Return a panel of W&B."""
    from wandb_workspaces.reports import v2 as panels

    def value(name: str) -> Any:
        return panels.SummaryMetric(METRICS[name].summarised) if name in METRICS else panels.Config(name)

    log = panel.log or None
    if panel.lines:
        axis = "Step" if panel.over == STEP else panel.over
        shown: dict[str, Any] = {"y": panel.lines}
        if "{" in "".join(panel.lines):  # several keys, whose names a run decides
            shown = {"metric_regex": "|".join(re.sub(r"{.*", ".*", name) for name in panel.lines)}
        return panels.LinePlot(x=axis, title=", ".join(panel.lines), log_y=log, **shown)
    if panel.bars:
        return panels.BarPlot(metrics=[METRICS[name].summarised for name in panel.bars], title=", ".join(panel.bars))
    if panel.scatter:
        x, y = map(value, panel.scatter)
        return panels.ScatterPlot(x=x, y=y, log_x=log, title=" and ".join(panel.scatter))
    if panel.parallel:
        columns = [panels.ParallelCoordinatesPlotColumn(value(name), log=log) for name in panel.parallel]
        return panels.ParallelCoordinatesPlot(columns=columns)
    if panel.importance:
        return panels.ParameterImportancePlot(with_respect_to=METRICS[panel.importance].summarised)
    if panel.media:
        return panels.MediaBrowser(media_keys=panel.media)
    return panels.RunComparer(diff_only="split")


def sweep_file(request: Request, method: str, metric: str, project: str) -> str:
    """Return the YAML for `wandb sweep`, in which the keys with several values vary. Its agents start train.py.

    Raises ConfigError for overrides that the method does not accept.
    """
    options = ["--config-dir", str(request.config_dir.resolve())] if request.config_dir else []
    goals = {key.name: GOALS[key.summary] for key in METRIC_KEYS if key.summary in GOALS and "{" not in key.name}
    if metric not in goals:
        raise config_error("--metric", f"is not a metric of a run: {metric}", suggest(metric, goals))
    parameters: dict[str, dict[str, Any]] = {}
    for part in list_parts(request.overrides, request.folders):
        if not isinstance(part, Interval):
            values = [_number(text.partition("=")[2]) for text in part.texts]
            key = part.texts[0].partition("=")[0]
            parameters[key] = {"values": values} if len(values) > 1 else {"value": values[0]}
        elif method == "grid":
            rule = f"is an interval from {part.low:g} to {part.high:g}, but a grid needs separate values"
            raise config_error(part.key, rule, f"write {part.key}=a,b,c, or --method random or bayes")
        else:
            distribution = DISTRIBUTIONS[part.log, part.whole]
            parameters[part.key] = {"distribution": distribution, "min": part.low, "max": part.high}
    if all("value" in parameter for parameter in parameters.values()):
        raise config_error("sweep", "has only one value for each key", "write several: heads=2,4")
    sweep = {
        "program": "train.py",
        "project": project,
        "method": method,
        "metric": {"name": metric, "goal": goals[metric]},
        "parameters": parameters,
        "command": ["${env}", "${interpreter}", "${program}", *options, "${args_no_hyphens}"],
    }
    return str(yaml.safe_dump(sweep, sort_keys=False, allow_unicode=True))


def _number(text: str) -> int | float | str:
    """Return a number if the text is one, so that W&B can plot it. Other values stay text: null would become None."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
