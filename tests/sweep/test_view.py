"""The live view of a sweep."""

import os
import pty
import select
import subprocess
import sys

from tfm_blocks.sweep.view import SweepRow, SweepView, show_end

DONE = SweepRow("seed-1", "done", log="seed-1.log", step=8, steps=8, pace=100, best=2.5)
RUNNING = SweepRow("seed-2", "running", step=4, steps=8, pace=1234.5, best=3.25, left=3661)
FAILED = SweepRow("seed-3", "out of memory", "data.batch_tokens: is 8", "seed-3.log", steps=8)


def test_without_a_terminal_each_change_prints_a_line(capsys):
    with SweepView([DONE]) as view:
        view.show([DONE, SweepRow("seed-2", "waiting"), SweepRow("seed-3", "waiting")])
        assert capsys.readouterr().out == ""
        view.show([DONE, RUNNING, FAILED])
        view.show([DONE, RUNNING, FAILED])
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["seed-2: running", "seed-3: out of memory, data.batch_tokens: is 8"]


def test_a_minute_without_a_change_prints_the_progress(capsys, monkeypatch):
    monkeypatch.setattr("tfm_blocks.sweep.view.MINUTE", 0.0)
    with SweepView([DONE, RUNNING]) as view:
        view.show([DONE, RUNNING])
    output = capsys.readouterr().out
    assert "1 of 2 done, 1 running; seed-2 step 4/8, 1,234 tokens/s, best val/loss 3.2500, 1:01:01 left" in output


def test_the_end_lists_each_failure_with_its_log(capsys):
    show_end([DONE, FAILED], "runs/x")
    output = capsys.readouterr().out
    assert "runs/x/seed-3.log" in output and "runs/x/seed-1.log" not in output
    assert output.endswith(
        "  out of memory: seed-3: data.batch_tokens: is 8\nsweep: 1 of 2 runs done, 1 out of memory\n"
    )


WATCHED = """
from tests.sweep.test_view import *
rows = [SweepRow(f"job-{number}", "waiting") for number in range(50)]
rows.append(SweepRow("job-50", "waiting", "another process (4711 on [node7]) trains it"))
with SweepView(rows) as view:
    view.show([*rows, DONE, RUNNING, FAILED])
"""


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
