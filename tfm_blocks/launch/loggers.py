"""Open the loggers of a run. When it resumes, they get all rows up to the checkpoint again."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tfm_blocks.data.prepare import Prepared
from tfm_blocks.distributed.signals import StoppedError
from tfm_blocks.errors import ConfigError, Problem, TfmError
from tfm_blocks.launch.run_spec import RunSpec
from tfm_blocks.metric_schema import columns
from tfm_blocks.runs.folder import METRICS, step_of
from tfm_blocks.runs.metrics import Row, read_rows
from tfm_blocks.tracking.lightning_loggers import CsvLogger, FaultTolerantLogger, LightningLogger, in_a_line
from tfm_blocks.tracking.loggers import LOGGERS, LoggedRun
from tfm_blocks.training.checkpoints import PreemptedError
from tfm_blocks.training.settings import RunSettings


@contextmanager
def open_loggers(
    job: RunSpec, settings: RunSettings, prepared: Prepared, facts: Mapping[str, Any], losses: Sequence[str]
) -> Iterator[list[LightningLogger]]:
    """Yield the logger of metrics.csv, with a column for each of `losses`, and the loggers that the settings name.

    On exit, each logger is closed with the status of the run. Raises ConfigError if a logger cannot be opened. Later
    failures end the run only if metrics.csv cannot be written.
    """
    path = job.folder / METRICS
    last = step_of(job.checkpoint) if job.checkpoint else 0
    rows = rows_until(path, last)
    groups = dict.fromkeys([*prepared.val.groups, *prepared.last_scored[1].groups])
    loggers: list[LightningLogger] = []
    end = 0, ""
    try:
        for logger in _configured(job, settings, facts):
            loggers.append(logger)
            for row in rows:
                logger.log_metrics({name: value for name, value in row.items() if name != "step"}, int(row["step"]))
        kinds = {"answered": settings.data.kind == "probe", "labelled": settings.objective.name == "label"}
        yield [CsvLogger(path, columns(losses, list(groups), prepared.train.mixed, **kinds)), *loggers]
    except BaseException as error:
        end = _end(error)
        raise
    finally:
        for logger in loggers:
            logger.close(*end)


def rows_until(path: Path, last: int) -> list[Row]:
    return [row for row in read_rows(path) if row["step"] <= last]


def _end(error: BaseException) -> tuple[int, str]:
    """Return the exit status and a short reason."""
    if isinstance(error, StoppedError):
        return 128 + error.number if error.again else PreemptedError.exit_status, reason_of(error)
    return error.exit_status if isinstance(error, TfmError) else 1, reason_of(error)


def reason_of(error: BaseException) -> str:
    """Return the error in one line: the name of a signal, the rule of a TfmError, or the type and last line."""
    if isinstance(error, StoppedError):
        return signal.Signals(error.number).name
    if isinstance(error, TfmError):
        return error.problems[0].rule
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _configured(job: RunSpec, settings: RunSettings, facts: Mapping[str, Any]) -> Iterator[LightningLogger]:
    run = LoggedRun(job.folder, logged_config(job.config, str(facts["model"])), facts, job.wandb_id)
    for name, kind in reversed(LOGGERS.items()):  # W&B first, since its page shows why another logger failed
        logger_settings = getattr(settings.logger, name)
        if not (logger_settings and kind.open):
            continue
        try:
            logger = FaultTolerantLogger(kind.open(logger_settings, run))
        except Exception as error:
            help = "fix this, or choose other loggers: logger=csv writes metrics.csv only, also when a run resumes"
            raise ConfigError(Problem(f"logger.{name}", f"cannot be opened: {in_a_line(error)}", help=help)) from None
        yield logger


def logged_config(config: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the config for loggers, with the model under `graph` and its name under `model`.

    A sweep sets the name of the model by the key `model`, so the logged key has the same value.
    """
    return {"graph" if key == "model" else key: value for key, value in config.items()} | {"model": model}
