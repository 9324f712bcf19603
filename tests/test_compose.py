"""conf/ and overrides become plain mappings."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tfm_blocks.compose import CONF, compose_model, prepare, run_name
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.files import models_in

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("model", models_in([CONF / "model"]))
def test_our_merge_of_a_model_equals_hydras(model):
    with initialize_config_dir(str(CONF), version_base=None):
        hydras = OmegaConf.to_container(compose("train", [f"model={model}"]), resolve=True)
    own = compose_model(model).mapping
    assert own == {key: hydras[key] for key in own}


def test_a_knob_reaches_the_model():
    assert compose_model("base", ["heads=2"]).model["args"]["heads"] == 2


@pytest.mark.parametrize(
    ("overrides", "address", "told"),
    [
        (["haeds=4"], "haeds", "did you mean heads?"),
        (["heads=${lyers}"], "heads", "did you mean layers?"),
        (["heads"], "heads", "write key=value"),
    ],
)
def test_a_wrong_override_of_a_model_is_told(overrides, address, told):
    with pytest.raises(ConfigError) as caught:
        compose_model("tiny", overrides)
    assert caught.value.problems[0].address == address
    assert told in str(caught.value)


def test_a_knob_that_nothing_reads_is_an_error(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\ndefaults: [tiny, _self_]\nheds: 2\n")
    with pytest.raises(ConfigError, match="nothing reads the knob 'heds'"):
        compose_model(str(file))


def test_an_interpolation_to_nothing_is_told_with_its_line(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\ndefaults: [tiny, _self_]\nmodel: {args: {d_ff: '${dff}'}}\n")
    with pytest.raises(ConfigError) as caught:
        compose_model(str(file))
    (problem,) = caught.value.problems
    assert (problem.address, problem.place.line) == ("model.args.d_ff", 3)
    assert "did you mean d_ff?" in problem.help


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["model=bsae"], "did you mean base?"),
        (["optimizer=adamm"], "did you mean adam"),
        (["haeds=4"], "did you mean heads?"),
        (["trainer.stesp=4"], "did you mean trainer.steps?"),
        (["heads=2,4"], "add -m"),
        (["-m", "model=base,tny"], "did you mean tiny?"),
        (["heads="], None),
        (["heads=[1"], "write key=value"),
    ],
)
def test_a_wrong_command_line_is_told_before_hydra_reads_it(arguments, told):
    if told is None:
        prepare(arguments)
        return
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        prepare(arguments)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["heads=8", "++model.add_norm=pre"], "base-dates-heads8-add_normpre"),
        (["name=x", "data.dir=/a/b", "trainer.steps=3"], "base-dates-steps3"),
        (["model.args.x='a b=c'"], "base-dates-x_a_b_c_"),
    ],
)
def test_a_run_is_named_after_what_the_command_line_changes(overrides, name):
    assert run_name({"model": "base", "data": "dates"}, overrides) == name


def test_overrides_of_model_need_no_plus():
    assert prepare(["model.add_norm=pre", "heads=2"]) == ["++model.add_norm=pre", "heads=2"]


def test_a_hostile_model_of_a_config_folder_is_refused_before_hydra_reads_it(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "evil.yaml").write_text(
        "# @package _global_\nhydra: {run: {dir: evil}, job: {name: evil}}\nmodel: {}\n"
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--config-dir", str(tmp_path), "model=evil"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "root key 'hydra'" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "evil").exists()
