"""The plain data from which each rank of a run starts, its precision, and the saved run of a resume."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch
import yaml

from tfm_blocks.compose.run import missing_plugins
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.devices import CPU, device_name, has_fast_bf16
from tfm_blocks.distributed.cluster import RankInfo
from tfm_blocks.distributed.consistency import TEACHER, fingerprint
from tfm_blocks.errors import ConfigError, Problem, RunError, counted, shown
from tfm_blocks.language.spec import Spec
from tfm_blocks.registry.plugins import is_loaded
from tfm_blocks.runs.files import JsonFile, damaged, write_bytes
from tfm_blocks.runs.folder import CHECKPOINTS, CONFIG, METRICS, MODEL, RUN, WEIGHTS, expect_folder, expect_utf8
from tfm_blocks.runs.metrics import read_metric_names, read_rows
from tfm_blocks.runs.records import RunFile, SavedModel, Status
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.training.data import plan_corpus
from tfm_blocks.training.non_finite import IN_A_ROW
from tfm_blocks.training.schedules import PeakSettings, ScheduleSettings
from tfm_blocks.training.settings import RunSettings, read_run

CONFIG_KINDS = {"name": str, "vocab": int, "seed": int, "plugins": list, "model": dict, "data": dict, "trainer": dict}

PRECISIONS = ("fp32", "bf16")
AMD = "AuthenticAMD"  # vendor_id of /proc/cpuinfo


@dataclass(frozen=True)
class Precision:
    """`name` is `bf16` (autocast with float32 weights) or `fp32`; `reason` says why it was chosen."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"precision: {self.name} ({self.reason})"


@dataclass(frozen=True)
class RunSpec(JsonFile):
    """A run whose folder exists, as plain data that can be sent to any process.

    `start` is the content of run.json before the facts of this start. `command` resumes the run after a stop. Rank 0
    chose the `precision`. `checkpoint` is the file to resume from, or None. `asked_parameters` are the parameters with
    the requested vocabulary, or None if they are unknown. A `prolonged` run trains on after a checkpoint at which a
    callback stopped it.
    """

    config: Mapping[str, Any]
    folder: Path
    start: RunFile
    command: str
    precision: Precision
    checkpoint: Path | None = None
    asked_parameters: int | None = None
    prolonged: bool = False


def choose_precision(requested: Literal["auto", "bf16", "fp32"], device: str) -> Precision:
    """Return the requested precision, or for `auto` the faster one on a type of device by its capabilities.

    docs/notebook/results.md has the measurements behind the rule for CPUs.
    """
    if requested != "auto":
        return Precision(requested, f"trainer.precision={requested}")
    if device != CPU:
        return Precision("bf16" if has_fast_bf16(device) else "fp32", device_name(device))
    return cpu_precision(torch.cpu.get_capabilities(), _cpu_vendor())


def cpu_precision(capabilities: Mapping[str, object], vendor: str) -> Precision:
    """Return bf16 on CPUs whose bf16 products were measured to be faster than those in float32."""
    if capabilities.get("amx_bf16"):
        return Precision("bf16", "this CPU has AMX")
    if capabilities.get("avx512_bf16") and vendor == AMD:
        return Precision("bf16", "this AMD CPU has AVX512-BF16")
    return Precision("fp32", "this CPU has neither AMX nor AMD's AVX512-BF16")


