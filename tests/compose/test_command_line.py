"""The command line of train.py, before Hydra reads it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tfm_blocks.compose.command_line import prepare
from tfm_blocks.errors import ConfigError

ROOT = Path(__file__).parents[2]


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


def test_no_experiment_and_all_models_can_be_asked_for():
    assert prepare(["experiment=null", "heads=2"]) == ["heads=2"]
    assert prepare(["-m", "model=glob(*)"]) == ["-m", "model=glob(*)"]


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
