"""Tables as values, and their form as Markdown, CSV and LaTeX. `screen.py` prints them on a terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from tfm_blocks.errors import printable

COUNT = "{:,.0f}"  # the form of a large number
WRAPPED = 45  # letters of a text above which LaTeX wraps it
LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "&%$#_{}"}
    | {letter: f"${letter}$" for letter in "<>|"}
    | {"[": "{[}"}  # in the next row, \\ reads [ as its argument
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "²": "$^2$", "→": r"$\to$", "–": "--", "…": r"\dots{}"}
)


@dataclass(frozen=True)
class Cell:
    """A displayed text, and the number by which a table is sorted, if the cell is a number.

    A number that is not `ranked` is never the best of its column.
    """

    text: str
    value: float | None = None
    ranked: bool = True


Value = str | float | Cell | None


@dataclass(frozen=True)
class Column:
    """A column. `form` is the format of its numbers, which are aligned right; a column of texts has no form.

    better: whether Markdown, LaTeX and pages show the highest or the lowest number in bold.
    """

    heading: str
    form: str = ""
    better: Literal["", "lower", "higher"] = ""


def texts(*headings: str) -> list[Column]:
    """Return columns of texts."""
    return [Column(heading) for heading in headings]


@dataclass(frozen=True)
class Table:
    """A table of raw values; an unknown number is None or NaN. The first `keys` columns identify a row.

    `note` explains the values below the table.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    keys: int = 1
    note: str = ""

    @cached_property
    def cells(self) -> list[list[Cell]]:
        """The rows as they are displayed: formatted, and without control characters."""
        return [[_cell(value, column) for value, column in zip(row, self.columns, strict=True)] for row in self.rows]

    @property
    def with_best(self) -> list[list[tuple[Cell, bool]]]:
        """The cells, and whether each has the best number of its column, if the column has a better direction."""
        columns = zip(self.columns, zip(*self.cells, strict=True), strict=False)
        best = [_best(column, cells) for column, cells in columns]
        return [
            [(cell, cell.ranked and top is not None and cell.value == top) for cell, top in zip(row, best, strict=True)]
            for row in self.cells
        ]

    @property
    def headings(self) -> list[str]:
        """The headings as they are displayed."""
        return [printable(column.heading) for column in self.columns]


def _cell(value: Value, column: Column) -> Cell:
    if isinstance(value, Cell):
        return replace(value, text=printable(value.text))
    if value is None or value != value:
        return Cell("")
    return Cell(printable(value)) if isinstance(value, str) else Cell((column.form or "{}").format(value), value)


def markdown(table: Table) -> str:
    """Return the table in Markdown, with its title and its note if it has them, and the best numbers in bold."""
    rules = ["---:" if column.form else "---" for column in table.columns]
    cells = [
        [f"**{markdown_text(cell.text)}**" if best else markdown_text(cell.text) for cell, best in row]
        for row in table.with_best
    ]
    lines = [f"| {' | '.join(row)} |" for row in (map(markdown_text, table.headings), rules, *cells)]
    title = [f"**{markdown_text(table.title)}**\n"] if table.title else []
    return "\n".join([*title, *lines, *([f"\n{markdown_text(table.note)}"] if table.note else [])])


def markdown_text(text: str) -> str:
    """Return the text as one line, with the characters that end a cell or begin a tag escaped."""
    return printable(" ".join(text.split())).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def latex(table: Table) -> str:
    """Return the table for a document with the package booktabs."""
    longest = [
        max(len(row[number].text) for row in table.cells) if table.rows else 0 for number in range(len(table.columns))
    ]
    texts_form = [r"p{0.5\linewidth}" if length > WRAPPED else "l" for length in longest]
    alignment = "".join("r" if column.form else form for column, form in zip(table.columns, texts_form, strict=True))
    rows = [[_bold(cell) if best else latex_text(cell.text) for cell, best in row] for row in table.with_best]
    lines = [" & ".join(row) + r" \\" for row in ([*map(latex_text, table.headings)], *rows)]
    return "\n".join(
        [
            r"\begin{table}",
            f"\\caption{{{latex_text(table.title)}}}",
            f"\\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            *([f"\\par\\smallskip {{\\footnotesize {latex_text(table.note)}\\par}}"] if table.note else []),
            r"\end{table}",
        ]
    )


def _best(column: Column, cells: Iterable[Cell]) -> float | None:
    """Return the best ranked number, if there are several different numbers."""
    known = [cell for cell in cells if cell.value is not None]
    ranked = [cell.value for cell in known if cell.value is not None and cell.ranked]
    if not column.better or not ranked or len({cell.value for cell in known}) < 2:
        return None
    return min(ranked) if column.better == "lower" else max(ranked)


def _bold(cell: Cell) -> str:
    return f"\\textbf{{{latex_text(cell.text)}}}"


def latex_text(text: str) -> str:
    """Return the text as one line, with the characters that LaTeX interprets escaped."""
    return printable(" ".join(text.split())).translate(LATEX)


def csv_text(table: Table) -> str:
    """Return the table with unrounded numbers as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.headings)
    writer.writerows([cell.text if cell.value is None else cell.value for cell in row] for row in table.cells)
    return text.getvalue()
