"""The plain data from which each rank of a run starts, and the saved run from which a resume makes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfm_blocks.compose.run import missing_plugins
from tfm_blocks.distributed.cluster import RankInfo
from tfm_blocks.distributed.consistency import TEACHER, Fingerprint
from tfm_blocks.errors import ConfigError, Problem, RunError, shown
from tfm_blocks.launch.precision import PRECISIONS
from tfm_blocks.registry.plugins import is_loaded
from tfm_blocks.runs.files import JsonFile, damaged
from tfm_blocks.runs.folder import CHECKPOINTS, CONFIG, METRICS, MODEL, RUN, WEIGHTS, expect_folder, expect_utf8
from tfm_blocks.runs.metrics import read_metric_names, read_rows
from tfm_blocks.runs.records import RunFile, SavedModel, Status
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.training.schedules import PeakSettings
from tfm_blocks.training.settings import RunSettings, read_run

CONFIG_KINDS = {"name": str, "vocab": int, "seed": int, "plugins": list, "model": dict, "data": dict, "trainer": dict}


@dataclass(frozen=True)
class RunSpec(JsonFile):
    """A run whose folder exists, as plain data that can be sent to any process.

    `checkpoint` is the file to resume from, or None. `command` resumes the run after a stop. After `until` steps the
    run stops as after a signal. `asked_vocab` and `asked_parameters` are the requested size of the vocabulary, and the
    parameters with it; `asked_parameters` is None if they are unknown. A `prolonged` run trains on after
    a checkpoint at which a callback stopped it. `precision` holds the fields of `Precision`, which rank 0 chose.
    """

    config: Mapping[str, Any]
    folder: Path
    asked_vocab: int
    command: str
    wandb_id: str
    checkpoint: Path | None = None
    until: int | None = None
    asked_parameters: int | None = None
    prolonged: bool = False
    precision: Mapping[str, Any] = field(default_factory=dict)


def recorded_precision(saved: SavedRun) -> dict[str, str]:
    """Return the precision of the last start; empty if the run recorded none."""
    recorded = saved.start.newest_facts.get("precision")
    if not isinstance(recorded, dict) or recorded.get("name") not in PRECISIONS:
        return {}
    return {name: str(recorded.get(name)) for name in ("name", "reason")}


def _stopped_early(saved: SavedRun) -> bool:
    """Return True if the run is done, but a callback ended it before its last step."""
    return saved.state == "done" and bool(saved.reason)


def is_prolonged(saved: SavedRun, settings: RunSettings, step: int) -> bool:
    """Return True if the run trains on after `step`, at which a callback may have stopped it.

    It does if it was scored, if its callbacks changed, or if an earlier resume began with it after this step.
    """
    changed = settings.callbacks != read_run(saved.config).callbacks
    return _stopped_early(saved) or changed or saved.start.prolonged == step


def expect_resumable(saved: SavedRun, settings: RunSettings, step: int) -> None:
    """Raise ConfigError if there is nothing left to train after `step`, or if the run would fail again."""
    steps, schedule = settings.trainer.steps, settings.schedule
    if saved.state == "diverged":
        rule = f"diverged ({saved.reason}), and would do so again: a resumed run repeats its steps"
        raise ConfigError(Problem("resume", rule, help="start a new run with a lower learning rate"))
    before = read_run(saved.config)
    unchanged = (settings.callbacks, settings.trainer.steps) == (before.callbacks, before.trainer.steps)
    if _stopped_early(saved) and settings.callbacks.early_stopping.patience and unchanged:
        help = "write a higher callbacks.early_stopping.patience, or null"
        raise ConfigError(Problem("resume", saved.reason, help=help))
    if steps < step or (steps == step and saved.state == "done"):
        rule = f"is {steps}, but the run already has {step} steps"
        help = f"train longer: trainer.steps={2 * max(step, steps)}"
        raise ConfigError(Problem("trainer.steps", rule, help=help))
    if isinstance(schedule, PeakSettings) and not schedule.rate(steps):
        rule = f"is {steps}, but the learning rate of this run is 0 after step {schedule.steps}"
        raise ConfigError(Problem("trainer.steps", rule, help="start a new run with a longer schedule"))


def expect_untrained(saved: SavedRun) -> None:
    """Raise RunError if the run, which has no checkpoint, trained before: a restart would replace its results.

    A run killed before its first checkpoint may restart. With `checkpoint_every`, that checkpoint is at step 0.
    """
    logged = saved.config["trainer"].get("checkpoint_every") and read_rows(saved.folder / METRICS)
    if saved.state == "done" or logged or (saved.folder / WEIGHTS).is_file():
        rule = "has no checkpoint, but results of an earlier training, which a restart from step 0 would replace"
        help = f"restore {CHECKPOINTS}/, or start a new run with its weights: init_from={saved.folder}"
        raise RunError(Problem(str(saved.folder), rule, help=help))


def read_saved_run(run: Path) -> SavedRun:
    """Read the folder of a run. Raises RunError unless it is the intact folder of a training run.

    Raises ConfigError if a plug-in of the run is not loaded.
    """
    expect_folder(run)
    expect_utf8(run)
    start, status, saved_model = RunFile.read(run), Status.read(run), SavedModel.read(run)
    if not (start.vocab and start.text and start.wandb_id):
        raise damaged(run / RUN, "it must have vocab, wandb_id and text")
    saved = SavedRun(run, start=start, status=status)
    config = saved.config
    if "${" in saved.config_text:
        raise damaged(run / CONFIG, "it must be a mapping without ${…}")
    for key, kind in CONFIG_KINDS.items():
        if not isinstance(config.get(key), kind):
            raise damaged(run / CONFIG, f"{key} must be a {kind.__name__}, but is {shown(config.get(key))}")
    if missing := [module for module in config["plugins"] if not is_loaded(str(module))]:
        raise ConfigError(missing_plugins(missing, config["plugins"]))
    read_run(config)
    if _with_text_keys(config["model"]) != saved_model.model:
        rule = f"has a different model from {MODEL}, to which the weights belong"
        raise RunError(Problem(str(run / CONFIG), rule, help="restore it, or start a new run"))
    if (run / METRICS).exists():
        read_metric_names(run / METRICS)
    return saved


def _with_text_keys(value: Any) -> Any:
    """Return the value with its keys as JSON has them: the key of `at: {0: …}` is 0 in YAML and "0" in model.json."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, list) else value


