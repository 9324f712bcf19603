"""Branch a decay of the learning rate off the stable part of a run: `tfm train cooldown=RUN@STEP`.

A branch is a new run folder with a checkpoint of its parent, which is then resumed with a schedule that decays. So it
equals the run that had this schedule from its first step.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.run import COOLDOWN_KEYS, compose_resumed, expect_name, read_value, task_overrides
from tfm_blocks.data.prepare import prepare, with_saved_tokenizer
from tfm_blocks.errors import ConfigError, Problem, RuleError, RunError, counted
from tfm_blocks.exchange.folder import inherit_record
from tfm_blocks.launch.check import CheckedRun, check_resumed_run, load_listed
from tfm_blocks.launch.finalize import expect_kept_weights
from tfm_blocks.launch.run_spec import expect_same_text, read_saved_run, write_config
from tfm_blocks.runs.checkpoints import Checkpoint, copy_checkpoint, damage_of, list_checkpoints
from tfm_blocks.runs.folder import CHECKPOINTS, CONFIG, METRICS, MODEL, TOKENIZER, claim_folder
from tfm_blocks.runs.records import Status
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.training.non_finite import SKIPPED
from tfm_blocks.training.schedules import PeakSettings, steps_of_branch
from tfm_blocks.training.settings import read_run


def check_cooldown(config: Any, folder: Path, step: int) -> tuple[CheckedRun, tuple[SavedRun, int]]:
    """Return the checked run that branches off `folder` after `step`, with its parent and the step.

    A branch that a launcher restarted exists already, so the checkpoint of the parent is checked in `open_branch`.
    Raises ConfigError and RunError.
    """
    load_listed(read_value(config, "plugins"))
    parent = read_saved_run(folder)
    return check_resumed_run(_compose(config, parent, step)), (parent, step)


def _find_checkpoint(parent: SavedRun, step: int) -> Checkpoint:
    """Return the checkpoint after `step`. Raises RunError with the steps of the others, also if it is damaged."""
    folder = parent.folder / CHECKPOINTS
    listed = list_checkpoints(folder)
    steps = ", ".join(f"{checkpoint.step}" for checkpoint in reversed(listed) if checkpoint.step != step)
    for checkpoint in listed:
        if checkpoint.step == step:
            if reason := damage_of(folder / checkpoint.file, checkpoint):
                help = f"restore it, or choose another step{f': {steps}' if steps else ''}"
                raise RunError(Problem(str(folder / checkpoint.file), f"is damaged: {reason}", help=help))
            return checkpoint
    rule = f"{parent.folder} has no checkpoint after step {step}" + (f", but after {steps}" if steps else "")
    help = f"choose one of these steps; trainer.checkpoint_at=[{step}] keeps this one during training"
    raise RunError(Problem("cooldown", rule, help=help))


def _compose(config: Any, parent: SavedRun, step: int) -> Composed:
    """Return the config of the parent with a schedule that decays after `step`. Raises ConfigError."""
    if any(text.partition("=")[0].lstrip("+") == "trainer.steps" for text in task_overrides(config)):
        rule = "cannot be set: a cooldown ends after the step of the checkpoint and the length of its decay"
        raise ConfigError(Problem("trainer.steps", rule, help="write schedule.decay=…, in steps or as a fraction"))
    schedule = _expect_stable(parent, step)
    where = str(parent.folder / CONFIG)
    composed = compose_resumed(config, parent.config, where, parent.config_text, COOLDOWN_KEYS)
    mapping = {key: value for key, value in composed.mapping.items() if key not in ("sweep", "sweep_name")}
    if sweep := composed.mapping.get("sweep"):
        mapping["sweep_name"] = expect_name("sweep.name", sweep["name"], composed.sources)
    if ("name",) not in composed.sources.overrides:
        mapping["name"] = f"{parent.name}-cooldown{step}"
    mapping["name"] = expect_name("name", mapping["name"], composed.sources)
    decaying = {**read_value(config, "schedule"), **mapping["schedule"], "name": "wsd", "warmup": schedule.warmup}
    try:
        steps = steps_of_branch(step, decaying["decay"], mapping["data"].get("step_tokens"))
    except RuleError as error:
        raise ConfigError(composed.sources.problem(("schedule", "decay"), str(error), help=error.help)) from None
    mapping["schedule"] = decaying | {"decay": steps - step, "steps": steps}
    mapping["trainer"] = mapping["trainer"] | {"steps": steps}
    if ("trainer", "checkpoint_at") not in composed.sources.overrides:
        mapping["trainer"]["checkpoint_at"] = []
    return replace(composed, mapping=mapping)


def _expect_stable(parent: SavedRun, step: int) -> PeakSettings:
    """Return the schedule of the parent. Raises ConfigError unless `step` is in its stable part."""
    schedule = read_run(parent.config).schedule
    if not isinstance(schedule, PeakSettings):
        rule = f"{parent.folder} has schedule={schedule.name}, which has no stable part"
        raise ConfigError(Problem("cooldown", rule, help="train a run with schedule=constant or schedule=wsd"))
    if not schedule.warmup <= step <= schedule.stable_end:
        end = f" and ends at step {schedule.stable_end:g}" if schedule.stable_end < schedule.steps else ""
        rule = f"the stable part of {parent.folder} begins after the warm-up, at step {schedule.warmup}{end}"
        raise ConfigError(
            Problem("cooldown", f"{rule}, but the step is {step}", help="choose a step of the stable part")
        )
    return schedule


def open_branch(parent: SavedRun, step: int, run: CheckedRun, root: Path, launch: str) -> SavedRun:
    """Create the folder of a branch below `root`, which can be resumed.

    Raises RunError if the parent has no intact checkpoint after `step`, or if the text changed.
    """
    settings, config, source = run.settings, dict(run.composed.mapping), parent.folder
    checkpoint = _find_checkpoint(parent, step)
    prepared = prepare(with_saved_tokenizer(settings.data, source), parent.start.vocab, tell=lambda text: None)
    expect_same_text(parent, prepared, run.spec, settings)
    expect_kept_weights(settings, source / CHECKPOINTS / checkpoint.file)
    folder = claim_folder(root, config["name"])
    copy_checkpoint(source / CHECKPOINTS, folder / CHECKPOINTS, checkpoint)
    for name in (TOKENIZER, METRICS, SKIPPED, MODEL):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    inherit_record(source, folder)
    write_config(folder, config)
    start = replace(
        parent.start,
        wandb_id=uuid4().hex[:8],
        commands=(),
        launch=launch,
        choices={**parent.start.choices, "schedule": run.settings.schedule.name},
        prolonged=checkpoint.step,
        parent=f"{source}@{checkpoint.step}",
    )
    start.write(folder)
    status = Status("stopped")
    status.write(folder)
    print(f"cooldown: {folder} branches off {source} after {counted(checkpoint.step, 'step')}")
    return SavedRun(folder, start=start, status=status)
