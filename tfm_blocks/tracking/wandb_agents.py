"""The file of a W&B sweep, whose agents start train.py with a value of each key."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tfm_blocks.compose.command_line import prepare_arguments
from tfm_blocks.compose.sweep import Interval, OpenKey, combinations, parse_parts, vary_one_key
from tfm_blocks.errors import ConfigError, Problem, suggest
from tfm_blocks.metric_schema import METRIC_KEYS

GOALS = {"min": "minimize", "max": "maximize"}
DISTRIBUTIONS = {  # W&B's names, by whether orders of magnitude count alike, and whether numbers are whole
    (False, False): "uniform",
    (False, True): "int_uniform",
    (True, False): "log_uniform_values",
    (True, True): "q_log_uniform_values",
}


def sweep_file(overrides: Sequence[str], own: Path | None, method: str, metric: str, project: str) -> str:
    """YAML for `wandb sweep`; a key with several values varies. `own` is the folder of --config-dir.

    Raises ConfigError for what train.py, or the method, would not take.
    """
    options = ["--config-dir", str(own.resolve())] if own else []
    prepare_arguments([*options, "-m", *overrides])
    goals = {key.name: GOALS[key.summary] for key in METRIC_KEYS if key.summary in GOALS and "{" not in key.name}
    if metric not in goals:
        raise ConfigError(Problem("--metric", f"is no score of a run: {metric}", help=suggest(metric, goals)))
    parameters = dict(_parameter(part, method) for part in parse_parts(overrides, own))
    if all("value" in one for one in parameters.values()):
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


def jobs_to_check(overrides: Sequence[str], own: Path | None, method: str) -> list[list[str]]:
    """Return the overrides of all jobs of a grid; of another method, of jobs that hold each value once."""
    parts = parse_parts(overrides, own)
    return combinations(parts) if method == "grid" else vary_one_key(parts)


def _parameter(part: OpenKey, method: str) -> tuple[str, dict[str, Any]]:
    """A key, as it was typed, and its values as W&B is told them."""
    if isinstance(part, Interval):
        if method == "grid":
            rule = f"is an interval from {part.low:g} to {part.high:g}, which no grid can try whole"
            raise ConfigError(Problem(part.key, rule, help=f"write {part.key}=a,b,c, or --method random or bayes"))
        return part.key, {"distribution": DISTRIBUTIONS[part.log, part.whole], "min": part.low, "max": part.high}
    key = part.texts[0].partition("=")[0]
    values = [_number(text.partition("=")[2]) for text in part.texts]
    return key, {"values": values} if len(values) > 1 else {"value": values[0]}


def _number(text: str) -> int | float | str:
    """What W&B draws along an axis. Anything else stays as it was typed: null would come back from W&B as None."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
