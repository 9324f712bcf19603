"""Where reports are printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

WIDE = 160


def screen() -> Console:
    """The terminal at its width; a pipe or a file at 160 columns, so that nothing in it is folded."""
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], object]]:
    """Shows on stderr how many are done and for how long, where stderr is a terminal and nobody types on stdin."""
    console = Console(stderr=True)
    if not console.is_terminal or sys.stdin.isatty():
        yield lambda done: None
        return
    columns = (TextColumn("{task.completed:,.0f} " + what), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done: progress.update(task, completed=done)
