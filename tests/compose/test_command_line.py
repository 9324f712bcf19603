"""The command line of train.py, before Hydra reads it."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tfm_blocks.compose.command_line import compose_arguments, parse_request
from tfm_blocks.compose.folders import CONF
from tfm_blocks.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=bsae"], "did you mean base?"),
        (["optimizer=adamm"], "did you mean adam"),
        (["haeds=4"], "did you mean heads?"),
        (["trainer.stesp=4"], "did you mean trainer.steps?"),
        (["optimizer.lr=1e-3"], "schedule.scale"),
        (["learning_rate=1e-3"], "schedule.peak"),
        (["data.batch_size=32"], "data.step_tokens is the number of target tokens"),
        (["trainer.max_epochs=3"], "trainer.steps"),
        (["num_heads=4"], "write heads=8"),
        (["heads=2,4"], "add -m"),
        (["-m", "model=base,tny"], "did you mean tiny?"),
        (["heads="], None),
        (["--heads"], "write a key without dashes"),
        (["heads"], "write key=value"),
        (["-m", "hydra/sweeper=basic"], "tfm-blocks runs sweeps itself"),
        (["hydra.mode=MULTIRUN"], "tfm-blocks runs sweeps itself"),
        (["hydra.run.dir=/tmp/x"], "write name=NAME"),
        (["hydra.job.chdir=true"], "makes the folder of a run itself, runs/NAME: hydra.job.chdir=true"),
        (["model=null"], "a run needs this group"),
        (["~model"], "a run needs this group"),
        (["-m", "logger=csv,null"], "a run needs this group"),
        (["logger=[csv,wanbd]"], "did you mean wandb?"),
        (["model=[base,tiny]"], "takes a single option"),
        (["debug=fats"], "did you mean fast?"),
        (["model=a/mine.yaml"], "--config-dir FOLDER model=mine"),
        (["hydra.foo=3"], "Could not override 'hydra.foo'"),
        (["--config-name", "other"], "one main config"),
        (["--config-dir", "", "model=tiny"], "--config-dir: names no folder"),
        (["--config-dir=", "model=tiny"], "--config-dir: names no folder"),
        (["model=tiny", "-cd"], "--config-dir: names no folder"),
        (["--config-dir", "/nowhere"], "there is no folder /nowhere"),
        (["-m", "heads=2,4", "--cfg", "job"], "--cfg and --multirun exclude each other"),
        (["-c", "job", "--info"], "--cfg and --info exclude each other"),
        (["model.graph=[1]"], "override model.graph=[1]: a list and a mapping cannot be merged".replace("[", r"\[")),
        (["--resolve"], "add --cfg job"),
        (["--yes"], "leave it out, or add -m"),
        (["-sc", "install=bash"], "tfm completes more than Hydra"),
        (["--hydra-help", "data.first=nan"], "--hydra-help: takes no settings: data.first=nan"),
        (["heads=2", "heads=4"], "heads: is set twice: heads=2 and heads=4"),
        (["model.add_norm=pre", "++model.add_norm=post"], "is set twice"),
        (["model=base", "heads=2", "model=tiny"], "model: is set twice"),
        (["heads=" + "9" * 5000], "has an integer of more than 100 digits"),
        (["heads=[" + "9" * 5000 + "]"], "has an integer of more than 100 digits"),
        (["-m", "heads=2," + "9" * 5000], "has an integer of more than 100 digits"),
        (["~" + "x" * 3000], "has more than 200 characters"),
        (
            ["model.args={d_ff: 2*(i+1)}"],
            "model.args: has a part that is outside of Hydra's grammar(.|\n)*double quotes",
        ),
        (["model.graph.encoder.at.-1.ffn=null"], r"is not an override(.|\n)*write at=\{-1: \{ffn: null\}\}, or name a"),
        (["model.graph.encoder.at={'::2': {ffn: null}}"], r"has a key in quotes(.|\n)*for layers, write at=\{-1: "),
        (
            ["data.labels=[neg,", "pos]"],
            r"^error: data.labels: is cut off: data.labels=\[neg,\n  help: quote the whole",
        ),
        (["data.fields=src:en", "data.fields=tgt:de"], "leave one of them out; quote a value"),
        (["tiny", "heads=2"], "tiny: is not an override\n  help: write model=tiny"),
        (["--plugins", "my_blocks", "heads=2"], r"help: write plugins=\[MODULE\]"),
        (["x=" + "[" * 3000], "no such key"),
    ],
)
def test_a_wrong_command_line_is_an_error_without_a_traceback_of_hydra(arguments, message):
    if message is None:
        compose_arguments(arguments)
        return
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as caught:
        compose_arguments(arguments)
    assert len(str(caught.value)) < 2000


def test_a_pattern_that_means_no_option_is_refused():
    with pytest.raises(ConfigError, match=r"model: no option matches model=glob\(zz\*\)"):
        parse_request(["-m", "model=glob(zz*)"])


def test_experiment_null_and_globs_of_models_are_accepted():
    assert parse_request(["experiment=null", "heads=2"]).texts == ["heads=2"]
    assert parse_request(["-m", "model=glob(*norm)"]).texts == ["model=glob(*norm)"]


def test_overrides_of_model_need_no_plus():
    assert parse_request(["model.add_norm=pre", "heads=2"]).texts == ["++model.add_norm=pre", "heads=2"]


def test_a_file_for_a_further_source_needs_no_plus():
    arguments = ["data=text", "data.dir=texts", "data.train.doc=train.doc", "data.test=null", "data.step_tokens=500"]
    assert parse_request(arguments).texts == [
        *arguments[:2],
        "++data.train.doc=train.doc",
        "++data.test=null",
        arguments[4],
    ]


def test_jobs_of_a_sweep_get_the_folder_and_hydras_settings(tmp_path):
    (tmp_path / "model").mkdir()
    arguments = [
        "-m",
        "-cd",
        str(tmp_path),
        "heads=2,4",
        "hydra.verbose=true",
    ]
    assert parse_request(arguments).job_options == ["--config-dir", str(tmp_path), "hydra.verbose=true"]
    assert parse_request(["-m", f"--config-dir={tmp_path}", "heads=2,4"]).job_options == ["--config-dir", str(tmp_path)]


COUNT = """
import json, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.command_line import compose_arguments
from tfm_blocks.compose.run import compose_run
compose_run(compose_arguments(parse_request(sys.argv[1:])))
print(json.dumps([path for path in opened if path.endswith(".yaml")]))
"""


def test_each_config_file_of_a_run_is_opened_once(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("# @package _global_\ndefaults: [prenorm, _self_]\nheads: 2\n")
    words = ["--config-dir", str(tmp_path), "model=mine", "experiment=probe/lite", "data=parity", "layers=2"]
    done = subprocess.run([sys.executable, "-c", COUNT, *words], cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr
    counts = Counter(
        Path(path).relative_to(tmp_path if "mine" in path else CONF)
        for path in json.loads(done.stdout)
        if "hydra/" not in path
    )
    assert set(counts.values()) == {1}
    chosen = ["model/mine", "model/prenorm", "model/base", "experiment/probe/lite", "data/parity", "data/_probe"]
    assert {Path(f"{name}.yaml") for name in (*chosen, "train", "trainer/default")} <= set(counts)
