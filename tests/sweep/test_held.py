"""A sweep waits for a job that another process trains, and prints which process."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.runs.test_lock import leave_heartbeat
from tests.sweep.jobs import Small, job_of, sweep_of
from tfm_blocks.distributed import signals
from tfm_blocks.errors import Problem, RunError
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.job import train
from tfm_blocks.runs.files import write_json
from tfm_blocks.runs.folder import RUN, STATUS
from tfm_blocks.runs.lock import LOCK, holder_of
from tfm_blocks.sweep.engine import Sweep
from tfm_blocks.sweep.folder import claim_sweep
from tfm_blocks.sweep.job import ERROR, NOT_STARTED

HOLDS = """
import sys, time
from pathlib import Path
from tfm_blocks.runs.records import Status
from tfm_blocks.runs.lock import hold
run = Path(sys.argv[1])
with hold(run):
    Status("running").write(run)
    print("holds", flush=True)
    while not run.with_name("end").exists():
        time.sleep(0.05)
    Status("done").write(run)
"""
ENDS = "import sys; sys.exit(5)"  # replaces the training: no job of these tests should start


@contextmanager
def training(run: Path) -> Iterator[int]:
    """Yield the pid of a process that holds the folder until the file `end` exists, and then finishes the run."""
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / RUN, {})
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(run)], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"holds\n"
        yield process.pid
        process.kill()


def sweep_of_one(small: Small, root: Path, timeout: str | None) -> Sweep:
    folder = claim_sweep(root, "x", ["seed=1"], "python train.py -m seed=1")
    return sweep_of(folder, [job_of(small(), "seed-1", ["seed=1"])], [sys.executable, "-c", ENDS], timeout=timeout)


def when_waiting(sweep: Sweep, act: Callable[[], object]) -> None:
    """Call `act` in a thread when the job of the sweep waits for another process."""

    def watch() -> None:
        while "trains it" not in sweep.source.jobs[0].reason:
            time.sleep(0.02)
        act()

    threading.Thread(target=watch, daemon=True).start()


@pytest.fixture(autouse=True)
def no_signal_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals._state, "number", 0)


def test_the_sweep_waits_for_a_job_of_another_process(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of_one(small, tmp_path, None)
    with training(tmp_path / "x" / "seed-1") as pid:
        when_waiting(sweep, (tmp_path / "x" / "end").touch)
        assert sweep.run() == 0
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"seed-1: waiting, another process ({pid} on {socket.gethostname()}) trains it", "seed-1: done"]
    assert sweep.source.succeeded and not (tmp_path / "x" / "seed-1.log").exists(), "nothing was started"


def test_the_wait_for_another_process_has_a_timeout(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of_one(small, tmp_path, "1s")
    with training(tmp_path / "x" / "seed-1") as pid:
        start_time = time.monotonic()
        assert sweep.run() == 0 and time.monotonic() - start_time > sweep.settings.timeout
    (job,) = json.loads((tmp_path / "x" / "sweep.json").read_text())["jobs"]
    why = f"another process ({pid} on {socket.gethostname()}) trains it"
    assert (job["state"], job["reason"]) == (NOT_STARTED, why)
    assert not sweep.source.succeeded, "which makes the exit status 1"
    assert f"seed-1: not started, {why}" in capsys.readouterr().out


@pytest.mark.grid
def test_the_sweep_waits_for_a_job_of_another_host_until_its_heartbeat_is_old(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, sweep = tmp_path / "x" / "seed-1", sweep_of_one(small, tmp_path, None)
    run.mkdir()
    write_json(run / STATUS, {"state": "running"})
    leave_heartbeat(run, age=0)
    when_waiting(sweep, lambda: os.utime(run / LOCK, (0, 0)))
    sweep.run()
    assert "seed-1: waiting, another process (4711 on node7) trains it" in capsys.readouterr().out


def test_a_job_whose_status_is_damaged_during_the_sweep_does_not_end_the_sweep(small: Small, tmp_path: Path) -> None:
    sweep, run = sweep_of_one(small, tmp_path, None), tmp_path / "x" / "seed-1"
    run.mkdir()
    write_json(run / RUN, {})
    (run / STATUS).write_text("{")
    assert sweep.run() == 0
    (job,) = sweep.source.jobs
    assert job.state == ERROR and job.reason.startswith(f"{run / STATUS}: is damaged: ")
    assert not (tmp_path / "x" / "seed-1.log").exists(), "nothing was started"


SECOND_CHANGES_THE_FIRST = """
name=$(basename ${2%.json}) && mkdir -p x/$name && cd x/$name && echo {} > run.json
printf 'step,val/loss\\n1,3\\n' > metrics.csv
[ $name = seed-1 ] || printf '2,1\\n' >> ../seed-1/metrics.csv
sleep 0.5
echo '{"state": "done"}' > status.json
"""


def test_the_metrics_of_finished_jobs_are_not_read_again(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tfm_blocks.sweep.engine.METRICS_INTERVAL", 0.1)
    folder, composed = claim_sweep(Path(), "x", ["seed=1,2"], ""), small()
    jobs = [job_of(composed, f"seed-{seed}", [f"seed={seed}"]) for seed in (1, 2)]
    assert sweep_of(folder, jobs, ["bash", "-c", SECOND_CHANGES_THE_FIRST, "train"]).run() == 0
    assert [(job.state, job.progress.step) for job in jobs] == [("done", 1)] * 2
    assert Path("x/seed-1/metrics.csv").read_text().endswith("2,1\n")


def test_a_running_run_names_its_process(small: Small, tmp_path: Path) -> None:
    seen = []

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append(str(holder_of(tmp_path / "run")))
            raise RunError(Problem("run", "ends here"))

    with pytest.raises(RunError, match="ends here"):
        train(check_run(small()), tmp_path, callbacks=[Look()])
    assert re.fullmatch(rf"{os.getpid()} on \S+", seen[0])
