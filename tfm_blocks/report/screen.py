"""The consoles to which commands print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from tfm_blocks.errors import printable

UNBOUNDED = 1_000_000  # columns of a pipe or a file, where no line is wrapped


class Screen(Console):
    """A console that prints only printable text: names and texts in run folders may hold escape sequences."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(one) if isinstance(one, str) else one for one in objects), **options)


def print_json(value: object) -> None:
    """Print JSON with all letters as they are, and control and format characters as `\\u202e`."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    print("".join(one if printable(one) == one else _json_escape(one) for one in text))


def _json_escape(letter: str) -> str:
    units = letter.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[place : place + 4]}" for place in range(0, len(units), 4))


def screen() -> Console:
    """Return a console of $COLUMNS columns if that is set, else as wide as the terminal, else unbounded.

    Brackets and colons of names, as in `[/x]` and `:key:`, are printed as they stand: nothing is markup or an emoji.
    """
    plain = partial(Screen, highlight=False, markup=False, emoji=False)
    console, columns = plain(), os.environ.get("COLUMNS", "")
    if console.is_terminal or (columns.isdigit() and int(columns)):
        return console  # rich reads COLUMNS
    return plain(width=UNBOUNDED)


def clock(seconds: float) -> str:
    """Return a duration as `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], object]]:
    """Show the number of finished lines and the time on stderr, if stderr is a terminal and stdin is not.

    Yields a function that sets the number.
    """
    console = Console(stderr=True)
    if not console.is_terminal or sys.stdin.isatty():
        yield lambda done: None
        return
    columns = (TextColumn("{task.completed:,.0f} " + what), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done: progress.update(task, completed=done)
