"""`tfm compare`: a comparison for a terminal, as Markdown, LaTeX, CSV or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tfm_blocks.errors import printable
from tfm_blocks.report.comparison import Comparison
from tfm_blocks.report.differences import Group
from tfm_blocks.report.matrix import Matrix
from tfm_blocks.report.matrix_table import matrix_rows, mean_rows
from tfm_blocks.report.rates import RateCurve
from tfm_blocks.report.screen import print_json, print_table, screen, split_for_page
from tfm_blocks.report.table import Table, csv_text, latex, markdown, markdown_text, texts
from tfm_blocks.runs.saved_run import SavedRun


def show_tables(tables: Sequence[Table], notes: Sequence[str]) -> None:
    """Print the tables, then the notes."""
    for table in tables:
        print_table(table)
    for note in notes:
        screen().print(f"note: {note}")


def print_markdown(tables: Sequence[Table], notes: Sequence[str]) -> None:
    """Print the tables and notes as Markdown."""
    for table in tables:
        print(markdown(table), end="\n\n")
    for note in notes:
        print(f"- {markdown_text(note)}")


def print_latex(tables: Sequence[Table], notes: Sequence[str]) -> None:
    """Print the tables as LaTeX, split into parts that fit a page, and the notes as comments."""
    for table in tables:
        for part in split_for_page(table):
            print(latex(part), end="\n\n")
    for note in notes:
        print(f"% {printable(' '.join(note.split()))}")


def print_csv(comparison: Comparison) -> None:
    """Print an unrounded row for each run; runs that differ only by their seed have the same group."""
    rows = [{"group": group.label, **_flat(run, comparison)} for group in comparison.groups for run in group.runs]
    names = dict.fromkeys(name for row in rows for name in row)
    print(csv_text(Table("", texts(*names), [[row.get(name) for name in names] for row in rows])), end="")


def print_matrix_csv(matrix: Matrix) -> None:
    """Print an unrounded row for each cell of the matrix."""
    rows = [{**row, "values": " ".join(map(str, row["values"]))} for row in matrix_rows(matrix)]
    print(csv_text(Table("", texts(*rows[0]), [list(row.values()) for row in rows])), end="")


def _flat(run: SavedRun, comparison: Comparison) -> dict[str, Any]:
    row: dict[str, Any] = {"run": str(run.folder), "state": run.state, "reason": run.reason}
    row |= {factor.key: Group("", [run]).setting(factor) for factor in comparison.factors}
    row |= {"seed": run.settings.get("seed", ""), **run.numbers}
    for name, best in run.best.items():
        row |= {f"best {name}": best.value, f"step of best {name}": best.step}
    for name, score in run.scores.items():
        row |= {name: score.value, f"{name} low": score.low, f"{name} high": score.high}
    return row | {f"{run.scored_on}/{name}": value for name, value in run.values.items()}


def print_comparison_json(comparison: Comparison) -> None:
    """Print all values, unrounded."""
    factors = {
        factor.key: {value: dict(zip(factor.others, others, strict=True)) for value, others in factor.values.items()}
        for factor in comparison.factors
    }
    record = {
        "differences": factors,
        "groups": [
            {"group": group.label, "runs": [_run_record(run, comparison) for run in group.runs]}
            for group in comparison.groups
        ],
        "learning_rates": [_curve_record(curve) for curve in comparison.curves],
        "baseline": comparison.baseline.label if comparison.baseline else None,
        "matrix": list(matrix_rows(comparison.matrix)) if comparison.matrix else [],
        "all_tasks": list(mean_rows(comparison.matrix)) if comparison.matrix else [],
        "against": [{**asdict(test), "group": test.group.label} for test in comparison.against],
        "notes": comparison.notes,
    }
    print_json(record)


def print_matrix_json(matrix: Matrix, notes: Sequence[str]) -> None:
    """Print the cells of the matrix and the notes, unrounded."""
    print_json({"matrix": list(matrix_rows(matrix)), "all_tasks": list(mean_rows(matrix)), "notes": notes})


def _curve_record(curve: RateCurve) -> dict[str, Any]:
    values = [{"value": rate.value, "losses": list(rate.losses), "diverged": rate.diverged} for rate in curve.rates]
    return {"model": curve.label, "key": curve.key, "best": curve.best.value, "edge": curve.edge, "values": values}


def _run_record(run: SavedRun, comparison: Comparison) -> dict[str, Any]:
    settings = {factor.key: Group("", [run]).setting(factor) for factor in comparison.factors}
    return {**run.describe(), "seed": run.settings.get("seed"), "settings": settings}