def _cpu_vendor() -> str:
    """Return the vendor_id of /proc/cpuinfo; "" on other systems than Linux."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def recorded_precision(saved: SavedRun) -> Precision | None:
    """Return the precision of the last start; None if the run recorded none."""
    recorded = saved.start.newest_facts.get("precision")
    if not isinstance(recorded, dict) or recorded.get("name") not in PRECISIONS:
        return None
    return Precision(recorded["name"], str(recorded.get("reason")))


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
    """Raise ConfigError if there is nothing left to train after `step`, or if the run would repeat its failure."""
    steps, schedule = settings.trainer.steps, settings.schedule
    before = read_run(saved.config)
    skipped = saved.reason.endswith(IN_A_ROW)
    if saved.state == "diverged" and not (skipped and settings.trainer.patience_nan > before.trainer.patience_nan):
        rule = f"diverged ({saved.reason}), and a resumed run would diverge too, because it repeats the steps"
        help = "start a new run with a lower learning rate"
        help += ", or skip more steps with a higher trainer.patience_nan" if skipped else ""
        raise ConfigError(Problem("resume", rule, help=help))
    unchanged = (settings.callbacks, settings.trainer.steps) == (before.callbacks, before.trainer.steps)
    if _stopped_early(saved) and settings.callbacks.early_stopping.patience and unchanged:
        help = "write a higher callbacks.early_stopping.patience, or null"
        raise ConfigError(Problem("resume", saved.reason, help=help))
    branch = f"start a new run with a longer schedule from its weights: init_from={saved.folder}"
    if steps < step or (steps == step and saved.state == "done"):
        rule, longer = f"is {steps}, but the run already has {counted(step, 'step')}", 2 * max(step, steps)
        help = branch if _has_ended(schedule, longer) else f"train longer: trainer.steps={longer}"
        raise ConfigError(Problem("trainer.steps", rule, help=help))
    if steps > before.trainer.steps and _has_ended(schedule, steps):
        rule = f"is {steps}, but the learning rate of this run is 0 after step {schedule.steps}"
        raise ConfigError(Problem("trainer.steps", rule, help=branch))


def _has_ended(schedule: ScheduleSettings, step: int) -> TypeGuard[PeakSettings]:
    return isinstance(schedule, PeakSettings) and not schedule.rate(step)


def expect_untrained(saved: SavedRun) -> None:
    """Raise RunError if the run, which has no checkpoint, trained before: a restart would replace its results.

    A run killed before its first checkpoint may restart. With `checkpoint_every`, that checkpoint is at step 0.
    """
    logged = saved.config["trainer"].get("checkpoint_every") and read_rows(saved.folder / METRICS)
    if saved.state == "done" or logged or (saved.folder / WEIGHTS).is_file():
        rule = "has no checkpoint, but results of an earlier training, which a restart from step 0 would replace"
        help = f"restore {CHECKPOINTS}/, or start a new run with its weights: init_from={saved.folder}"
        raise RunError(Problem(str(saved.folder), rule, help=help))


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Replace config.yaml atomically."""
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    write_bytes(folder / CONFIG, text.encode("utf-8"))


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
    # the key of `at: {0: …}` is 0 in YAML, and "0" in model.json
    if json.loads(json.dumps(config["model"], default=repr, skipkeys=True)) != saved_model.model:
        rule = f"has a different model from {MODEL}, to which the weights belong"
        raise RunError(Problem(str(run / CONFIG), rule, help="restore it, or start a new run"))
    if (run / METRICS).exists():
        read_metric_names(run / METRICS)
    return saved


def find_restarted_run(root: Path, name: str, rank_info: RankInfo, command: str) -> SavedRun | None:
    """Return the run that this command began before its launcher restarted it, or None.

    The command must match too, because a batch script may start several runs with the same name. One ID in common is
    enough, because without --rdzv-id a node that replaces another one has a different ID. torchrun does not count a
    restart for a node that joins, so such a restart is not detected.
    """
    if not rank_info.restarts:
        return None
    number, launches = re.compile(rf"{re.escape(name)}(?:-(\d+))?"), set(rank_info.launch.splitlines())
    folders = {int(match[1] or 1): path for path in root.glob(f"{name}*") if (match := number.fullmatch(path.name))}
    for _, folder in sorted(folders.items(), reverse=True):
        with suppress(RunError):
            start = RunFile.read(folder)
            is_same = not launches.isdisjoint(start.launch.splitlines())
            if is_same and start.commands[:1] == (command,):
                return read_saved_run(folder)
    return None


def expect_same_text(saved: SavedRun, prepared: Prepared, spec: Spec, settings: RunSettings) -> None:
    """Raise RunError if the vocabulary or the text changed since the run began."""
    planned_corpus = plan_corpus(spec, prepared, settings.data, settings.objective)
    current = fingerprint(settings.seed, prepared, planned_corpus, settings.objective)
    for name, value in saved.start.text.items():
        if value != current.get(name):
            if name == TEACHER:
                teacher = shown(saved.config["objective"]["teacher"])
                rule = f"the weights of the teacher changed since the run began: {teacher}"
                raise RunError(Problem("objective.teacher", rule, help="restore the teacher, or start a new run"))
            rule = f"the {name} changed since the run began: {shown(saved.config.get('data', {}).get('dir'))}"
            raise RunError(Problem("data", rule, help="restore the text, or start a new run"))