def find_restarted_run(root: Path, name: str, rank_info: RankInfo, command: str) -> SavedRun | None:
    """Return the run that this command began before its launcher restarted it, or None.

    The command must match too, because a batch script may start several runs with the same name.
    """
    if not rank_info.restarts:
        return None
    number = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
    folders = {int(match[1] or 1): path for path in root.glob(f"{name}*") if (match := number.fullmatch(path.name))}
    for _, folder in sorted(folders.items(), reverse=True):
        with suppress(RunError):
            start = RunFile.read(folder)
            if start.launch == rank_info.launch and start.commands[:1] == (command,):
                return read_saved_run(folder)
    return None


def expect_same_text(saved: SavedRun, current: Fingerprint) -> None:
    """Raise RunError if the vocabulary or the text changed since the run began."""
    for name, value in saved.start.text.items():
        if value != current.get(name) and name == TEACHER:
            rule = (
                f"the weights of the teacher changed since the run began: {shown(saved.config['objective']['teacher'])}"
            )
            raise RunError(Problem("objective.teacher", rule, help="restore the teacher, or start a new run"))
        if value != current.get(name):
            rule = f"the {name} changed since the run began: {shown(saved.config.get('data', {}).get('dir'))}"
            raise RunError(Problem("data", rule, help="restore the text, or start a new run"))
