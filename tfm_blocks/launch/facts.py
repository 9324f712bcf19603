"""Collect the facts of a run that its config lacks: size, code version, command and hardware."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tfm_blocks.compose.run import RESUMABLE_KEYS
from tfm_blocks.devices import CPU, choose_device, device_name
from tfm_blocks.distributed.cluster import RankInfo
from tfm_blocks.launch.check import available_cores
from tfm_blocks.launch.run_spec import RunSpec
from tfm_blocks.network.graph import Network
from tfm_blocks.runs.records import RunFile
from tfm_blocks.runs.saved_run import NO_EXPERIMENT
from tfm_blocks.training.settings import TrainerSettings
from tfm_blocks.version import __version__

LIBRARIES = ("torch", "lightning", "torchmetrics", "hydra-core", "numpy", "tokenizers", "sacrebleu", "wandb")


def record_facts(job: RunSpec, trainer: TrainerSettings, network: Network, rank_info: RankInfo) -> dict[str, Any]:
    """Write the facts of this start of the run to run.json, and return them for the loggers."""
    start = RunFile.read(job.folder)
    commands, kind = start.commands or ("",), choose_device(trainer.accelerator)
    versions = {"tfm-blocks": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    facts = {  # FACTS in tfm_blocks/metric_schema.py describes each
        "model": start.choices.get("model", ""),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "parameters_asked": job.asked_parameters,
        "parameters_by_node": parameters_by_node(network),
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
        "precision": job.precision,
        "versions": versions,
    }
    start.with_facts(facts).write(job.folder)
    return facts


def parameters_by_node(network: Network) -> dict[str, int]:
    """Return the number of parameters of each node, by address.

    A shared or tied parameter counts at the node that stores it. The operations at the end of a stack count as `last`.
    """
    owners = {node.owner for node in network.spec.nodes}
    counts: dict[str, int] = {}
    for name, parameter in network.named_parameters():
        parts = name.split(".")
        prefixes = [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
        address = next((prefix for prefix in prefixes if prefix in owners or prefix.endswith(".last")), prefixes[0])
        counts[address] = counts.get(address, 0) + parameter.numel()
    return counts


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a hash that ignores the seed, and the keys that a resume may change without changing the length."""
    kept = {key: value for key, value in config.items() if key not in {*NO_EXPERIMENT, "seed"}}
    for key in RESUMABLE_KEYS:
        group, _, name = key.partition(".")
        if group in kept and key != "trainer.steps" and group != "callbacks":  # these decide how long a run trains
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
