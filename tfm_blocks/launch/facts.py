"""Record a run: the facts that its config lacks, such as its size and hardware, and its loggers.

When a run resumes, its loggers get all rows up to the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import platform
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tfm_blocks.compose.resumable import EQUAL_WEIGHTS
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.devices import CPU, choose_device, device_name
from tfm_blocks.distributed.cluster import RankInfo
from tfm_blocks.distributed.signals import StoppedError
from tfm_blocks.errors import ConfigError, Problem, TfmError
from tfm_blocks.launch.check import available_cores
from tfm_blocks.launch.run_spec import RunSpec
from tfm_blocks.metric_schema import columns
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import is_of_generator
from tfm_blocks.runs.folder import METRICS, step_of
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.runs.saved_run import NO_EXPERIMENT
from tfm_blocks.tracking.lightning_loggers import CsvLogger, FaultTolerantLogger, LightningLogger, in_a_line
from tfm_blocks.tracking.loggers import LOGGERS, LoggedRun
from tfm_blocks.training.checkpoints import PreemptedError
from tfm_blocks.training.groups import assign, group_rows
from tfm_blocks.training.settings import RunSettings, measured_kinds
from tfm_blocks.version import __version__

LIBRARIES = ("torch", "lightning", "torchmetrics", "hydra-core", "numpy", "tokenizers", "sacrebleu", "wandb")


def record_facts(job: RunSpec, settings: RunSettings, network: Network, rank_info: RankInfo) -> dict[str, Any]:
    """Write the facts of this start of the run to run.json, and return them for the loggers."""
    start = job.start
    commands, kind = start.commands or ("",), choose_device(settings.trainer.accelerator)
    counts = parameters_by_node(network)
    versions = {"tfm-blocks": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    facts = {  # FACTS in tfm_blocks/tracking/dashboard.py describes each
        "model": start.choices.get("model", ""),
        "parameters": sum(counts.values()),
        "parameters_asked": job.asked_parameters,
        "parameters_by_node": counts,
        "optimizer_groups": group_rows(assign(settings.optimizer, network)),
        "config_hash": config_hash(job.config),
        "git_commit": git_commit(),
        "seed": job.config["seed"],
        "resumed": len(commands) - 1,
        "command": commands[-1],
        "hardware": {
            "device": kind,
            "name": platform.machine() if kind == CPU else device_name(kind),
            "devices": rank_info.world,
            "nodes": rank_info.nodes,
            "cores": available_cores(),
        },
        "precision": asdict(job.precision),
        "versions": versions,
    }
    start.with_facts(facts).write(job.folder)
    return facts


def parameters_by_node(network: Network) -> dict[str, int]:
    """Return the number of parameters of each node, by address.

    A shared or tied parameter counts at the node that stores it. The operations at the end of a stack count as `last`.
    A generator does not count.
    """
    owners = {node.owner for node in network.spec.nodes}
    counts: dict[str, int] = {}
    for name, parameter in network.named_parameters():
        if is_of_generator(network, name):
            continue
        parts = name.split(".")
        prefixes = [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
        address = next((prefix for prefix in prefixes if prefix in owners or prefix.endswith(".last")), prefixes[0])
        counts[address] = counts.get(address, 0) + parameter.numel()
    return counts


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a hash without the seed, names, loggers, and the keys of a resume that do not change the final weights."""
    kept = {key: value for key, value in config.items() if key not in {*NO_EXPERIMENT, "seed"}}
    for key in EQUAL_WEIGHTS:
        group, _, name = key.partition(".")
        if group in kept:
            kept[group] = {one: value for one, value in kept[group].items() if one != name}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:12]


def git_commit() -> str | None:
    """Return the commit of the current folder, with -dirty if files differ from it; None without git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


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
    rows = [row for row in read_rows(path) if row["step"] <= last]
    groups = dict.fromkeys([*prepared.val.groups, *prepared.last_scored[1].groups])
    run = LoggedRun(job.folder, logged_config(job.config, str(facts["model"])), facts, job.start.wandb_id)
    loggers: list[LightningLogger] = []
    end = 0, ""
    try:
        for name, kind in reversed(LOGGERS.items()):  # W&B first, since its page shows why another logger failed
            logger_settings = getattr(settings.logger, name)
            if not (logger_settings and kind.open):
                continue
            try:
                logger: LightningLogger = FaultTolerantLogger(kind.open(logger_settings, run))
            except Exception as error:
                rule = f"cannot be opened: {in_a_line(error)}"
                help = "fix this, or choose other loggers: logger=csv writes metrics.csv only, also when a run resumes"
                raise ConfigError(Problem(f"logger.{name}", rule, help=help)) from None
            loggers.append(logger)
            for row in rows:
                logger.log_metrics({name: value for name, value in row.items() if name != "step"}, int(row["step"]))
        kinds = measured_kinds(settings.data, settings.objective)
        yield [CsvLogger(path, columns(losses, list(groups), prepared.train.mixed, kinds)), *loggers]
    except BaseException as error:
        status = error.exit_status if isinstance(error, TfmError) else 1
        if isinstance(error, StoppedError):
            status = 128 + error.number if error.is_second else PreemptedError.exit_status
        end = status, reason_of(error)
        raise
    finally:
        for logger in loggers:
            logger.close(*end)


def reason_of(error: BaseException) -> str:
    """Return the error in one line: the name of a signal, the rule of a TfmError, or the type and last line.

    rich raises BrokenPipeError without a message.
    """
    if isinstance(error, StoppedError):
        return signal.Signals(error.number).name
    if isinstance(error, TfmError):
        return error.problems[0].rule
    if isinstance(error, BrokenPipeError):
        return "standard output was closed"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def logged_config(config: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the config for loggers, with the model under `graph` and its name under `model`.

    A sweep sets the name of the model by the key `model`, so the logged key has the same value.
    """
    return {"graph" if key == "model" else key: value for key, value in config.items()} | {"model": model}
