"""Tables as values, and their form as Markdown, CSV and LaTeX. `screen.py` prints them on a terminal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Literal

from tfm_blocks.errors import printable

COUNT = "{:,.0f}"  # the form of a large number
P_VALUE = "{:.4f}"  # the form of a p-value
WRAPPED = 45  # letters of a text above which LaTeX wraps it
LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "&%$#_{}"}
    | {letter: f"${letter}$" for letter in "<>|"}
    | {"[": "{[}"}  # in the next row, \\ reads [ as its argument
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {
        "±": r"$\pm$",
        "×": r"$\times$",
        "·": r"$\cdot$",
        "²": "$^2$",
        "→": r"$\to$",
        "–": "--",
        "…": r"\dots{}",
        "†": r"$\dagger$",
    }
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
Rows = list[list[Value]]


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
    return numbers("", *headings)


def numbers(form: str, *headings: str) -> list[Column]:
    """Return columns of numbers of one form."""
    return [Column(heading, form) for heading in headings]


def mean_cell(values: Sequence[float], form: str) -> Cell | None:
    """Return a cell with the mean and the standard deviation of several values; None without values."""
    if not values:
        return None
    deviation = f" ± {form.format(stdev(values))}" if len(values) > 1 else ""
    return Cell(form.format(fmean(values)) + deviation, fmean(values))


def p_cell(p: float | None) -> Cell | None:
    """Return a cell with a p-value, or with `< 0.0001` instead of `0.0000`; None without a p-value."""
    return None if p is None else Cell(p_text(p), p)


def p_text(p: float) -> str:
    """Return a p-value with four decimals, or `< 0.0001` instead of `0.0000`."""
    text = P_VALUE.format(p)
    return text if float(text) else "< 0.0001"


@dataclass(frozen=True)
class Table:
    """A table of raw values; an unknown number is None or NaN. The first `keys` columns identify a row.

    `note` explains the values below the table, in one or several lines.
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
        """The cells, and whether each has the best number of its column, if the column has a better direction.

        There is no best number unless several numbers differ.
        """
        best: list[float | None] = []
        for column, *cells in zip(self.columns, *self.cells, strict=True):
            values = [cell.value for cell in cells if cell.value is not None]
            ranked = [cell.value for cell in cells if cell.value is not None and cell.ranked]
            known = column.better and ranked and len(set(values)) > 1
            best.append((min if column.better == "lower" else max)(ranked) if known else None)
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


def _escaped(table: Table, escape: Callable[[str], str], bold: str) -> list[list[str]]:
    """Return the headings and the rows as escaped texts; the best numbers have the form `bold`."""
    rows = [[(bold if best else "{}").format(escape(cell.text)) for cell, best in row] for row in table.with_best]
    return [list(map(escape, table.headings)), *rows]


def markdown(table: Table) -> str:
    """Return the table in Markdown, with its title and its note if it has them, and the best numbers in bold."""
    headings, *rows = _escaped(table, markdown_text, "**{}**")
    rules = ["---:" if column.form else "---" for column in table.columns]
    title = [f"**{markdown_text(table.title)}**\n"] if table.title else []
    note = [f"\n{markdown_text(line)}" for line in table.note.splitlines()]
    return "\n".join([*title, *(f"| {' | '.join(row)} |" for row in (headings, rules, *rows)), *note])


def markdown_text(text: str) -> str:
    """Return the text as one line, with the characters that end a cell or begin a tag escaped."""
    return printable(" ".join(text.split())).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def latex(table: Table) -> str:
    """Return the table for a document with the package booktabs."""
    alignment = ""
    for column, *cells in zip(table.columns, *table.cells, strict=True):
        is_long = max((len(cell.text) for cell in cells), default=0) > WRAPPED
        alignment += "r" if column.form else r"p{0.5\linewidth}" if is_long else "l"
    headings, *rows = (" & ".join(row) + r" \\" for row in _escaped(table, latex_text, r"\textbf{{{}}}"))
    lines = "\\par ".join(map(latex_text, table.note.splitlines()))
    note = [f"\\par\\smallskip {{\\footnotesize\\raggedright {lines}\\par}}"] if lines else []
    name = re.sub(r"[^a-z0-9]+", "-", table.title.lower()).strip("-")
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            f"\\caption{{{latex_text(table.title)}}}",
            f"\\label{{tab:{name}}}",
            f"\\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
            headings,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            *note,
            r"\end{table}",
        ]
    )


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
