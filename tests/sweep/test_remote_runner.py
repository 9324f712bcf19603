"""A job file runs once, its result is text, and the job ends with its runner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.jobs import LIMIT, text_of, until
from tfm_blocks.sweep.launcher import JobFile, write_job_file

COUNTS = "trap 'echo stop; sleep 0.5; exit 75' TERM; echo ready; while true; do sleep 0.05; done"
Do = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def do(tmp_path: Path) -> Iterator[Do]:
    """Return a function that starts a job file's command as a cluster would."""
    started = []

    def start(errand: JobFile, **environment: str) -> subprocess.Popen[str]:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(errand.command, env={**os.environ, **environment}, cwd="/", **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def errand_of(folder: Path, script: str) -> JobFile:
    return write_job_file("heads-2", ["bash", "-c", script], folder / "heads-2.log")


def said(folder: Path) -> str:
    return text_of(folder / "heads-2.log")


def test_the_result_of_a_job_file_is_text_and_its_output_ends_the_log(tmp_path: Path, do: Do) -> None:
    (tmp_path / "heads-2.log").write_text("before\n")
    errand = errand_of(tmp_path, "pwd; echo to you >&2; exit 3")
    assert (errand.status("begun"), errand.status("ended"), errand.begin) == ({}, {}, len("before\n"))
    assert do(errand, SLURM_JOB_ID="77").wait(LIMIT) == 3
    assert said(tmp_path) == f"before\n{Path.cwd()}\nto you\n"
    assert errand.status("begun")["host"] and errand.number == "77"
    assert errand.status("ended") == {"status": 3, "signal": ""}
    assert {path.suffix for path in errand.path.parent.iterdir()} == {".json", ".begun", ".ended"}


def test_a_replaced_job_file_is_not_run(tmp_path: Path, do: Do) -> None:
    before = errand_of(tmp_path, "echo once")
    errand_of(tmp_path, "echo again")
    process = do(before)
    assert "there is nothing to do" in process.communicate(timeout=LIMIT)[0] and process.returncode == 0
    assert said(tmp_path) == "" and not before.status("begun")


def test_several_signals_stop_the_job_once(tmp_path: Path, do: Do) -> None:
    errand = errand_of(tmp_path, COUNTS)
    process = do(errand)
    until(lambda: "ready" in said(tmp_path))
    process.send_signal(signal.SIGUSR2)
    until(lambda: "stop" in said(tmp_path))
    process.terminate()
    assert process.wait(LIMIT) == 75
    assert said(tmp_path) == "ready\nstop\n"
    assert errand.status("ended") == {"status": 75, "signal": "SIGUSR2"}


def test_a_job_ended_by_a_signal_names_the_signal(tmp_path: Path, do: Do) -> None:
    errand = errand_of(tmp_path, "kill -9 $$")
    assert do(errand).wait(LIMIT) == 137
    assert errand.status("ended")["status"] == 137


def test_the_job_ends_with_its_runner(tmp_path: Path, do: Do) -> None:
    errand = errand_of(tmp_path, "echo $$; while true; do sleep 0.05; done")
    process = do(errand)
    until(lambda: said(tmp_path))
    process.kill()
    until(lambda: not Path("/proc", said(tmp_path).strip()).exists())
    assert not errand.status("ended"), "nobody was left to tell"


def test_only_the_first_of_several_tasks_writes_the_result(tmp_path: Path, do: Do) -> None:
    errand = errand_of(tmp_path, "echo $SLURM_PROCID")
    second = do(errand, SLURM_PROCID="1")
    assert second.communicate(timeout=LIMIT)[0] == "1\n"
    assert (said(tmp_path), errand.status("begun"), errand.status("ended")) == ("", {}, {})


def test_a_job_has_the_environment_of_its_node_without_launcher_variables(
    tmp_path: Path, do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-sweep")
    errand = errand_of(tmp_path, "echo $OF_THE_NODE $WANDB_RUN_ID $PYTHONUNBUFFERED")
    assert do(errand, OF_THE_NODE="here").wait(LIMIT) == 0
    assert said(tmp_path) == "here 1\n"


def test_files_that_a_node_reads_and_writes_are_plain_text(tmp_path: Path, do: Do) -> None:
    errand = errand_of(tmp_path, "true")
    do(errand).wait(LIMIT)
    for path in errand.path.parent.iterdir():
        assert json.loads(path.read_text())
