"""The live view of a sweep."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfm_blocks.sweep.job import Progress, SweepJob
from tfm_blocks.sweep.view import SweepView, show_end

SETTINGS = SimpleNamespace(trainer=SimpleNamespace(steps=8))


def job(name, state, reason="", first=None, **progress):
    found = SweepJob(name, [], None, SETTINGS, state, reason)
    found.progress = Progress(first=first, **progress)
    return found


def running():
    """Return a job that took 3,661 s for the first four of eight steps."""
    return job("seed-2", "running", step=4, pace=1234.5, best=3.25, first=(time.monotonic() - 3661, 0))


DONE = job("seed-1", "done", step=8, pace=100, best=2.5)
FAILED = job("seed-3", "out of memory", "data.batch_tokens: is 8")


def test_without_a_terminal_each_change_prints_a_line(capsys):
    with SweepView([DONE]) as view:
        view.show([DONE, job("seed-2", "waiting"), job("seed-3", "waiting")])
        assert capsys.readouterr().out == ""
        view.show([DONE, running(), FAILED])
        view.show([DONE, running(), FAILED])
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["seed-2: running", "seed-3: out of memory, data.batch_tokens: is 8"]


def test_a_minute_without_a_change_prints_the_progress(capsys, monkeypatch):
    monkeypatch.setattr("tfm_blocks.sweep.view.MINUTE", 0.0)
    with SweepView([DONE, running()]) as view:
        view.show([DONE, running()])
    output = capsys.readouterr().out
    assert "1 of 2 done, 1 running; seed-2 step 4/8, 1,234 tokens/s, best val/loss 3.2500, 1:01:01 left" in output


def test_the_end_lists_each_failure_with_its_log(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/x").mkdir(parents=True)
    for name in ("seed-1.log", "seed-3.log"):
        Path("runs/x", name).touch()
    show_end([DONE, FAILED], Path("runs/x"))
    output = capsys.readouterr().out
    assert "runs/x/seed-3.log" in output and "runs/x/seed-1.log" not in output
    assert output.endswith(
        "  out of memory: seed-3: data.batch_tokens: is 8\nsweep: 1 of 2 runs done, 1 out of memory\n"
    )


WATCHED = """
from tests.sweep.test_view import *
rows = [job(f"job-{number}", "waiting") for number in range(50)]
rows.append(job("job-50", "waiting", "another process (4711 on [node7]) trains it"))
with SweepView(rows) as view:
    view.show([*rows, DONE, running(), FAILED])
"""


@pytest.mark.grid
def test_on_a_terminal_a_table_omits_waiting_jobs_that_do_not_fit():
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "LINES": "14", "COLUMNS": "100"}
    subprocess.run([sys.executable, "-c", WATCHED], stdout=slave, env=environment, check=True)
    parts = []
    while select.select([master], [], [], 0)[0]:
        parts.append(os.read(master, 1 << 16))
    output = b"".join(parts).decode()
    os.close(slave)
    os.close(master)
    assert "1 of 54 done" in output and "job-49" not in output
    for text in (
        "seed-2",
        "4/8",
        "1,234",
        "3.2500",
        "1:01:01",
        "out of memory",
        "job-50",
        "waiting: another process",
        "job-0",
    ):
        assert text in output
