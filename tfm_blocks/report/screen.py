"""The consoles on which commands print."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

UNBOUNDED = 1_000_000  # columns of a pipe or a file, in which nothing is folded


def screen() -> Console:
    """Return a console of $COLUMNS columns if that is set, else as wide as the terminal, else unbounded.

    Brackets and colons of names, as in `[/x]` and `:key:`, are printed as they stand: nothing is markup or an emoji.
    """
    plain = partial(Console, highlight=False, markup=False, emoji=False)
    console, columns = plain(), os.environ.get("COLUMNS", "")
    if console.is_terminal or (columns.isdigit() and int(columns)):
        return console  # rich reads COLUMNS
    return plain(width=UNBOUNDED)


def clock(seconds: float) -> str:
    """`1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], object]]:
    """Shows a count of finished lines and the time on stderr, if it is a terminal and stdin is none.

    Yields a function that sets the count.
    """
    console = Console(stderr=True)
    if not console.is_terminal or sys.stdin.isatty():
        yield lambda done: None
        return
    columns = (TextColumn("{task.completed:,.0f} " + what), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done: progress.update(task, completed=done)
