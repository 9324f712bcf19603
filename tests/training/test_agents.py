from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from tfm_blocks.compose.command_line import prepare_arguments
from tfm_blocks.compose.sweep import compose_job
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.check import checked
from tfm_blocks.training.agents import sweep_file

ASKED = ["model=tiny", "heads=2,4", "schedule.scale=0.05,1e-1", "model.add_norm=pre,post", "data.test=null", "name=x"]


def test_the_command_of_an_agent_is_one_that_train_py_takes_as_it_stands() -> None:
    """Each of its jobs composes, and is what was asked for, with null and numbers as such."""
    told = yaml.safe_load(sweep_file(ASKED, [], "grid", "val/loss", "project"))
    assert told["command"] == ["${env}", "${interpreter}", "${program}", "${args_no_hyphens}"]
    assert (told["program"], told["metric"]) == ("train.py", {"name": "val/loss", "goal": "minimize"})
    assert told["parameters"]["heads"] == {"values": [2, 4]} and told["parameters"]["data.test"] == {"value": "null"}
    varied = {key: one.get("values", [one.get("value")]) for key, one in told["parameters"].items()}
    found = []
    for values in product(*varied.values()):
        arguments = {key: {"value": value} for key, value in zip(varied, values, strict=True)}
        overrides = create_sweep_command_args({"args": arguments})["args_no_hyphens"]
        composed = compose_job(prepare_arguments(overrides), None)
        checked(composed)
        config = composed.mapping
        assert config["data"]["test"] is None and config["name"] == "x"
        found.append((config["heads"], config["schedule"]["scale"], config["model"]["add_norm"]))
    assert found == list(product([2, 4], [0.05, 0.1], ["pre", "post"]))


def test_models_of_ones_own_are_found_by_the_agent(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# @package _global_\ndefaults: [tiny, _self_]\nheads: 2\n")
    told = yaml.safe_load(
        sweep_file(["model=mine", "heads=2,4"], ["--config-dir", str(tmp_path)], "bayes", "val/bleu", "p")
    )
    assert told["command"][3:] == ["--config-dir", str(tmp_path), "${args_no_hyphens}"]
    assert (told["method"], told["metric"]["goal"]) == ("bayes", "maximize")


@pytest.mark.parametrize(
    ("overrides", "metric", "told"),
    [
        (["model=tiny", "heads=2"], "val/loss", "has one value of each key"),
        (["model=tiny", "haeds=2,4"], "val/loss", "no such key"),
        (["model=tinny", "heads=2,4"], "val/loss", "there is no model called"),
        (["model=tiny", "heads=2,4"], "val/lr", "is no score of a run"),
    ],
)
def test_what_train_py_would_refuse_is_refused(overrides: list[str], metric: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        sweep_file(overrides, [], "grid", metric, "project")
