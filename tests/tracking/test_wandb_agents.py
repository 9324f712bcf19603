from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import yaml
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args
from wandb.sdk.sweeps.scheduler.optuna import sweep_parameter_to_distribution

from tests.conftest import COMPOSER
from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.run import compose_job
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.check import check_run
from tfm_blocks.tracking.dashboard import sweep_file

ASKED = ["model=tiny", "heads=2,4", "schedule.scale=0.05,1e-1", "model.add_norm=pre,post", "data.test=null", "name=x"]


@pytest.mark.grid
def test_train_py_accepts_the_command_of_an_agent() -> None:
    """Each job composes to the requested values, with null and numbers as such."""
    spec = yaml.safe_load(sweep_file(parse_request(["-m", *ASKED]), "grid", "val/loss", "project"))
    assert spec["command"] == ["${env}", "${interpreter}", "${program}", "${args_no_hyphens}"]
    assert (spec["program"], spec["metric"]) == ("train.py", {"name": "val/loss", "goal": "minimize"})
    assert spec["parameters"]["heads"] == {"values": [2, 4]} and spec["parameters"]["data.test"] == {"value": "null"}
    varied = {key: one.get("values", [one.get("value")]) for key, one in spec["parameters"].items()}
    configs = []
    for values in product(*varied.values()):
        arguments = {key: {"value": value} for key, value in zip(varied, values, strict=True)}
        overrides = create_sweep_command_args({"args": arguments})["args_no_hyphens"]
        composed = compose_job(parse_request(overrides).texts, COMPOSER)
        check_run(composed)
        config = composed.mapping
        assert config["data"]["test"] is None and config["name"] == "x"
        configs.append((config["heads"], config["schedule"]["scale"], config["model"]["add_norm"]))
    assert configs == list(product([2, 4], [0.05, 0.1], ["pre", "post"]))


def test_the_agent_finds_own_models(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# @package _global_\ndefaults: [tiny, _self_]\nheads: 2\n")
    spec = yaml.safe_load(
        sweep_file(
            parse_request(["-m", "-cd", str(tmp_path), "model=glob(mine*)", "heads=2,4"]), "bayes", "val/bleu", "p"
        )
    )
    assert spec["parameters"]["model"] == {"value": "mine"}
    assert spec["command"][3:] == ["--config-dir", str(tmp_path), "${args_no_hyphens}"]
    assert (spec["method"], spec["metric"]["goal"]) == ("bayes", "maximize")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("interval(0,0.3)", FloatDistribution(0, 0.3)),
        ("interval(1,8)", FloatDistribution(1, 8)),
        ("tag(log,interval(0.001,10))", FloatDistribution(0.001, 10, log=True)),
        ("int(interval(8,64))", IntDistribution(8, 64)),
        ("int(tag(log,interval(8,64)))", IntDistribution(8, 64, log=True)),
    ],
)
def test_an_interval_has_the_same_distribution_in_wandb(value: str, expected: BaseDistribution) -> None:
    """Read the file with W&B's own scheduler."""
    spec = yaml.safe_load(sweep_file(parse_request(["-m", "model=tiny", f"d_ff={value}"]), "random", "val/loss", "p"))
    assert sweep_parameter_to_distribution(spec["parameters"]["d_ff"]) == expected


@pytest.mark.parametrize(
    ("overrides", "metric", "message"),
    [
        (["model=tiny", "heads=2"], "val/loss", "has only one value for each key"),
        (["model=tiny", "haeds=2,4"], "val/loss", "no such key"),
        (["model=tinny", "heads=2,4"], "val/loss", "no model is called"),
        (["model=tiny", "heads=2,4"], "val/lr", "is not a metric of a run"),
        (
            ["model=tiny", "dropout=interval(0,0.3)"],
            "val/loss",
            "dropout: is an interval from 0 to 0.3, but a grid needs separate values",
        ),
    ],
)
def test_a_sweep_that_train_py_would_refuse_is_refused(overrides: list[str], metric: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep_file(parse_request(["-m", *overrides]), "grid", metric, "project")
