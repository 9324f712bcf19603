from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.preloaded import run_python
from tfm_blocks.compose.composition import Composer
from tfm_blocks.compose.folders import CONF, config_folders, list_options, read_yaml
from tfm_blocks.compose.run import compose_job
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.facts import logged_config
from tfm_blocks.metric_schema import METRIC_KEYS
from tfm_blocks.tracking.dashboard import FACTS, GROUP, MEDIA, read_dashboard, rendered, settings_logged, workspace

GROUPS = ("data", "objective", "optimizer", "schedule", "trainer", "logger")
NEEDED = {"distil": ["objective.teacher=x"], "replaced_token": ["objective.generator={model: electra}"]}
SHIPPED = sorted(list_options(GROUP, [CONF]))


def test_the_shipped_dashboards_are_of_training_comparison_and_importance() -> None:
    assert SHIPPED == ["comparison", "importance", "training"]


@pytest.mark.parametrize("name", SHIPPED)
def test_wandb_workspaces_reads_a_rendered_dashboard_unchanged(name: str) -> None:
    dashboard = read_dashboard(name, [CONF])
    view = rendered(workspace(dashboard, "project", "team"))
    from wandb_workspaces.workspaces import Workspace, internal

    back = Workspace._from_model(internal.View.model_validate(view))
    assert (back.name, back.project, back.entity) == (dashboard.name, "project", "team")
    assert [section.name for section in back.sections] == list(dashboard.sections)
    assert [len(section.panels) for section in back.sections] == [len(one) for one in dashboard.sections.values()]
    assert rendered(back) == view


def test_a_dashboard_that_cannot_be_pushed_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NETRC"))}
    command = ["-m", "tfm_blocks", "dashboard", "push", "training"]
    done = run_python(command, env=environment | {"HOME": str(tmp_path)})
    assert done.returncode == 1 and done.stderr.splitlines()[-2].startswith(
        "error: W&B: the workspace Training could not be saved"
    )
    assert "Traceback" not in done.stderr and "wandb login" in done.stderr.splitlines()[-1]


def test_a_panel_in_wandb_equals_the_panel_of_the_file() -> None:
    importance, comparison = (workspace(read_dashboard(name, [CONF]), "p", "") for name in ("importance", "comparison"))
    configs = [
        panel._to_model().config.model_dump(by_alias=True) for one in importance.sections for panel in one.panels
    ]
    assert configs[0]["targetKey"] == "val/loss.min" and configs[1]["targetKey"] == "val/bleu.max"
    accessors = [column["accessor"] for column in configs[2]["columns"]]
    assert {"config:heads.value", "config:model.value", "summary:val/loss.min"} <= set(accessors)
    assert [one.name for one in comparison.runset_settings.groupby] == ["facts.model", "facts.config_hash"]
    lines = comparison.sections[1].panels[0]._to_model().config
    assert (lines.x_axis, lines.metrics) == ("train/tokens", ["val/loss"])


def test_the_training_dashboard_shows_all_that_is_logged_in_training() -> None:
    panels = [panel for section in read_dashboard("training", [CONF]).all_sections.values() for panel in section]
    shown = {name for panel in panels for name in [*(panel.lines or ()), *(panel.media or ())]}
    logged = {key.name for key in METRIC_KEYS if not key.name.startswith("test/")} | set(MEDIA)
    assert shown == logged


def test_the_rest_is_added_to_a_section_of_its_name(tmp_path: Path) -> None:
    text = "name: Mine\nrest: Rest\nsections: {Rest: [{bars: [test/bleu]}, {lines: [val/loss]}]}\n"
    (section,) = read_dashboard("mine", write(tmp_path, text)).all_sections.values()
    assert [panel.bars for panel in section[:2]] == [["test/bleu"], None]
    assert len(section) > 2 and all(panel.lines != ["val/loss"] for panel in section[2:])


def write(folder: Path, text: str) -> list[Path]:
    (folder / "dashboard").mkdir()
    (folder / "dashboard" / "mine.yaml").write_text(text)
    return [CONF, folder]


