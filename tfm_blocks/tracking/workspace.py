"""Convert a dashboard to a workspace of Weights & Biases."""

from __future__ import annotations

import json
import re
from typing import Any

import wandb
import wandb_workspaces.reports.v2 as panels
import wandb_workspaces.workspaces as workspaces

from tfm_blocks.errors import Problem, RunError, cut
from tfm_blocks.metric_schema import Key
from tfm_blocks.tracking.dashboard import METRICS, STEP, Dashboard, Panel

WIDTH, HEIGHT, COLUMNS = 8, 6, 3  # of W&B's grid, which is 24 wide


def workspace(dashboard: Dashboard, project: str, entity: str) -> Any:
    """Return the workspace of a dashboard, not yet saved in W&B."""
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=dashboard.name,
        sections=[
            workspaces.Section(
                name=name, panels=[_with_layout(one, number) for number, one in enumerate(section)], is_open=True
            )
            for name, section in dashboard.all_sections.items()
        ],
        settings=workspaces.WorkspaceSettings(x_axis="Step"),
        runset_settings=workspaces.RunsetSettings(groupby=[workspaces.Config(name) for name in dashboard.group]),
    )


def rendered(workspace: Any) -> dict[str, Any]:
    """Return the JSON that W&B's server would receive. This uses a private method, because no public one exists."""
    view: dict[str, Any] = json.loads(workspace._to_model().model_dump_json(by_alias=True, exclude_none=True))
    return view


def save_workspace(workspace: Any) -> str:
    """Save the workspace in W&B and return its URL. Raises RunError."""
    try:
        workspace.save()
    except (wandb.Error, OSError, ValueError) as error:
        rule = f"the workspace {workspace.name} could not be saved: {cut(str(error))}"
        help = "wandb login stores a key; --entity and --project choose the workspace's project"
        raise RunError(Problem("W&B", rule, help=help)) from None
    return str(workspace.url)


def _with_layout(panel: Panel, number: int) -> Any:
    converted = _panel(panel)
    converted.layout = panels.Layout(x=number % COLUMNS * WIDTH, y=number // COLUMNS * HEIGHT, w=WIDTH, h=HEIGHT)
    return converted


def _panel(panel: Panel) -> Any:
    log = panel.log or None
    if panel.lines:
        axis = "Step" if panel.over == STEP else panel.over
        shown: dict[str, Any] = {"y": panel.lines}
        if "{" in "".join(panel.lines):  # several keys, whose names a run decides
            shown = {"metric_regex": "|".join(re.sub(r"{.*", ".*", name) for name in panel.lines)}
        return panels.LinePlot(x=axis, title=", ".join(panel.lines), log_y=log, **shown)
    if panel.bars:
        metrics = [METRICS[name].summarised for name in panel.bars]
        return panels.BarPlot(metrics=metrics, title=", ".join(panel.bars))
    if panel.scatter:
        x, y = map(_value, panel.scatter)
        return panels.ScatterPlot(x=x, y=y, log_x=log, title=" and ".join(panel.scatter))
    if panel.parallel:
        columns = [panels.ParallelCoordinatesPlotColumn(_value(name), log=log) for name in panel.parallel]
        return panels.ParallelCoordinatesPlot(columns=columns)
    if panel.importance:
        return panels.ParameterImportancePlot(with_respect_to=METRICS[panel.importance].summarised)
    if panel.media:
        return panels.MediaBrowser(media_keys=panel.media)
    return panels.RunComparer(diff_only="split")


def _value(name: str) -> Any:
    key: Key | None = METRICS.get(name)
    return panels.SummaryMetric(key.summarised) if key else panels.Config(name)
