"""A sweep whose jobs end in every way, and a sweep that is itself killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.preloaded import run_python
from tests.run_folders import leave_run
from tests.sweep.jobs import LIMIT, job_of, sweep_of
from tfm_blocks.cli import main
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.launch.check import available_cores
from tfm_blocks.sweep.command import _print_results
from tfm_blocks.sweep.folder import claim_sweep

ROOT = Path(__file__).parents[2]
PATIENCE = 900  # seconds: a machine may be busy
HEADER = "# @package _global_\n"
SMALL = [
    "layers=1", "d_model=16", "d_ff=16", "heads=2", "vocab=300", "dropout=0.3", "data.train=300", "data.val=20", "data.test=10",
    "data.step_tokens=240", "trainer.validate_every=4", "trainer.validate_sentences=2", "trainer.log_every=1",
    "trainer.checkpoint_every=1", "trainer.accelerator=cpu", "trainer.precision=fp32", "plugins=[faulty]",
]  # fmt: skip
HARM = "model: {graph: {bad: {block: faulty, harm: HARM, sound: SOUND, after: src_pos}}}\n"
SIX = {
    "fine": HARM.replace("HARM", "end").replace("SOUND", "1000"),
    "wrong": "model: {graph: {src_pos: {block: learned_position, max_length: 3}}}\n",
    "diverges": "schedule: {scale: 1e38}\n",
    "killed": HARM.replace("HARM", "end").replace("SOUND", "5"),
    "slow": "trainer: {steps: 1000000}\n",
    "two": "trainer: {devices: 2}\n",
}


def with_experiments(tmp_path: Path) -> Path:
    """Write a folder with six experiments, one for each way to end."""
    (tmp_path / "my_conf" / "experiment").mkdir(parents=True)
    for name, text in SIX.items():
        steps = "" if "steps" in text else "trainer: {steps: 8}\n"
        text = text.replace("trainer: {devices: 2}\n", "trainer: {devices: 2, steps: 8}\n")
        steps = "" if "trainer" in text else steps
        (tmp_path / "my_conf" / "experiment" / f"{name}.yaml").write_text(HEADER + steps + text)
    shutil.copy(ROOT / "tests" / "faulty.py", tmp_path)
    return tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_experiments(tmp_path)


def environment(folder: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"TFM_BLOCKS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return {**os.environ, **own}


def start(folder: Path, *arguments: str, base: Sequence[str] = SMALL) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "train.py"), "-m", "--config-dir", "my_conf", *arguments, *base]
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment(folder), **options)


def run(folder: Path, *arguments: str, base: Sequence[str] = SMALL) -> tuple[int, str]:
    """Run a sweep; return its exit status and output."""
    command = [ROOT / "train.py", "-m", "--config-dir", "my_conf", *arguments, *base]
    done = run_python(command, folder, environment(folder), PATIENCE, share_server=True)
    return done.returncode, done.stderr + done.stdout


def jobs(sweep: Path) -> dict[str, dict[str, Any]]:
    return {job["name"]: job for job in json.loads((sweep / "sweep.json").read_text())["jobs"]}


def states(sweep: Path) -> dict[str, str]:
    return {name: job["state"] for name, job in jobs(sweep).items()}


def alive(folder: Path) -> list[str]:
    """Return the processes whose working directory is the folder, whatever their parents."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if path.resolve() == folder.resolve():
                pids.append(path.parent.name)
    return pids


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


@pytest.mark.slow
def test_six_jobs_end_in_six_ways_and_the_second_call_runs_the_four_that_are_not_done(folder: Path) -> None:
    """The slow job needs time to start. The second call resumes it, and also the killed job, which now finishes, because
    its fault counts the steps of a process.
    """
    swept = "experiment=" + ",".join(SIX)
    how = [f"sweep.timeout={40 * max(1.0, os.getloadavg()[0] / available_cores()):.0f}s", "sweep.parallel=2"]
    status, output = run(folder, swept, *how)
    sweep = folder / "runs" / "experiment"
    ends = {
        "experiment-fine": "done", "experiment-wrong": "wrong config", "experiment-diverges": "diverged",
        "experiment-killed": "killed", "experiment-slow": "timed out", "experiment-two": "done",
    }  # fmt: skip
    assert (status, states(sweep)) == (1, ends), output
    assert "SIGKILL" in jobs(sweep)["experiment-killed"]["reason"]
    assert "has 3 positions" in jobs(sweep)["experiment-wrong"]["reason"]
    assert "sweep: 2 of 6 runs done" in output
    assert "chrF" in output and "not done: experiment-diverges: diverged" in output, "tfm compare"
    for name, end in ends.items():
        assert end == "done" or f"  {end}: {name}: " in output
        assert end == "done" or f"{sweep.relative_to(folder)}/{name}.log" in output
    cluster = (sweep / "experiment-two.log").read_text()
    assert "cluster: local, rank 0 of 2" in cluster
    before = {name: (sweep / f"{name}.log").stat().st_size for name in ends}
    status, output = run(folder, swept, *how)
    assert (status, states(sweep)) == (1, ends | {"experiment-killed": "done"}), output
    assert "6 jobs, 2 done before, 2 at a time" in output
    ran = {name for name, size in before.items() if (sweep / f"{name}.log").stat().st_size > size}
    assert ran == {name for name, end in ends.items() if end != "done"}
    assert "resume: runs/experiment/experiment-slow after " in (sweep / "experiment-slow.log").read_text()
    assert not alive(folder)


