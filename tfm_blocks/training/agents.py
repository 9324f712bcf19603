"""The file of a W&B sweep, whose agents start train.py with a value of each key."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import yaml

from tfm_blocks.compose.command_line import prepare_arguments
from tfm_blocks.compose.sweep import values_by_key
from tfm_blocks.errors import ConfigError, Problem, suggest
from tfm_blocks.training.contract import CONTRACT

GOALS = {"min": "minimize", "max": "maximize"}


def sweep_file(overrides: Sequence[str], options: Sequence[str], method: str, metric: str, project: str) -> str:
    """YAML for `wandb sweep`; a key with several values varies. Raises ConfigError for what train.py would not take."""
    prepare_arguments([*options, "-m", *overrides])
    goals = {key.name: GOALS[key.summary] for key in CONTRACT if key.summary in GOALS and "{" not in key.name}
    if metric not in goals:
        raise ConfigError(Problem("--metric", f"is no score of a run: {metric}", help=suggest(metric, goals)))
    parameters: dict[str, Any] = {}
    for key, texts in values_by_key(overrides).items():
        values = [_number(text) for text in texts]
        parameters[key] = {"values": values} if len(values) > 1 else {"value": values[0]}
    if not any("values" in one for one in parameters.values()):
        raise ConfigError(Problem("sweep", "has one value of each key", help="give one several: heads=2,4"))
    told = {
        "program": "train.py",
        "project": project,
        "method": method,
        "metric": {"name": metric, "goal": goals[metric]},
        "parameters": parameters,
        "command": ["${env}", "${interpreter}", "${program}", *options, "${args_no_hyphens}"],
    }
    return str(yaml.safe_dump(told, sort_keys=False, allow_unicode=True))


def _number(text: str) -> int | float | str:
    """What W&B draws along an axis. Anything else stays as it was typed: null would come back from W&B as None."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
