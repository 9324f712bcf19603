"""`python train.py`, as typed by users."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tfm_blocks as tfm
from tests.preloaded import run_python

ROOT = Path(__file__).parent.parent
SMALL = [
    "d_model=16", "d_ff=16", "layers=1", "vocab=300", "data.train=200", "data.val=10", "data.test=10",
    "trainer.steps=2", "trainer.validate_sentences=2", "trainer.precision=fp32", "logger=csv",
]  # fmt: skip


HEADER = "# @package _global_\n"


def states(folder):
    """Return the states of the runs below the folder."""
    return sorted(json.loads(path.read_text())["state"] for path in folder.glob("runs/**/status.json"))


@pytest.fixture
def own(tmp_path):
    """Write a folder with a plug-in, and a model and an experiment that use it."""
    shutil.copy(ROOT / "tests" / "faulty.py", tmp_path / "my_blocks.py")
    for name, text in {
        "model/mine": "defaults: [tiny, _self_]\nsound: 1000\nmodel: {graph: {src_pos: {block: faulty, harm: end, sound: '${sound}'}}}\n",
        "experiment/mine": "defaults: [{override /model: mine}]\nplugins: [my_blocks]\n",
    }.items():
        path = tmp_path / "my_conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(HEADER + text)
    return tmp_path


def train(folder, *arguments):
    environment = {**os.environ, "TFM_BLOCKS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    return run_python([ROOT / "train.py", *arguments, *SMALL], folder, environment, timeout=300, share_server=True)


@pytest.mark.grid
def test_each_job_of_a_sweep_has_a_process_and_a_folder_and_a_failure_does_not_stop_the_others(tmp_path):
    done = train(tmp_path, "-m", "schedule.scale=1e38,1", "heads=2", "sweep.parallel=2")
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert states(tmp_path) == ["diverged", "done"]
    assert "chrF" not in done.stdout, "the tables of tfm compare are for two that are done"
    assert "sweep: 1 of 2 runs done" in done.stdout and "diverged: scale-1e38: the run diverged" in done.stdout
    assert "Traceback" not in (tmp_path / "runs" / "scale" / "scale-1e38.log").read_text()


@pytest.mark.grid
def test_a_second_run_of_the_same_name_gets_a_new_folder(tmp_path):
    assert [train(tmp_path, "name=x").returncode for _ in range(2)] == [0, 0]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"x", "x-2"}
    one, two = ((tmp_path / "runs" / name / "weights.safetensors").read_bytes() for name in ("x", "x-2"))
    assert one == two


@pytest.mark.grid
def test_runs_and_errors_repeat_the_typed_command_line(tmp_path):
    for name, lines in (("a", "one\ntwo\n"), ("b", "two\none\n")):
        (tmp_path / name).write_text(lines * 20)
    typed = ["data=text", "data.dir=.", *(f"data.{one}={{src: a, tgt: b}}" for one in ("train", "val"))]
    typed += ["data.test=null", "+model.graph.encoder.layer.ffn.activation=gelu", "name=x"]
    small = [text for text in SMALL if not text.startswith("data.")]
    done = run_python([ROOT / "train.py", *typed, *small], tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "runs" / "x" / "run.json").read_text())
    assert record["commands"] == [shlex.join(["python", "train.py", *typed, *small])]
    done = run_python([ROOT / "train.py", "resume=runs/x", "data.train={src: b}"], tmp_path)
    assert "error: data.train: a resumed run keeps its original value: data.train={src: b}" in done.stderr


@pytest.mark.slow
def test_jobs_of_a_sweep_get_its_options_and_one_that_is_killed_is_told(own):
    done = train(own, "--config-dir", "my_conf", "-m", "experiment=mine", "sound=0,1000")
    assert done.returncode == 1, done.stderr
    assert states(own) == ["done", "running"], "the second run found the experiment, the model and the plug-in"
    assert "killed: sound-0: SIGKILL" in done.stdout and "sweep: 1 of 2 runs done" in done.stdout


@pytest.mark.grid
def test_every_process_of_a_run_finds_plug_ins_in_the_current_folder(own):
    done = train(own, "--config-dir", "my_conf", "model=mine", "plugins=[my_blocks]", "trainer.devices=2")
    assert done.returncode == 0, done.stderr
    assert states(own) == ["done"]


@pytest.mark.parametrize(
    "arguments",
    ["--help", *(pytest.param(text, marks=pytest.mark.grid) for text in ("--cfg all", "--hydra-help", "logger=csv"))],
)
def test_a_closed_output_pipe_gives_no_traceback(tmp_path, arguments):
    command = f"{sys.executable} {ROOT / 'train.py'} {arguments} | head -n 1"
    environment = {**os.environ, "TFM_BLOCKS_CACHE": str(tmp_path / "cache")}
    small = " ".join([*SMALL, "schedule.warmup=1"]) if arguments == "logger=csv" else ""
    done = subprocess.run(
        command.replace("logger=csv", small), shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert len(done.stdout.splitlines()) == 1 and "Traceback" not in done.stderr
    assert all(line.startswith(("the run was stopped", "resume: ")) for line in done.stderr.splitlines())


@pytest.mark.parametrize(
    "start",
    [
        pytest.param([str(ROOT / "train.py")], id="train.py", marks=pytest.mark.grid),
        pytest.param(["-m", "tfm_blocks", "train"], id="tfm"),
    ],
)
def test_both_commands_refuse_a_sweep_to_print_with_a_sentence(start, tmp_path):
    command = [sys.executable, *start, "-m", "heads=2,4", "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(
        "error: command line: --cfg and --multirun exclude each other"
    )


@pytest.mark.parametrize("command", [["-m", "tfm_blocks"], [str(ROOT / "train.py")], ["-m", "tfm_blocks", "train"]])
def test_the_version_is_printed(command, tmp_path):
    done = subprocess.run([sys.executable, *command, "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"tfm-blocks {tfm.__version__}\n"
