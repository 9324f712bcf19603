"""Write the configuration of a W&B sweep, whose agents start train.py with one value for each key."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.sweep import Interval, OpenKey, combinations, parse_parts, vary_one_key
from tfm_blocks.errors import ConfigError, Problem, suggest
from tfm_blocks.metric_schema import METRIC_KEYS

GOALS = {"min": "minimize", "max": "maximize"}
DISTRIBUTIONS = {  # W&B's names, by (logarithmic, integer)
    (False, False): "uniform",
    (False, True): "int_uniform",
    (True, False): "log_uniform_values",
    (True, True): "q_log_uniform_values",
}


def sweep_file(overrides: Sequence[str], config_dir: Path | None, method: str, metric: str, project: str) -> str:
    """Return the YAML for `wandb sweep`, in which the keys with several values vary.

    Raises ConfigError for overrides that train.py or the method does not accept.
    """
    options = ["--config-dir", str(config_dir.resolve())] if config_dir else []
    parse_request([*options, "-m", *overrides])
    goals = {key.name: GOALS[key.summary] for key in METRIC_KEYS if key.summary in GOALS and "{" not in key.name}
    if metric not in goals:
        raise ConfigError(Problem("--metric", f"is not a metric of a run: {metric}", help=suggest(metric, goals)))
    parameters = dict(_parameter(part, method) for part in parse_parts(overrides, config_dir))
    if all("value" in parameter for parameter in parameters.values()):
        raise ConfigError(Problem("sweep", "has only one value for each key", help="write several: heads=2,4"))
    sweep = {
        "program": "train.py",
        "project": project,
        "method": method,
        "metric": {"name": metric, "goal": goals[metric]},
        "parameters": parameters,
        "command": ["${env}", "${interpreter}", "${program}", *options, "${args_no_hyphens}"],
    }
    return str(yaml.safe_dump(sweep, sort_keys=False, allow_unicode=True))


def jobs_to_check(overrides: Sequence[str], config_dir: Path | None, method: str) -> list[list[str]]:
    """Return the overrides of all jobs of a grid, or for another method, of jobs that have each value once."""
    parts = parse_parts(overrides, config_dir)
    return combinations(parts) if method == "grid" else vary_one_key(parts)


def _parameter(part: OpenKey, method: str) -> tuple[str, dict[str, Any]]:
    """Return a key as it was typed, and its values in W&B's format."""
    if isinstance(part, Interval):
        if method == "grid":
            rule = f"is an interval from {part.low:g} to {part.high:g}, but a grid needs separate values"
            raise ConfigError(Problem(part.key, rule, help=f"write {part.key}=a,b,c, or --method random or bayes"))
        return part.key, {"distribution": DISTRIBUTIONS[part.log, part.whole], "min": part.low, "max": part.high}
    key = part.texts[0].partition("=")[0]
    values = [_number(text.partition("=")[2]) for text in part.texts]
    return key, {"values": values} if len(values) > 1 else {"value": values[0]}


def _number(text: str) -> int | float | str:
    """Return a number if the text is one, so that W&B can plot it. Other values stay text: null would become None."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
