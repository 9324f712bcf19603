"""The loggers of a run, which are told again what those of its earlier parts have lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfm_blocks.data.prepare import Prepared
from tfm_blocks.launch.begun import Job
from tfm_blocks.runs.folder import METRICS, step_of
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.training.contract import columns
from tfm_blocks.training.loggers import CsvLogger, RunLogger
from tfm_blocks.training.settings import RunSettings


def open_loggers(
    job: Job, settings: RunSettings, prepared: Prepared, facts: Mapping[str, Any], losses: Sequence[str]
) -> list[RunLogger]:
    """metrics.csv, with a column for each of `losses`, and what the settings name. When a run goes on, each has all
    rows up to the checkpoint.
    """
    path = job.folder / METRICS
    last = step_of(job.checkpoint) if job.checkpoint else 0
    rows = [row for row in read_rows(path) if row["step"] <= last]
    others = list(_others(job, settings, facts))
    for logger in others:
        for row in rows:
            logger.log_metrics({name: value for name, value in row.items() if name != "step"}, int(row["step"]))
    groups = dict.fromkeys([*prepared.val.groups, *prepared.last_scored[1].groups])
    return [CsvLogger(path, columns(losses, list(groups))), *others]


def _others(job: Job, settings: RunSettings, facts: Mapping[str, Any]) -> Iterator[RunLogger]:
    """Each is imported when it is asked for: two of them are extras, and all take a while."""
    config, asked = logged_config(job.config, str(facts["model"])), settings.logger
    if asked.wandb:
        from tfm_blocks.training.wandb_logger import WandbLogger

        yield WandbLogger(asked.wandb, job.folder, config | {"facts": dict(facts)}, job.wandb_id)
    if asked.tensorboard:
        from tfm_blocks.training.tensorboard_logger import TensorboardLogger

        yield TensorboardLogger(job.folder, config | {"facts": dict(facts)})
    if asked.mlflow:
        from tfm_blocks.training.mlflow_logger import MlflowLogger

        yield MlflowLogger(asked.mlflow, job.folder, config, facts, job.wandb_id)


def logged_config(config: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The config with its knobs flat at the root, as people sweep them.

    `model` is the name of the model, which is what a sweep sets by this key; what it names is `graph`.
    """
    return {"graph" if key == "model" else key: value for key, value in config.items()} | {"model": model}
