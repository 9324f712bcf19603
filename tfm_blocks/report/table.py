"""Tables for a terminal, Markdown or a page. On a terminal a table fits the width, and numbers are never cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table

from tfm_blocks.errors import printable

FOLDED = 12  # letters of a word that stay together in the narrowest column
NUMBER = re.compile(r"[^\w\s]*\d[\d.,:/e+–%-]*[^\w\s]*")  # a number with signs and brackets around it


@dataclass(frozen=True)
class Cell:
    """The displayed text, and the number by which a table is sorted, if the cell is a number."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Sheet:
    """A table. The first `words` columns are texts and the others numbers; the first `keys` columns identify a row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: int
    keys: int = 1


@dataclass(frozen=True)
class Column:
    """The possible widths of a column, in terminal cells. Numbers are whole at each width.

    At `narrowest`, a cell such as `40.48 ± 8.59` takes several lines, and long words are folded. At `folded`, only
    words are folded. At `wrapped`, words are whole. At `widest`, every cell is one line.
    """

    number: int
    narrowest: int
    folded: int
    wrapped: int
    widest: int


@dataclass(frozen=True)
class FittedSheet:
    """A sheet that rich can print. A sheet that is too wide becomes several tables that repeat its first columns."""

    sheet: Sheet

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        sheet = _printable(self.sheet)
        columns = [_measure(sheet, number) for number in range(len(sheet.columns))]
        title = sheet.title
        for part in split_columns(columns, sheet.keys, options.max_width):
            yield _table(sheet, title, part, fit(part, options.max_width))
            title = ""


def _printable(sheet: Sheet) -> Sheet:
    rows = [[replace(cell, text=printable(cell.text)) for cell in row] for row in sheet.rows]
    return replace(sheet, title=printable(sheet.title), columns=[*map(printable, sheet.columns)], rows=rows)


def print_sheet(console: Console, sheet: Sheet) -> None:
    """Print the sheet. A line is longer than the console only if a number needs it."""
    console.print(FittedSheet(sheet), crop=False)


def split_columns(columns: Sequence[Column], keys: int, width: int) -> list[list[Column]]:
    """Return the columns in groups that fit `width`, each of which begins with the first `keys` columns."""
    if _total([column.folded for column in columns]) <= width:
        return [list(columns)]
    groups: list[list[Column]] = [[]]
    for column in columns[keys:]:
        tried = [*columns[:keys], *groups[-1], column]
        preferred = [max(one.folded, min(one.wrapped, width // 3)) for one in tried]
        if groups[-1] and _total(preferred) > width:
            groups.append([])
        groups[-1].append(column)
    return [[*columns[:keys], *group] for group in groups]


def fit(columns: Sequence[Column], width: int) -> list[int]:
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


def _measure(sheet: Sheet, number: int) -> Column:
    cells, header = [row[number] for row in sheet.rows], sheet.columns[number]
    texts = [header, *(cell.text for cell in cells)]
    words = {word for text in texts for word in text.split()}
    shortest = [cell_len(word) if NUMBER.fullmatch(word) else min(cell_len(word), FOLDED) for word in words]
    numbers = [cell_len(cell.text) for cell in cells if cell.value is not None]
    lines = [cell_len(line) for text in texts for line in text.splitlines()]
    narrowest, longest = max([1, *shortest]), max([1, *map(cell_len, words)])
    folded, wrapped = max([narrowest, *numbers]), max([longest, *numbers])
    return Column(number, narrowest, folded, wrapped, max([1, *lines]))


def _table(sheet: Sheet, title: str, columns: Sequence[Column], widths: Sequence[int]) -> Table:
    table = Table(title=title or None, title_justify="left", width=_total(widths))
    for column, width in zip(columns, widths, strict=True):
        table.add_column(sheet.columns[column.number], width=width, overflow="fold")
        if any(row[column.number].value is not None for row in sheet.rows):
            table.columns[-1].justify = "right"
    for row in sheet.rows:
        table.add_row(*(row[column.number].text for column in columns))
    return table
