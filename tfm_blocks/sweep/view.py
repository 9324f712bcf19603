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

from tfm_blocks.errors import printable
from tfm_blocks.metric_schema import OBJECTIVE, SPEED, find_key
from tfm_blocks.report.screen import clock, screen
from tfm_blocks.report.table import Cell, FittedSheet, Sheet, print_sheet

MINUTE = 60.0  # seconds between two heartbeat lines
ORDER = ("running", "waiting", "done")  # failures come first if the terminal has too few lines
BEST = f"best {OBJECTIVE}"
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
            self.live.update(FittedSheet(_sheet(rows, self.console.height - AROUND)), refresh=True)
            return
        changed = [row for row in rows if (row.state, row.reason) != self.states.get(row.name, ("waiting", ""))]
        for row in changed:
            self._say(f"{row.name}: {row.state}" + (f", {row.reason}" if row.reason else ""))
        self.states = {row.name: (row.state, row.reason) for row in rows}
        if not changed and time.monotonic() - self.said > MINUTE:
            self._say(
                "; ".join(
                    [
                        _counts(rows),
                        *(
                            _news(row)
                            for row in rows
                            if row.state == "running" or (row.state == "waiting" and row.reason)
                        ),
                    ]
                )
            )

    def _say(self, text: str) -> None:
        self.said = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {printable(text)}", flush=True)


def is_watched(console: Console) -> bool:
    """Return True if the console is a terminal that can overwrite its own lines."""
    return console.is_terminal and not console.is_dumb_terminal


def show_end(rows: Sequence[SweepRow], folder: str) -> None:
    """Print the result of each job, and the log of each job that is not done."""
    columns = ["job", "state", "steps", BEST, "log"]
    print_sheet(screen(), Sheet(folder, columns, [_end(row, folder) for row in rows], 2))
    for row in rows:
        if row.state not in ("done", "waiting"):
            print(printable(f"  {row.state}: {row.name}: {row.reason}"))
    done, others = _counted(rows)
    print(f"sweep: {done} of {len(rows)} runs done{others}")


def _end(row: SweepRow, folder: str) -> list[Cell]:
    log = f"{folder}/{row.log}" if row.log and row.state not in ("done", "waiting") else ""
    best = Cell(_number(row.best, OBJECTIVE), row.best)
    return [Cell(row.name), Cell(row.state), Cell(f"{row.step:,}", row.step), best, Cell(log)]


def _sheet(rows: Sequence[SweepRow], lines: int) -> Sheet:
    shown = sorted(rows, key=_rank)[: max(lines, 1)]
    columns = ["job", "state", "step", "tokens/s", BEST, "left"]
    return Sheet(_counts(rows), columns, [_row(row) for row in (rows if len(rows) <= lines else shown)], 2)


def _row(row: SweepRow) -> list[Cell]:
    step = f"{row.step:,}/{row.steps:,}" if row.state != "waiting" else ""
    waits = f": {row.reason}" if row.state == "waiting" and row.reason else ""
    numbers = [_number(row.pace, SPEED), _number(row.best, OBJECTIVE), _duration(row.left)]
    values = (row.step, row.pace, row.best, row.left)
    cells = [Cell(text, value) for text, value in zip([step, *numbers], values, strict=True)]
    return [Cell(row.name), Cell(row.state + waits), *cells]


def _rank(row: SweepRow) -> tuple[int, bool]:
    """Return a sort key: failed jobs first, and jobs that wait for something before jobs that wait for their turn."""
    return ORDER.index(row.state) if row.state in ORDER else -1, not row.reason


def _counts(rows: Sequence[SweepRow]) -> str:
    done, others = _counted(rows)
    return f"{done} of {len(rows)} done{others}"


def _counted(rows: Sequence[SweepRow]) -> tuple[int, str]:
    """Return the number of jobs that are done, and the numbers in other states, such as `, 2 killed, 1 pruned`."""
    found = Counter(row.state for row in rows)
    return found.pop("done", 0), "".join(f", {count} {state}" for state, count in found.items())


def _news(row: SweepRow) -> str:
    if row.state != "running":
        return f"{row.name} {row.state}, {row.reason}"
    parts = [f"{row.name} step {row.step:,}/{row.steps:,}"]
    parts += [f"{_number(row.pace, SPEED)} tokens/s"] if row.pace == row.pace else []
    parts += [f"{BEST} {_number(row.best, OBJECTIVE)}"] if row.best == row.best else []
    return ", ".join(parts + ([f"{_duration(row.left)} left"] if row.left == row.left else []))


def _number(value: float, metric: str) -> str:
    return find_key(metric).form.format(value) if value == value else ""


def _duration(seconds: float) -> str:
    return clock(seconds) if seconds == seconds else ""
