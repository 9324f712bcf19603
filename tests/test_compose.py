"""conf/ and overrides become plain mappings."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tfm_blocks.compose.command_line import prepare
from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.model import compose_model
from tfm_blocks.compose.run import run_name
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
        (["--heads"], None),
        (["heads"], "write key=value"),
        (["-m", "heads=interval(1,2)"], "is no override"),
        (["model=null"], "a run cannot do without"),
        (["~model"], "a run cannot do without"),
        (["-m", "logger=csv,null"], "a run cannot do without"),
        (["model=a/mine.yaml"], "--config-dir FOLDER model=mine"),
        (["hydra.foo=3"], "Could not override 'hydra.foo'"),
        (["--config-name", "other"], "one main config"),
        (["--config-dir", "/nowhere"], "there is no folder /nowhere"),
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
        (["model=base", "optimizer=adamw"], "base-dates-adamw"),
    ],
)
def test_a_run_is_named_after_what_the_command_line_changes(overrides, name):
    assert run_name({"model": "base", "data": "dates", "optimizer": "adamw"}, overrides) == name


def test_long_names_are_cut_and_stay_different():
    one, two = (run_name({"model": "base", "data": "dates"}, ["model.args.x=" + "a" * 200 + end]) for end in "bc")
    assert len(one) == len(two) == 100 and one != two


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        ("model.args.d_ff=2*(d_model+1)", "++model.args.d_ff='2*(d_model+1)'"),
        ("data.dir=/my texts (new)", "data.dir='/my texts (new)'"),
        ("data.dir=/Übung", "data.dir='/Übung'"),
    ],
)
def test_a_value_beyond_hydras_grammar_is_text(text, readable):
    assert prepare(["data=text", text]) == ["data=text", readable]


def test_no_experiment_and_all_models_can_be_asked_for():
    assert prepare(["experiment=null", "heads=2"]) == ["heads=2"]
    assert prepare(["-m", "model=glob(*)"]) == ["-m", "model=glob(*)"]


def test_a_file_that_one_of_ours_would_hide_is_refused_by_train_and_by_tfm(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "base.yaml").write_text("# @package _global_\ndefaults: [tiny, _self_]\n")
    with pytest.raises(ConfigError, match=r"conf/model/base\.yaml would be read instead"):
        prepare(["--config-dir", str(tmp_path), "model=base"])
    with pytest.raises(ConfigError, match=r"conf/model/base\.yaml would be read instead"):
        compose_model("base", conf=tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("heads: 4\n", "begin the file with # @package _global_"),
        ("# @package _global_\nhydra: {run: {dir: x}}\n", "write hydra.… on the command line"),
        ("# @package _global_\nheads: [4\n", "is not YAML"),
        ("# @package _global_\ndefaults: 3\n", "must be a list"),
        ("# @package _global_\ndefaults: [{override /data: multi}]\n", "Could not find 'data/multi'"),
        ("# @package _global_\ndefaults: [{override /model: bsae}]\n", "did you mean base?"),
    ],
)
def test_an_experiment_that_would_not_do_what_it_says_is_refused(text, told, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        prepare(["--config-dir", str(tmp_path), "experiment=mine"])
    assert told in str(caught.value)


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
