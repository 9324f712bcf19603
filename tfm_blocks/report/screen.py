"""Terminal output: text without control characters, JSON, and tables that fit the width.

On a terminal a table fits the width, and numbers are never cut.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import rich.table
from rich.cells import cell_len
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from tfm_blocks.errors import printable
from tfm_blocks.report.table import WRAPPED, Table
from tfm_blocks.runs.files import finite_or_null

UNBOUNDED = 1_000_000  # columns of a pipe or a file, where no line is wrapped
PAGE = 66  # digits of a line of LaTeX's article class, whose text is 345 pt wide; a digit takes 5 pt
FOLDED = 12  # letters of a word that stay together in the narrowest column
NUMBER = re.compile(r"[^\w\s]*\d[\d.,:/e+–%-]*[^\w\s]*")  # a number with signs and brackets around it


class Screen(Console):
    """A console that prints only printable text: names and texts in run folders may hold escape sequences."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(item) if isinstance(item, str) else item for item in objects), **options)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError as `print` does; rich would exit with status 1."""
        raise BrokenPipeError


def screen() -> Console:
    """Return a console of $COLUMNS columns if that is set, else as wide as the terminal, else unbounded.

    Brackets and colons of names, as in `[/x]` and `:key:`, are printed as they stand: nothing is markup or an emoji.
    """
    plain = partial(Screen, highlight=False, markup=False, emoji=False)
    console, columns = plain(), os.environ.get("COLUMNS", "")
    if console.is_terminal or (columns.isdigit() and int(columns)):
        return console  # rich reads COLUMNS
    return plain(width=UNBOUNDED)


def print_json(value: object) -> None:
    """Print JSON with all letters as they are, and control and format characters as `\\u202e`."""
    text = json.dumps(finite_or_null(value), indent=1, ensure_ascii=False)
    print("".join(letter if printable(letter) == letter else json.dumps(letter)[1:-1] for letter in text))


def clock(seconds: float) -> str:
    """Return a duration as `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@contextmanager
def counting() -> Iterator[Callable[[int], object]]:
    """Show the number of finished lines and the time on stderr, if stderr is a terminal and stdin is not.

    Yields a function that sets the number.
    """
    console = Console(stderr=True)
    if not console.is_terminal or sys.stdin.isatty():
        yield lambda done: None
        return
    columns = (TextColumn("{task.completed:,.0f} lines"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("lines", total=None)
        yield lambda done: progress.update(task, completed=done)


def print_table(table: Table) -> None:
    """Print the table and its note. A line is longer than the console only if a number needs it."""
    console = screen()
    console.print(fitted(table, console.width), crop=False)
    if table.note:
        console.print(table.note)


def fitted(table: Table, width: int) -> Group:
    """Return a table for rich. A table that is too wide becomes several that repeat its first columns."""
    parts: list[RenderableType] = [Text(printable(table.title), "table.title")] if table.title else []
    measured = [_measure(table, number) for number in range(len(table.columns))]
    for columns in split_columns(measured, table.keys, width):
        widths = fit(columns, width)
        parts.append(part := rich.table.Table(width=_total(widths)))
        for column, cells in zip(columns, widths, strict=True):
            justify: JustifyMethod = "right" if table.columns[column.number].form else "left"
            part.add_column(table.headings[column.number], width=cells, overflow="fold", justify=justify)
        for row in table.cells:
            part.add_row(*(row[column.number].text for column in columns))
    return Group(*parts)


@dataclass(frozen=True)
class ColumnWidths:
    """The possible widths of a column, in terminal cells. Numbers are whole at each width.

    At `narrowest`, a cell such as `40.48 ± 8.59` takes several lines, and long words are folded. At `folded`, only
    words are folded. At `wrapped`, words are whole. At `widest`, every cell is one line.
    """

    number: int
    narrowest: int
    folded: int
    wrapped: int
    widest: int


def _measure(table: Table, number: int) -> ColumnWidths:
    cells = [row[number] for row in table.cells]
    lines = [line for text in (table.headings[number], *(cell.text for cell in cells)) for line in text.splitlines()]
    words = {word for line in lines for word in line.split()}
    shortest = [cell_len(word) if NUMBER.fullmatch(word) else min(cell_len(word), FOLDED) for word in words]
    numbers = [cell_len(cell.text) for cell in cells if cell.value is not None]
    narrowest, longest = max([1, *shortest]), max([1, *map(cell_len, words)])
    widest = max([1, *map(cell_len, lines)])
    return ColumnWidths(number, narrowest, max([narrowest, *numbers]), max([longest, *numbers]), widest)


def split_columns(columns: Sequence[ColumnWidths], keys: int, width: int) -> list[list[ColumnWidths]]:
    """Return the columns in groups that fit `width`. Each group begins with the first `keys` columns."""
    if _total([column.folded for column in columns]) <= width:
        return [list(columns)]
    groups: list[list[ColumnWidths]] = [[]]
    for column in columns[keys:]:
        tried = [*columns[:keys], *groups[-1], column]
        preferred = [max(entry.folded, min(entry.wrapped, width // 3)) for entry in tried]
        if groups[-1] and _total(preferred) > width:
            groups.append([])
        groups[-1].append(column)
    return [[*columns[:keys], *group] for group in groups]


def split_for_page(table: Table) -> list[Table]:
    """Return tables that fit a page of LaTeX's article class. Each table begins with the key columns."""
    columns = []
    for number, column in enumerate(table.columns):
        width = _measure(table, number).widest
        columns.append(ColumnWidths(number, *[width if column.form else min(width, WRAPPED)] * 4))
    groups = [[column.number for column in group] for group in split_columns(columns, table.keys, PAGE)]
    if len(groups) == 1:
        return [table]
    return [
        Table(
            f"{table.title} ({part} of {len(groups)})",
            [table.columns[number] for number in numbers],
            [[row[number] for number in numbers] for row in table.rows],
            table.keys,
            table.note if part == len(groups) else "",
        )
        for part, numbers in enumerate(groups, 1)
    ]


def fit(columns: Sequence[ColumnWidths], width: int) -> list[int]:
    """Return the widths of columns: the widest columns shrink until the table fits or cannot shrink further."""
    fits_folded = _total([column.folded for column in columns]) <= width
    least = [column.folded if fits_folded else column.narrowest for column in columns]
    widths = [column.widest for column in columns]
    while _total(widths) > width and (wide := [number for number, now in enumerate(widths) if now > least[number]]):
        widths[max(wide, key=lambda number: widths[number])] -= 1
    return widths


def _total(widths: Sequence[int]) -> int:
    """Return the width of a table with a space on both sides of each cell, and lines between and around them."""
    return sum(widths) + 3 * len(widths) + 1
