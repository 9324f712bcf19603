"""Composing a model alone."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.network.examples import SHIPPED, each
from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.model import compose_model, compose_requested
from tfm_blocks.errors import ConfigError


@each(SHIPPED)
def test_our_merge_of_a_model_equals_hydras(path):
    with initialize_config_dir(str(CONF), version_base=None):
        hydras = OmegaConf.to_container(compose("train", [f"model={path.stem}"]), resolve=True)
    own = compose_model(path.stem).mapping
    assert own == {key: hydras[key] for key in own}


def test_a_knob_reaches_the_model():
    assert compose_model("base", ["heads=2"]).model["args"]["heads"] == 2


@pytest.mark.parametrize(
    ("overrides", "address", "message"),
    [
        (["haeds=4"], "haeds", "did you mean heads?"),
        (["heads=${lyers}"], "heads", "did you mean layers?"),
        (["heads"], "heads", "write key=value"),
        (["heads=2", "heads=4"], "heads", "is set twice: heads=2 and heads=4"),
        (["model.graph=[1]"], "model.graph", "a list and a mapping cannot be merged"),
        (["heads=" + "9" * 5000], "heads", "has an integer of more than 100 digits"),
    ],
)
def test_a_wrong_override_of_a_model_is_an_error(overrides, address, message):
    with pytest.raises(ConfigError) as caught:
        compose_model("tiny", overrides)
    assert caught.value.problems[0].address == address
    assert message in str(caught.value)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_file_in_the_folder_of_config_dir_takes_overrides_of_a_run(absolute, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine" / "model" / "wide.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\ndefaults: [tiny, _self_]\nheads: 2\n")
    conf = Path("mine").resolve() if absolute else Path("mine")
    for model in ("mine/model/wide.yaml", str(path)):
        composed = compose_requested(model, ["data=parity"], conf)
        assert composed.choices["model"] == "wide" and composed.mapping["heads"] == 2
    with pytest.raises(ConfigError, match="is a path"):
        compose_requested("mine/model/wide.yaml", ["data=parity"], tmp_path)
