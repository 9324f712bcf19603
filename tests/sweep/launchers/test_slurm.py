"""Jobs in a queue: the options of sbatch, their results, and how a later command finds them.

Slurm's commands are stubs on the path, which run the script locally; submitit, the node's script and the supervisor are real.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.jobs import text_of, until
from tfm_blocks.errors import ConfigError
from tfm_blocks.sweep.job import KILLED, MEMORY, TIMED_OUT
from tfm_blocks.sweep.launcher import Launcher, RefusedError, Result, Worker, read_launcher
from tfm_blocks.sweep.launchers.local import LocalLauncher
from tfm_blocks.training.settings import TrainerSettings

pytest.importorskip("submitit")
from tfm_blocks.sweep.launchers import slurm

CONF = {
    "name": "slurm", "partition": None, "account": None, "qos": None, "cpus": None, "gpus": None,
    "memory": None, "grace": "2m", "setup": [], "sbatch": {},
}  # fmt: skip
WAITS = "trap 'exit 75' TERM; echo ready; while true; do sleep 0.05; done"
Trainer = Callable[..., TrainerSettings]


def launcher_with(timeout: float | None = None, **changes: Any) -> slurm.SlurmLauncher:
    settings = read_launcher(CONF | changes)
    assert isinstance(settings, slurm.SlurmSettings)
    return slurm.SlurmLauncher(settings, timeout)


@pytest.fixture
def trainer(small: Callable[..., Any]) -> Trainer:
    """Return a function that makes the settings of a run with changes."""
    return lambda **changes: TrainerSettings.model_validate(small().mapping["trainer"] | changes)


def start(launcher: Launcher, sweep: Path, trainer: TrainerSettings, script: str = "exit 0") -> Worker:
    sweep.mkdir(exist_ok=True)
    return launcher.start("heads-2", ["bash", "-c", script], sweep / "heads-2.log", trainer)


def end_of(worker: Worker) -> int | Result:
    result: int | Result = until(worker.ended)
    return result


def script_of(cluster: Path, number: int = 101) -> set[str]:
    """Return the options in the script that sbatch got."""
    lines = (cluster / "jobs" / str(number) / "script").read_text().splitlines()
    return {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}


def log_of(sweep: Path) -> str:
    return text_of(sweep / "heads-2.log")


def test_sbatch_receives_exactly_the_options_of_the_settings(tmp_path: Path, cluster: Path, trainer: Trainer) -> None:
    launcher = launcher_with(
        timeout=7200.0, partition="gpu", account="lab", qos="high", cpus=8, memory="32GB", setup=["module load cuda"],
        sbatch={"constraint": "a100", "exclusive": True, "mail-type": "END"},
    )  # fmt: skip
    assert end_of(start(launcher, tmp_path / "x", trainer(accelerator="cuda", devices=4))) == 0
    own = {option for option in script_of(cluster) if not option.startswith(("--output=", "--open-mode="))}
    assert own == {
        "--job-name=x/heads-2", "--partition=gpu", "--account=lab", "--qos=high", "--time=122", "--signal=USR2@120",
        "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=32", "--gpus-per-node=4", "--mem=32768M",
        "--constraint=a100", "--exclusive", "--mail-type=END", "--no-requeue",
    }  # fmt: skip
    assert "\nmodule load cuda\n" in (cluster / "jobs" / "101" / "script").read_text()
    (srun,) = (call for call in (cluster / "calls").read_text().splitlines() if call.startswith("srun "))
    assert " --cpus-per-task=32 " in srun, "srun does not inherit it"


def test_options_that_are_not_set_are_left_to_the_cluster(tmp_path: Path, cluster: Path, trainer: Trainer) -> None:
    assert end_of(start(launcher_with(), tmp_path / "x", trainer())) == 0
    names = {option.partition("=")[0] for option in script_of(cluster)}
    assert names == {
        "--job-name", "--nodes", "--ntasks-per-node", "--signal", "--output", "--open-mode", "--no-requeue",
    }  # fmt: skip


def test_on_several_nodes_srun_starts_a_task_for_each_device(tmp_path: Path, cluster: Path, trainer: Trainer) -> None:
    launcher = launcher_with(cpus=8)
    trained = trainer(accelerator="cuda", devices=2, num_nodes=2)
    assert end_of(start(launcher, tmp_path / "x", trained, "echo $SLURM_PROCID of $SLURM_STEP_NUM_TASKS")) == 0
    options = {"--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=8"}
    assert options <= script_of(cluster)
    assert log_of(tmp_path / "x") == "0 of 4\n"


def test_the_exit_status_of_a_job_is_read_as_text_and_no_result_is_pickled(
    tmp_path: Path, cluster: Path, trainer: Trainer
) -> None:
    worker = start(launcher_with(), tmp_path / "x", trainer(), "echo hello; exit 3")
    assert end_of(worker) == 3
    assert str(worker.place()).endswith(", job 101")
    assert log_of(tmp_path / "x") == "hello\n"
    pickles = [path.name for path in (tmp_path / "x").rglob("*.pkl")]
    assert pickles == ["101_submitted.pkl"]


def test_a_stopped_job_has_its_grace_and_a_waiting_job_leaves_the_queue(
    tmp_path: Path, cluster: Path, trainer: Trainer
) -> None:
    launcher, sweep = launcher_with(), tmp_path / "x"
    running = start(launcher, sweep, trainer(), WAITS)
    assert running.patience == 120
    until(lambda: "ready" in log_of(sweep))
    running.stop()
    assert isinstance(result := end_of(running), tuple) and "SIGTERM" in result[1]
    (cluster / "full").touch()
    waiting = start(launcher, sweep, trainer())
    waiting.stop()
    assert end_of(waiting) == (KILLED, "Slurm says of job 102: CANCELLED by 0")
    assert waiting.place() is None


@pytest.mark.parametrize(
    ("harm", "state", "reason"),
    [
        ("kill -USR2 {task}", TIMED_OUT, "its time in the queue is over; it has a checkpoint"),
        ("scancel 101", KILLED, "SIGTERM: preempted, or cancelled by somebody; it has a checkpoint"),
        ("echo NODE_FAIL > {job}/state; kill -9 {task}", KILLED, "Slurm says of job 101: NODE_FAIL"),
        ("echo OUT_OF_MEMORY > {job}/state; kill -9 {task}", MEMORY, "Slurm says of job 101: OUT_OF_MEMORY"),
    ],
)
def test_every_end_of_a_job_by_the_cluster_is_classified(
    harm: str, state: str, reason: str, tmp_path: Path, cluster: Path, trainer: Trainer
) -> None:
    worker, job = start(launcher_with(), tmp_path / "x", trainer(), WAITS), cluster / "jobs" / "101"
    until(lambda: "ready" in log_of(tmp_path / "x"))
    assert worker.ended() is None
    command = harm.format(job=job, task=(job / "tasks").read_text().strip())
    subprocess.run(["bash", "-c", command], check=True)
    assert end_of(worker) == (state, reason)


@pytest.mark.grid
def test_no_job_is_lost_while_slurm_does_not_answer(
    tmp_path: Path, cluster: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start(launcher_with(), tmp_path / "x", trainer(), WAITS)
    until(lambda: "ready" in log_of(tmp_path / "x"))
    broken = tmp_path / "bin" / "squeue"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}{os.pathsep}{os.environ['PATH']}")
    start_time = time.monotonic()
    while time.monotonic() < start_time + 3:
        assert worker.ended() is None
        time.sleep(0.05)
    worker.kill()
    assert isinstance(end_of(worker), tuple)


def test_a_refusal_by_sbatch_is_reported_with_its_message(tmp_path: Path, cluster: Path, trainer: Trainer) -> None:
    (cluster / "refuse").write_text("sbatch: error: invalid partition specified: gpuu\n")
    with pytest.raises(RefusedError, match="invalid partition specified: gpuu"):
        start(launcher_with(), tmp_path / "x", trainer())
    assert launcher_with().find(tmp_path / "x") == {}


@pytest.mark.grid
def test_running_and_waiting_jobs_of_an_exited_command_are_found(
    tmp_path: Path, cluster: Path, trainer: Trainer
) -> None:
    for name, script in (("runs", WAITS), ("over", "exit 0")):
        launcher = launcher_with()
        started = launcher.start(name, ["bash", "-c", script], tmp_path / f"{name}.log", trainer())
        until(started.place)
        if name == "over":
            end_of(started)
    (cluster / "full").touch()
    launcher.start("waits", ["bash", "-c", "exit 3"], tmp_path / "waits.log", trainer())
    workers = launcher_with().find(tmp_path)
    assert sorted(workers) == ["runs", "waits"]
    assert str(workers["runs"].place()).endswith("job 101") and workers["waits"].place() is None
    (cluster / "full").unlink()
    assert end_of(workers["waits"]) == 3
    until(lambda: "ready" in (tmp_path / "runs.log").read_text())
    workers["runs"].stop()
    end_of(workers["runs"])
    assert launcher_with().find(tmp_path) == {}


def test_a_job_without_a_recorded_id_does_nothing(tmp_path: Path, cluster: Path, trainer: Trainer) -> None:
    """The command was killed between sbatch and its next line."""
    (cluster / "full").touch()
    start(launcher_with(), tmp_path, trainer(), "echo never")
    for path in tmp_path.rglob("*.queued"):
        path.unlink()
    assert launcher_with().find(tmp_path) == {}
    (cluster / "full").unlink()
    until(lambda: "COMPLETED" in (cluster / "jobs" / "101" / "state").read_text())
    assert log_of(tmp_path) == ""


def test_another_launcher_does_not_start_jobs_that_may_be_queued(
    tmp_path: Path, cluster: Path, trainer: Trainer
) -> None:
    worker = start(launcher_with(), tmp_path, trainer(), WAITS)
    with pytest.raises(ConfigError, match=r"(?s)heads-2: was started by launcher=slurm as job 101.*go on with"):
        LocalLauncher(1).find(tmp_path)
    until(lambda: "ready" in log_of(tmp_path))
    worker.stop()
    end_of(worker)
    assert LocalLauncher(1).find(tmp_path) == {}


def test_without_slurms_commands_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no sbatch, srun, squeue, scancel"):
        launcher_with()


def test_a_missing_extra_is_an_error_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    monkeypatch.delitem(sys.modules, "tfm_blocks.sweep.launchers.slurm")
    with pytest.raises(ConfigError, match="submitit is not installed") as caught:
        import_module("tfm_blocks.sweep.launchers.slurm")
    assert "pip install -c constraints.txt -e '.[slurm]'" in str(caught.value)
