"""The progress display of a sweep: a live table on a terminal, lines elsewhere, and the final results."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.live import Live

from tfm_blocks.metric_schema import OBJECTIVE, SPEED, find_key
from tfm_blocks.report.screen import FittedTable, clock, print_line, print_table, screen
from tfm_blocks.report.table import COUNT, Cell, Column, Table, Value, texts

MINUTE = 60.0  # seconds between two heartbeat lines
ORDER = ("running", "waiting", "done")  # failures come first if the terminal has too few lines
BEST = Column(f"best {OBJECTIVE}", find_key(OBJECTIVE).form)
SPEEDS = Column("tokens/s", find_key(SPEED).form)
AROUND = 8  # lines of the terminal that the table's frame takes


@dataclass(frozen=True)
class SweepRow:
    """The state of a job; unknown numbers are NaN."""

    name: str
    state: str
    reason: str = ""
    log: str = ""
    step: int = 0
    steps: int = 0
    pace: float = math.nan
    best: float = math.nan
    left: float = math.nan


class SweepView:
    """Displays the rows on each call of `show`; `known` rows need no line. Use it as a context manager."""

    def __init__(self, known: Sequence[SweepRow]) -> None:
        self.console = screen()
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if is_watched(self.console) else None
        self.states = {row.name: (row.state, row.reason) for row in known}
        self.said = time.monotonic()

    def __enter__(self) -> SweepView:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def show(self, rows: Sequence[SweepRow]) -> None:
        """Show all rows on a terminal; elsewhere, print a line for each change of state, and one a minute."""
        if self.live:
            self.live.update(FittedTable(_table(rows, self.console.height - AROUND)), refresh=True)
            return
        changed = [row for row in rows if (row.state, row.reason) != self.states.get(row.name, ("waiting", ""))]
        for row in changed:
            self._say(f"{row.name}: {row.state}" + (f", {row.reason}" if row.reason else ""))
        self.states = {row.name: (row.state, row.reason) for row in rows}
        if not changed and time.monotonic() - self.said > MINUTE:
            active = [row for row in rows if row.state == "running" or (row.state == "waiting" and row.reason)]
            self._say("; ".join([_counts(rows), *map(_news, active)]))

    def _say(self, text: str) -> None:
        self.said = time.monotonic()
        print_line(f"{time.strftime('%H:%M:%S')} {text}")


def is_watched(console: Console) -> bool:
    """Return True if the console is a terminal that can overwrite its own lines."""
    return console.is_terminal and not console.is_dumb_terminal


def show_end(rows: Sequence[SweepRow], folder: str) -> None:
    """Print the result of each job, and the log of each job that is not done."""
    columns = [*texts("job", "state"), Column("steps", COUNT), BEST, Column("log")]
    failed = [row for row in rows if row.state not in ("done", "waiting")]
    logs = {row.name: f"{folder}/{row.log}" for row in failed if row.log}
    cells = [[row.name, row.state, row.step, row.best, logs.get(row.name)] for row in rows]
    print_table(Table(folder, columns, cells))
    for row in failed:
        print_line(f"  {row.state}: {row.name}: {row.reason}")
    done, others = _counted(rows)
    print_line(f"sweep: {done} of {len(rows)} runs done{others}")


def _table(rows: Sequence[SweepRow], lines: int) -> Table:
    shown = rows if len(rows) <= lines else sorted(rows, key=_rank)[: max(lines, 1)]
    columns = [*texts("job", "state"), Column("step", COUNT), SPEEDS, BEST, Column("left", COUNT)]
    return Table(_counts(rows), columns, [_row(row) for row in shown])


def _row(row: SweepRow) -> list[Value]:
    step = f"{row.step:,}/{row.steps:,}" if row.state != "waiting" else ""
    waits = f": {row.reason}" if row.state == "waiting" and row.reason else ""
    return [row.name, row.state + waits, Cell(step, row.step), row.pace, row.best, Cell(_duration(row.left), row.left)]


def _rank(row: SweepRow) -> tuple[int, bool]:
    """Return a sort key: failed jobs first, and jobs that wait for something before jobs that wait for their turn."""
    return ORDER.index(row.state) if row.state in ORDER else -1, not row.reason


def _counts(rows: Sequence[SweepRow]) -> str:
    done, others = _counted(rows)
    return f"{done} of {len(rows)} done{others}"


def _counted(rows: Sequence[SweepRow]) -> tuple[int, str]:
    """Return the number of jobs that are done, and the numbers in other states, such as `, 2 killed, 1 pruned`."""
    counts = Counter(row.state for row in rows)
    return counts.pop("done", 0), "".join(f", {count} {state}" for state, count in counts.items())


def _news(row: SweepRow) -> str:
    if row.state != "running":
        return f"{row.name} {row.state}, {row.reason}"
    parts = [f"{row.name} step {row.step:,}/{row.steps:,}"]
    parts += [f"{SPEEDS.form.format(row.pace)} tokens/s"] if row.pace == row.pace else []
    parts += [f"{BEST.heading} {BEST.form.format(row.best)}"] if row.best == row.best else []
    return ", ".join(parts + ([f"{_duration(row.left)} left"] if row.left == row.left else []))


def _duration(seconds: float) -> str:
    return clock(seconds) if seconds == seconds else ""
