"""Whichever process gets a signal, and whenever: the run exits with 75 within seconds, and resumes bit-equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.test_job import wandb_exit_code
from tests.launch.test_resume import ROOT, expect_same, rows
from tfm_blocks.launch.check import available_cores

LIMIT = 10.0  # seconds on an otherwise idle machine
RUN = [
    "layers=1", "d_model=16", "d_ff=16", "heads=2", "vocab=300", "dropout=0.3", "data.train=300", "data.val=20", "data.test=10",
    "data.step_tokens=240", "trainer.steps=12", "trainer.validate_every=4", "trainer.validate_sentences=4", "trainer.log_every=1",
    "trainer.checkpoint_every=4", "trainer.accelerator=cpu", "trainer.precision=fp32", "trainer.workers=1", "logger=csv",
    "plugins=[tests.signalling]", "++model.graph.sends={block: signalling, after: src_pos}",
]  # fmt: skip


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start a run in a separate process group."""
    own = {
        "TFM_BLOCKS_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
    }
    own["MARK"] = str(folder / "sent")
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    environment = {**os.environ, **own, **environment}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    return subprocess.run(command, start_new_session=True, timeout=600, check=False, **options)  # type: ignore[call-overload,no-any-return]


def seconds_since(folder: Path) -> float:
    """Return the seconds since the signal was sent, scaled to an otherwise idle machine."""
    return (time.time() - (folder / "sent").stat().st_mtime) / max(1, os.getloadavg()[0] / available_cores())


GRID = [
    (to, number, when)
    for to in ("one", "all")
    for number in ("TERM", "INT", "USR1")
    for when in ("step", "validation", "saving")
] + [("one", "TERM", "search")]
SHORT = [("one", "USR1", "validation")]


def stop(folder: Path, to: str, number: str, when: str) -> Path:
    """Stop a run of two processes during its second validation, which must record no score."""
    done = start(folder, *RUN, "name=run", "trainer.devices=2", SEND=number, TO=to, WHEN=when)
    assert (folder / "sent").exists(), done.stderr
    command = "python train.py resume=runs/run 'plugins=[tests.signalling]'"
    assert done.returncode == 75, done.stderr
    assert done.stderr.endswith(f"the run was stopped by SIG{number}\nresume: {command}\n")
    run = folder / "runs" / "run"
    assert json.loads((run / "status.json").read_text())["state"] == "preempted"
    if when in ("validation", "search"):
        assert [row["step"] for row in rows(run) if "val/loss" in row] == [4]
    return run


@pytest.mark.grid
@pytest.mark.parametrize(("to", "number", "when"), SHORT, ids=["-".join(case) for case in SHORT])
def test_two_processes_stop_after_the_same_step_for_a_signal_to_either(
    tmp_path: Path, to: str, number: str, when: str
) -> None:
    stop(tmp_path, to, number, when)


@pytest.mark.slow
@pytest.mark.parametrize(("to", "number", "when"), GRID, ids=["-".join(case) for case in GRID])
def test_a_run_stopped_by_a_signal_resumes_exactly(tmp_path: Path, to: str, number: str, when: str) -> None:
    assert start(tmp_path, *RUN, "name=whole", "trainer.devices=2").returncode == 0
    run = stop(tmp_path, to, number, when)
    assert seconds_since(tmp_path) < LIMIT
    assert start(tmp_path, "resume=runs/run", "plugins=[tests.signalling]").returncode == 0
    expect_same(tmp_path / "runs" / "whole", run)


@pytest.mark.slow
def test_a_signal_during_the_final_test_ends_with_75_and_a_resume_repeats_the_test(tmp_path: Path) -> None:
    done = start(tmp_path, *RUN, "name=run", SEND="TERM", TO="one", WHEN="test")
    assert done.returncode == 75, done.stderr
    assert (
        done.stderr
        == "the run was stopped by SIGTERM\nresume: python train.py resume=runs/run 'plugins=[tests.signalling]'\n"
    )
    run = tmp_path / "runs" / "run"
    assert json.loads((run / "status.json").read_text())["state"] == "preempted" and rows(run)[-1]["step"] == 12
    assert not any("test/loss" in row for row in rows(run))
    again = start(tmp_path, "resume=runs/run", "plugins=[tests.signalling]")
    assert again.returncode == 0 and "after 12 steps" in again.stdout
    assert [row["step"] for row in rows(run) if "test/loss" in row] == [12]


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_wandb_has_the_first(tmp_path: Path) -> None:
    """A second signal does not wait for W&B to write its files."""
    overrides = ["logger=wandb" if one == "logger=csv" else one for one in RUN]
    for to, code in (("twice", 128 + 15), ("one", 75)):
        mark = str(tmp_path / f"sent-{to}")
        done = start(tmp_path, *overrides, f"name={to}", SEND="TERM", TO=to, WHEN="step", MARK=mark)
        assert done.returncode == code, done.stderr
        run = tmp_path / "runs" / to
        assert json.loads((run / "status.json").read_text())["state"] == ("stopped" if to == "twice" else "preempted")
        assert to == "twice" or wandb_exit_code(run) == code
