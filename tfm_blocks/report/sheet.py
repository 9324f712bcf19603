"""A table, for whatever shows it: a terminal, Markdown or a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Cell:
    """What people read, and by what a table is sorted: a number, or the text itself."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Sheet:
    """A table. Its first `words` columns are texts, and the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: int


def rich_table(sheet: Sheet) -> Table:
    """Return the table for a console of `screen`, on which nothing is markup."""
    table = Table(*sheet.columns, title=sheet.title, title_justify="left")
    for column in table.columns[sheet.words :]:
        column.justify = "right"
    for row in sheet.rows:
        table.add_row(*(cell.text for cell in row))
    return table
