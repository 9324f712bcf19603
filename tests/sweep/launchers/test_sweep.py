"""A sweep whose jobs wait in a queue, and a sweep that takes over jobs of an exited one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.sweep import test_engine as local
from tests.sweep.jobs import LIMIT, job_of, sweep_of
from tfm_blocks.runs.records import WAITING
from tfm_blocks.sweep.engine import Sweep
from tfm_blocks.sweep.folder import claim_sweep
from tfm_blocks.sweep.job import DONE, ERROR, KILLED, PRUNED, RUNNING
from tfm_blocks.sweep.launcher import Launcher, Result, Worker
from tfm_blocks.training.settings import TrainerSettings

pytest.importorskip("submitit")
from tests.sweep.launchers.test_slurm import launcher_with

TRAINS = """
for word; do case $word in *.json) run=runs/x/$(basename $word .json) ;; resume=*) run=${word#resume=} ;; esac; done
state() { echo "{\\"state\\": \\"$1\\"}" > $run/status.json; }
mkdir -p $run && echo {} > $run/run.json && state running
trap 'state preempted; exit 75' TERM
echo "$@"
until [ -e go ] || [ -e $run.go ]; do sleep 0.05; done
state done
"""
LAUNCHERS = {
    "slurm": ["launcher=slurm"],
    "ray": ["launcher=ray", "launcher.address=local"],
}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Callable[..., Any]) -> Callable[..., Sweep]:
    """Return a function that makes a sweep of the named jobs; the training is a script that ends when the file `go` exists."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trains.sh").write_text(TRAINS)
    composed = small()

    def sweep(*names: str, launcher: Any = None, **how: Any) -> Sweep:
        folder = claim_sweep(Path("runs"), "x", names, "python train.py …")
        jobs = [job_of(composed, name, []) for name in names]
        for job in jobs:
            job.state = DONE if folder.state_before(job) == DONE else WAITING
        how = {"parallel": 2} | how
        return sweep_of(folder, jobs, ["bash", "trains.sh"], launcher or launcher_with(), **how)

    return sweep


def states(sweep: Sweep) -> list[str]:
    return [job.state for job in sweep.source.jobs]


def trains(folder: Path, name: str) -> bool:
    log = folder / "runs" / "x" / f"{name}.log"
    return log.exists() and "--job" in log.read_text()


def until(sweep: Sweep, done: Callable[[], bool]) -> None:
    """Poll the sweep until `done` returns True."""
    start_time = time.monotonic()
    while not done():
        assert time.monotonic() < start_time + 2 * LIMIT, [(job.state, job.reason) for job in sweep.source.jobs]
        sweep._poll()
        time.sleep(0.05)


def test_queued_jobs_run_and_the_next_job_follows_a_finished_one(
    make: Callable[..., Sweep], cluster: Path, tmp_path: Path
) -> None:
    (cluster / "full").touch()
    sweep = make("a", "b", "c")
    sweep._poll()
    assert states(sweep) == [WAITING] * 3
    assert [job.reason for job in sweep.source.jobs] == ["in the queue of Slurm", "in the queue of Slurm", ""]
    (cluster / "full").unlink()
    until(sweep, lambda: states(sweep) == [RUNNING, RUNNING, WAITING])
    assert sweep.source.jobs[0].reason.endswith(", job 101")
    (tmp_path / "go").touch()
    assert sweep.run() == 0
    assert states(sweep) == [DONE] * 3
    record = json.loads((tmp_path / "runs" / "x" / "sweep.json").read_text())
    assert [job["state"] for job in record["jobs"]] == [DONE] * 3


@pytest.mark.grid
def test_time_in_the_queue_does_not_count(make: Callable[..., Sweep], cluster: Path, tmp_path: Path) -> None:
    (cluster / "full").touch()
    sweep = make("a", timeout="2s")
    start_time = time.monotonic()
    until(sweep, lambda: time.monotonic() > start_time + 3)
    assert states(sweep) == [WAITING] and sweep.running[0].stopped is None
    (cluster / "full").unlink()
    until(sweep, lambda: not sweep.running)
    assert (states(sweep), sweep.source.jobs[0].reason) == (["timed out"], "after 2 s")


def test_the_same_sweep_takes_over_jobs_in_the_queue(make: Callable[..., Sweep], cluster: Path, tmp_path: Path) -> None:
    """One of three jobs runs, one waits, and one ends between the two commands. No job starts twice."""
    gone = make("a", "b", "c")
    until(gone, lambda: trains(tmp_path, "a") and trains(tmp_path, "b"))
    (cluster / "full").touch()
    gone.settings = gone.settings.model_copy(update={"parallel": 3})
    gone._poll()
    (tmp_path / "runs" / "x" / "b.go").touch()
    while "RUNNING" in (cluster / "jobs" / "102" / "state").read_text():
        time.sleep(0.05)
    again = make("a", "b", "c", parallel=3)
    again._poll()
    assert states(again) == [RUNNING, DONE, WAITING]
    (tmp_path / "go").touch()
    (cluster / "full").unlink()
    assert again.run() == 0
    assert states(again) == [DONE] * 3
    assert (cluster / "calls").read_text().count("sbatch /") == 3


