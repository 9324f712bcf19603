"""The progress display of a sweep: a live table on a terminal, lines elsewhere, and the final results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.live import Live

from tfm_blocks.errors import print_line
from tfm_blocks.metric_schema import OBJECTIVE, SPEED, find_key
from tfm_blocks.report.screen import clock, fitted, print_table, screen
from tfm_blocks.report.table import COUNT, Cell, Column, Table, Value, texts
from tfm_blocks.runs.records import WAITING
from tfm_blocks.sweep.job import DONE, RUNNING, SweepJob

MINUTE = 60.0  # seconds between two heartbeat lines
ORDER = (RUNNING, WAITING, DONE)  # failures come first if the terminal has too few lines
BEST = Column(f"best {OBJECTIVE}", find_key(OBJECTIVE).form)
SPEEDS = Column("tokens/s", find_key(SPEED).form)
FRAME = 8  # lines of the terminal that the table's frame takes


class SweepView:
    """Displays the jobs on each call of `show`; `known` states need no line. Use it as a context manager."""

    def __init__(self, known: Sequence[SweepJob]) -> None:
        self.console = screen()
        live = Live(console=self.console, auto_refresh=False, transient=True)
        self.live = live if self.console.is_terminal and not self.console.is_dumb_terminal else None
        self.states = {job.name: (job.state, job.reason) for job in known}
        self.printed_at = time.monotonic()

    def __enter__(self) -> SweepView:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, jobs: Sequence[SweepJob]) -> None:
        """Show all jobs on a terminal; elsewhere, print a line for each change of state, and one a minute."""
        if self.live:
            self.live.update(fitted(_table(jobs, self.console.height - FRAME), self.console.width), refresh=True)
            return
        changed = [job for job in jobs if (job.state, job.reason) != self.states.get(job.name, (WAITING, ""))]
        lines = [f"{job.name}: {job.state}" + (f", {job.reason}" if job.reason else "") for job in changed]
        self.states = {job.name: (job.state, job.reason) for job in jobs}
        if not changed and time.monotonic() - self.printed_at > MINUTE:
            active = [job for job in jobs if job.state == RUNNING or (job.state == WAITING and job.reason)]
            lines.append("; ".join([_counts(jobs, ""), *map(_news, active)]))
        for line in lines:
            self.printed_at = time.monotonic()
            print_line(f"{time.strftime('%H:%M:%S')} {line}")


def show_end(jobs: Sequence[SweepJob], folder: Path) -> None:
    """Print the result of each job, and the log of each job that is not done."""
    columns = [*texts("job", "state"), Column("steps", COUNT), BEST, Column("log")]
    failed = [job for job in jobs if job.state not in ORDER]
    logs = {job.name: f"{folder}/{job.log}" for job in failed if (folder / job.log).is_file()}
    cells = [[job.name, job.state, job.progress.step, job.progress.best, logs.get(job.name)] for job in jobs]
    print_table(Table(str(folder), columns, cells))
    for job in failed:
        print_line(f"  {job.state}: {job.name}: {job.reason}")
    print_line(f"sweep: {_counts(jobs, 'runs ')}")


def _table(jobs: Sequence[SweepJob], lines: int) -> Table:
    """Return the table of the jobs that fit: failed jobs first, and jobs that wait for something before the others."""
    if len(jobs) > lines:
        jobs = sorted(jobs, key=lambda job: (ORDER.index(job.state) if job.state in ORDER else -1, not job.reason))
    columns = [*texts("job", "state"), Column("step", COUNT), SPEEDS, BEST, Column("left", COUNT)]
    rows = list[Sequence[Value]]()
    for job in jobs[: max(lines, 1)]:
        progress, left = job.progress, job.seconds_left
        waits = job.state == WAITING
        step = "" if waits else f"{progress.step:,}/{job.settings.trainer.steps:,}"
        state = f"{job.state}: {job.reason}" if waits and job.reason else job.state
        time_left = clock(left) if left == left else ""
        rows.append([job.name, state, Cell(step, progress.step), progress.pace, progress.best, Cell(time_left, left)])
    return Table(_counts(jobs, ""), columns, rows)


def _counts(jobs: Sequence[SweepJob], noun: str) -> str:
    """Return how many jobs are done, and how many are in other states, such as `, 2 killed, 1 pruned`."""
    counts = Counter(job.state for job in jobs)
    done = f"{counts.pop(DONE, 0)} of {len(jobs)} {noun}done"
    return done + "".join(f", {count} {state}" for state, count in counts.items())


def _news(job: SweepJob) -> str:
    if job.state != RUNNING:
        return f"{job.name} {job.state}, {job.reason}"
    progress, left = job.progress, job.seconds_left
    parts = [f"{job.name} step {progress.step:,}/{job.settings.trainer.steps:,}"]
    parts += [f"{SPEEDS.form.format(progress.pace)} tokens/s"] if progress.pace == progress.pace else []
    parts += [f"{BEST.heading} {BEST.form.format(progress.best)}"] if progress.best == progress.best else []
    return ", ".join([*parts, f"{clock(left)} left"] if left == left else parts)