@pytest.mark.parametrize(
    ("panel", "message"),
    [
        ("{lines: [val/blue]}", "sections.One.lines: shows val/blue, which no run logs(?s:.*)did you mean val/bleu"),
        ("{lines: [val/bleu], over: tokens}", r"shows tokens, which no run logs"),
        ("{scatter: [haeds, val/loss]}", "shows haeds, which no run logs(?s:.*)did you mean heads"),
        ("{scatter: [sweep.trials, val/loss]}", "shows sweep.trials, which no run logs"),
        ("{parallel: [launcher.cpus, val/loss]}", "shows launcher.cpus, which no run logs"),
        ("{parallel: [data.defaults, val/loss]}", "shows data.defaults, which no run logs"),
        ("{scatter: [heads]}", "must hold at least 2"),
        ("{media: [samples]}", "shows samples"),
        ("{importance: facts.seed}", "shows facts.seed"),
        ("{lines: [val/bleu], bars: [val/bleu]}", "must be one of lines, bars"),
        ("{differences: false}", "must be one of lines, bars"),
        ("{lines: null}", "must be one of lines, bars"),
        ("{bar: [val/bleu]}", "no such setting"),
    ],
)
def test_a_panel_with_an_unknown_key_is_refused_with_its_file(tmp_path: Path, panel: str, message: str) -> None:
    folders = write(tmp_path, f"name: Mine\nsections:\n  One:\n    - {panel}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        read_dashboard("mine", folders)
    assert "mine.yaml" in str(caught.value) and all(one.help for one in caught.value.problems)


@pytest.mark.grid
def test_panels_can_show_exactly_the_settings_that_runs_log() -> None:
    """The runs together have every option of every group, and every knob of a model."""
    models = list_options("model", [CONF])
    groups = [list_options(group, [CONF]) for group in GROUPS]
    logged = {f"facts.{name}" for name in FACTS}
    for names in zip_longest(*groups):
        chosen = [f"{group}={name}" for group, name in zip(GROUPS, names, strict=True) if name]
        files = ["data.dir=."] if names[0] in ("text", "labels", "lm", "multi30k", "multi30k_raw") else []
        needed = NEEDED.get(names[1], [])
        logged |= logged_by(*chosen, *files, *needed, "sweep.name=x")
    for name, path in models.items():
        if not read_yaml(path).keys() - {"defaults", "model"} <= logged:
            logged |= logged_by(f"model={name}")
    of_a_run = {"cooldown", "objective.generator.model"}  # that of a branch, and a key of a mapping that a run fills
    assert settings_logged([CONF]) == logged - of_a_run


def logged_by(*overrides: str) -> set[str]:
    """Return the addresses in the config of a run, except addresses in its graph."""
    config = logged_config(compose_job(overrides, Composer(config_folders(None))).mapping, "tiny")
    names = set()
    for key, value in config.items():
        if key not in ("graph", "resume"):
            names |= set(addresses(value, key)) if isinstance(value, dict) else {key}
    return names


def addresses(group: dict[str, Any], around: str) -> Iterator[str]:
    for name, value in group.items():
        yield f"{around}.{name}"
        if isinstance(value, dict):
            yield from addresses(value, f"{around}.{name}")


def test_knobs_of_own_models_and_settings_of_own_groups_can_be_shown(tmp_path: Path) -> None:
    folders = write(tmp_path, "name: Mine\nsections: {One: [{scatter: [width, schedule.ramp]}]}\n")
    with pytest.raises(ConfigError, match=r"(?s)shows width, which no run logs.*"):
        read_dashboard("mine", folders)
    for path, text in (("model/mine", "defaults: [tiny, _self_]\nwidth: 2\n"), ("schedule/mine", "ramp: 3\n")):
        (tmp_path / path).parent.mkdir()
        (tmp_path / f"{path}.yaml").write_text(text)
    assert read_dashboard("mine", folders).name == "Mine"