def test_queued_jobs_count_as_parallel_jobs_and_leave_the_queue_when_the_command_stops(
    make: Callable[..., Sweep], cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of four jobs has ended, and the last is a trial that the second command does not request."""
    (cluster / "full").touch()
    make("a", "b", "c", "d", parallel=4)._poll()
    subprocess.run(["scancel", "101"], check=True)
    sweep = make("a", "b", "c", "d", parallel=1)
    assert sweep.source.jobs.pop() is sweep.source.waiting.pop()
    sweep._poll()
    assert [job.reason for job in sweep.source.jobs] == ["", "in the queue of Slurm", "in the queue of Slurm"]
    assert (cluster / "calls").read_text().count("sbatch /") == 4
    monkeypatch.setattr("tfm_blocks.sweep.engine.pending_signal", lambda: signal.SIGINT)
    until(sweep, lambda: not sweep.running)
    assert states(sweep) == [WAITING, "stopped", "stopped"]
    for number in (102, 103, 104):
        assert (cluster / "jobs" / str(number) / "state").read_text().startswith("CANCELLED")


@pytest.mark.grid
def test_a_killed_job_resumes_from_its_checkpoint(make: Callable[..., Sweep], cluster: Path, tmp_path: Path) -> None:
    sweep = make("a", retries=1)
    until(sweep, lambda: trains(tmp_path, "a"))
    (cluster / "jobs" / "101" / "state").write_text("NODE_FAIL\n")
    subprocess.run(["kill", "-9", (cluster / "jobs" / "101" / "tasks").read_text().strip()], check=True)
    until(sweep, lambda: "retried after killed: Slurm says of job 101: NODE_FAIL" in sweep.source.jobs[0].reason)
    (tmp_path / "go").touch()
    assert sweep.run() == 0 and states(sweep) == [DONE]
    assert (tmp_path / "runs" / "x" / "a.log").read_text() == "--job runs/x/.jobs/a.json\nresume=runs/x/a\n"


def test_jobs_that_a_full_cluster_rejects_are_submitted_later(
    make: Callable[..., Sweep], cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfm_blocks.sweep.engine.SUBMIT_INTERVAL", 0.5)
    sweep = make("a", "b", parallel=1)
    sweep._poll()
    (cluster / "refuse").write_text("sbatch: error: QOSMaxSubmitJobPerUserLimit\n")
    sweep.settings = sweep.settings.model_copy(update={"parallel": 2})
    sweep._poll()
    assert states(sweep)[1] == WAITING and "QOSMaxSubmitJobPerUserLimit" in sweep.source.jobs[1].reason
    (tmp_path / "go").touch()
    until(sweep, lambda: states(sweep)[0] == DONE)
    assert sweep.run() == 0
    assert states(sweep) == [DONE, ERROR]


def test_a_stop_removes_queued_jobs_and_checkpoints_running_jobs(
    make: Callable[..., Sweep], cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = make("a", "b", parallel=1)
    until(sweep, lambda: trains(tmp_path, "a"))
    (cluster / "full").touch()
    sweep.settings = sweep.settings.model_copy(update={"parallel": 2})
    sweep._poll()
    monkeypatch.setattr("tfm_blocks.sweep.engine.pending_signal", lambda: signal.SIGINT)
    until(sweep, lambda: not sweep.running)
    assert [(job.state, job.reason) for job in sweep.source.jobs] == [("stopped", "by SIGINT")] * 2
    assert "preempted" in (tmp_path / "runs" / "x" / "a" / "status.json").read_text()
    assert (cluster / "jobs" / "102" / "state").read_text().startswith("CANCELLED")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with experiments that end in every state."""
    return local.with_experiments(tmp_path)


def expect_ray(name: str) -> None:
    if name == "ray":
        pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_jobs_on_a_cluster_end_as_they_do_on_this_machine(name: str, folder: Path, cluster: Path) -> None:
    expect_ray(name)
    swept = "experiment=fine,wrong,killed,two"
    status, output = local.run(folder, swept, *LAUNCHERS[name], "sweep.parallel=2", "sweep.name=x")
    sweep = folder / "runs" / "x"
    ends = {
        "experiment-fine": "done", "experiment-wrong": "wrong config", "experiment-killed": KILLED, "experiment-two": "done",
    }  # fmt: skip
    assert (status, local.states(sweep)) == (1, ends), output
    assert "SIGKILL" in local.jobs(sweep)["experiment-killed"]["reason"]
    assert "cluster: local, rank 0 of 2" in (sweep / "experiment-two.log").read_text()
    status, output = local.run(folder, swept, *LAUNCHERS[name], "sweep.name=x")
    assert local.states(sweep) == ends | {"experiment-killed": "done"}, output
    assert "4 jobs, 2 done before" in output and not local.alive(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_ctrl_c_leaves_checkpoints_on_a_cluster_and_the_same_command_finishes(
    name: str, folder: Path, cluster: Path
) -> None:
    expect_ray(name)
    arguments = [
        "experiment=fine",
        "seed=1,2",
        "trainer.steps=200",
        *LAUNCHERS[name],
        "sweep.parallel=2",
        "sweep.name=x",
    ]
    sweep = folder / "runs" / "x"
    with local.start(folder, *arguments) as process:
        for seed in (1, 2):
            local.wait_for(sweep / f"seed-{seed}" / "checkpoints" / "latest.json", process)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=local.PATIENCE)[0]
    assert process.returncode == 75, output
    assert set(local.states(sweep).values()) == {"stopped"}
    assert [json.loads(path.read_text())["state"] for path in sweep.glob("*/status.json")] == ["preempted"] * 2
    status, output = local.run(folder, *arguments)
    assert status == 0, output
    for seed in (1, 2):
        assert f"resume: runs/x/seed-{seed} after " in (sweep / f"seed-{seed}.log").read_text()


@pytest.mark.slow
def test_slurm_jobs_survive_the_killed_command_and_the_same_command_finds_them(folder: Path, cluster: Path) -> None:
    arguments = ["experiment=fine", "seed=1", "trainer.steps=200", "launcher=slurm", "sweep.name=x"]
    sweep = folder / "runs" / "x"
    with local.start(folder, *arguments) as process:
        local.wait_for(sweep / "run" / "checkpoints" / "latest.json", process)
        process.kill()
    status, output = local.run(folder, *arguments)
    assert status == 0, output
    assert (cluster / "calls").read_text().count("sbatch /") == 1
    assert "resume:" not in (sweep / "run.log").read_text()


@pytest.mark.slow
def test_ray_jobs_end_with_the_killed_command(folder: Path) -> None:
    expect_ray("ray")
    with local.start(folder, "experiment=slow", "seed=1", *LAUNCHERS["ray"], "sweep.name=x") as process:
        local.wait_for(folder / "runs" / "x" / "run" / "checkpoints" / "latest.json", process)
        process.kill()
    killed_at = time.monotonic()
    while any(b"train.py" in command_of(process) for process in local.alive(folder)):
        assert time.monotonic() < killed_at + LIMIT, "something still runs"
        time.sleep(0.1)


def command_of(process: str) -> bytes:
    """Return the command line of a process, empty if it exited. Two processes of Ray live on for a minute."""
    try:
        return Path("/proc", process, "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_a_job_on_two_nodes_is_one_run_and_resumes_after_its_time_limit(folder: Path, cluster: Path) -> None:
    arguments = [
        "experiment=fine",
        "seed=1",
        "trainer.steps=200",
        "trainer.num_nodes=2",
        "launcher=slurm",
        "sweep.name=x",
    ]
    log = folder / "runs" / "x" / "run.log"
    with local.start(folder, *arguments, "sweep.retries=1") as process:
        local.wait_for(folder / "runs" / "x" / "run" / "checkpoints" / "latest.json", process)
        for task in (cluster / "jobs" / "101" / "tasks").read_text().split():
            os.kill(int(task), signal.SIGUSR2)
        output = process.communicate(timeout=local.PATIENCE)[0]
    assert process.returncode == 0, output
    assert "retried after timed out: its time in the queue is over" in output
    assert "cluster: slurm, rank 0 of 2 on 2 nodes" in log.read_text() and "resume: runs/x/run after" in log.read_text()


class SlowLauncher(Launcher):
    """A launcher whose jobs run until they are stopped. A poll of each takes longer than half of METRICS_INTERVAL."""

    def start(self, name: str, command: Sequence[str], log: Path, trainer: TrainerSettings) -> Worker:
        return SlowWorker()


class SlowWorker:
    begin, patience = 0, 60.0

    def place(self) -> str | None:
        return ""

    def ended(self) -> int | Result | None:
        time.sleep(0.06)
        return None

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self) -> None: ...


def test_every_job_is_pruned_if_a_poll_takes_longer_than_the_interval(
    make: Callable[..., Sweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfm_blocks.sweep.engine.METRICS_INTERVAL", 0.1)
    sweep = make("a", "b", "c", "d", parallel=4, launcher=SlowLauncher())
    for _ in range(2):
        sweep._poll()
    monkeypatch.setattr(sweep.source, "should_prune", lambda job: True)
    for _ in range(2):
        sweep._poll()
    assert [attempt.stopped and attempt.stopped[0] for attempt in sweep.running] == [PRUNED] * 4