@pytest.mark.parametrize("other", ["done", "killed"])
def test_a_sweep_with_two_finished_jobs_ends_with_the_tables_of_compare(
    other: str, small: Callable[..., Composed], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composed = small()
    folder = claim_sweep(tmp_path, "seed", ["seed=1,2"], "")
    jobs = [job_of(composed, f"seed-{seed}", [f"seed={seed}"]) for seed in (1, 2)]
    for job, job.state in zip(jobs, ("done", other), strict=True):
        leave_run(folder.run(job), ["ein Haus"], ["ein Haus"])
    assert _print_results(sweep_of(folder, jobs, []), "python train.py -m seed=1,2", 0) == int(other != "done")
    output = capsys.readouterr().out
    assert ("chrF" in output) == (other == "done")
    assert ("next: python train.py -m seed=1,2" in output) == (other != "done")


@pytest.mark.grid
def test_a_killed_job_resumes_automatically_up_to_the_number_of_retries(folder: Path) -> None:
    status, output = run(folder, "experiment=killed", "seed=1", "sweep.retries=1", "sweep.name=x")
    assert status == 0, output
    assert "run: running, retried after killed: SIGKILL" in output
    assert "resume: runs/x/run after 5 steps" in (folder / "runs" / "x" / "run.log").read_text()


def weights(sweep: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(sweep / name / "weights.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_killed_sweep_leaves_no_process_and_the_same_command_finishes_it_bit_equal(
    folder: Path, devices: int
) -> None:
    arguments = ["experiment=fine", "seed=1,2", "trainer.steps=12", f"trainer.devices={devices}"]
    assert run(folder, *arguments, "sweep.name=whole")[0] == 0
    for seed in (1, 2):
        with start(folder, *arguments, "sweep.name=killed") as process:
            wait_for(folder / "runs" / "killed" / f"seed-{seed}" / "checkpoints" / "latest.json", process)
            process.send_signal(signal.SIGKILL)
            killed_at = time.monotonic()
            process.wait()
        while alive(folder):
            assert time.monotonic() < killed_at + LIMIT, "something still runs"
            time.sleep(0.1)
    status, output = run(folder, *arguments, "sweep.name=killed")
    assert status == 0, output
    whole, killed = folder / "runs" / "whole", folder / "runs" / "killed"
    assert sorted(path.name for path in killed.iterdir()) == sorted(path.name for path in whole.iterdir())
    for name in ("seed-1", "seed-2"):
        one, other = weights(whole, name), weights(killed, name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.grid), pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_ctrl_c_stops_all_jobs_within_seconds_and_the_same_command_resumes_them(folder: Path, number: int) -> None:
    arguments = ["experiment=slow", "seed=1,2", "sweep.parallel=2", "sweep.name=stopped"]
    sweep = folder / "runs" / "stopped"
    with start(folder, *arguments) as process:
        for seed in (1, 2):
            wait_for(sweep / f"seed-{seed}" / "checkpoints" / "latest.json", process)
        process.send_signal(number)
        output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 75, output
    assert set(states(sweep).values()) == {"stopped"} and not alive(folder)
    assert [json.loads(path.read_text())["state"] for path in sweep.glob("*/status.json")] == ["preempted"] * 2
    assert "next: python train.py -m --config-dir my_conf experiment=slow seed=1,2 sweep.parallel=2" in output
    with start(folder, *arguments) as process:
        while "resume: runs/stopped/seed-2 after " not in (sweep / "seed-2.log").read_text():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        process.send_signal(number)  # a second signal does not wait for a checkpoint
        process.communicate(timeout=PATIENCE)
    assert not alive(folder)


@pytest.mark.slow
def test_a_changed_config_is_refused_with_its_changes_and_another_name_starts_new_runs(folder: Path) -> None:
    arguments = ["experiment=fine", "seed=1", "sweep.name=x"]
    assert run(folder, *arguments)[0] == 0
    path = folder / "my_conf" / "experiment" / "fine.yaml"
    path.write_text(path.read_text() + "label_smoothing: 0.2\n")
    status, output = run(folder, *arguments)
    assert status == 2
    assert "label_smoothing was 0.1 and is 0.2" in output and "write sweep.name=" in output
    assert [path.name for path in (folder / "runs").iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "name=x", "heads=2,4"], "name: belongs to a single run"),
        (["-m", "resume=runs/x"], "resume: belongs to a single run"),
        (["sweep.parallel=2"], "sweep.parallel: configures a sweep, but this is a single run"),
        (["-m", "heads=2,4", "sweep.parallel=1,2"], "sweep.parallel: sweep.parallel=1,2 has several values"),
        (["-m", "heads=2,4", "sweep.timeout=90"], "sweep.timeout: must be a duration, but is 90"),
        (["-m", "heads=2,4", "sweep.name=a/b"], "sweep.name: must be a folder's name"),
        (["-m", "heads=4,7"], "1 of 2 jobs cannot start"),
        (["-m", "heads=interval(1,4)"], "heads: is an interval from 1 to 4"),
        (["-m", "sweep=optuna", "dropout=tag(log,interval(0,1))"], "dropout: has a log scale"),
        (["-m", "sweep=optuna", "heads=2,4", "sweep.metric=val/mcc"], "sweep.metric: is val/mcc, which a run of this data"),
        (["launcher=slurm"], "launcher: configures a sweep, but this is a single run"),
        (["experiment=ladder", "data.dir=x"], "ladder: sets the sizes of a sweep, but this is a single run"),
    ],
)  # fmt: skip
def test_a_wrong_sweep_is_an_error_before_anything_starts(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["train", *arguments])
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("method", "expected"), [("random", 1), ("optuna", 0)])
def test_a_failed_job_fails_a_random_sweep_but_not_a_search(folder: Path, method: str, expected: int) -> None:
    """With this seed, four trials of optuna include both experiments."""
    trials = 4 if method == "optuna" else 2
    arguments = ["experiment=fine,wrong", f"sweep={method}", f"sweep.trials={trials}", "sweep.name=x"]
    status, output = run(folder, *arguments)
    ends = list(states(folder / "runs" / "x").values())
    assert set(ends) == {"done", "wrong config"}, output
    assert status == expected, output
    failed = ends.count("wrong config")
    assert f"sweep: {len(ends) - failed} of {len(ends)} runs done, {failed} wrong config\n" in output
    if method == "optuna":
        assert output.rstrip().splitlines()[-1].endswith(f"; {failed} of 4 trials failed")


@pytest.mark.slow
def test_a_killed_search_resumes_and_failed_trials_stay_failed(folder: Path) -> None:
    """One model cannot be built and one diverges. Finished jobs have the weights of an uninterrupted search."""
    space = [
        "heads=2,3",
        "schedule.scale=0.5,1e38",
        "sweep=optuna",
        "sweep.trials=6",
        "sweep.startup=2",
        "trainer.steps=8",
    ]
    small = [text for text in SMALL if text != "heads=2"]
    assert search(folder, "whole", space, small) == 0
    process = start_search(folder, "killed", space, small)
    with process:
        while not list((folder / "runs" / "killed").glob("*/checkpoints/latest.json")):
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    assert search(folder, "killed", space, small) == 0
    whole, killed = (jobs(folder / "runs" / name) for name in ("whole", "killed"))
    assert whole == killed and len(whole) == 6
    assert {job["state"] for job in whole.values()} >= {"done", "wrong config"}
    for name, job in whole.items():
        assert "heads=3" not in job["overrides"] or job["state"] == "wrong config"
        if job["state"] == "done":
            one, other = (weights(folder / "runs" / sweep, name) for sweep in ("whole", "killed"))
            assert all(torch.equal(one[key], other[key]) for key in one)


def start_search(folder: Path, name: str, space: list[str], small: list[str]) -> subprocess.Popen[str]:
    own = {"TFM_BLOCKS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "train.py"), "-m", f"sweep.name={name}", *space, *small]
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **own}, stdout=subprocess.DEVNULL, text=True)


def search(folder: Path, name: str, space: list[str], small: list[str]) -> int:
    with start_search(folder, name, space, small) as process:
        return process.wait(timeout=PATIENCE)
