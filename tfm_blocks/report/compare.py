"""`tfm compare`: a comparison for a terminal, as Markdown, as CSV or as JSON."""

from __future__ import annotations

import csv
import math
import sys
from dataclasses import asdict
from typing import Any

from tfm_blocks.errors import printable
from tfm_blocks.report.comparison import Comparison
from tfm_blocks.report.comparison_tables import sheets_of
from tfm_blocks.report.differences import Group
from tfm_blocks.report.rates import RateCurve
from tfm_blocks.report.screen import print_json, screen
from tfm_blocks.report.table import print_sheet
from tfm_blocks.runs.record import RunRecord, describe

TESTS = (
    "p, sentences: two-sided paired approximate randomization over test sentences (Riezler and Maxwell 2005), about "
    "twice the p of sacreBLEU's paired bootstrap, which --json has; p, seeds: Welch's t-test over runs; corrected: for "
    "all rows of the table (Holm 1979); 95 %: intervals of the difference"
)


def show_comparison(comparison: Comparison) -> None:
    """Print the tables, then notes on what is not comparable."""
    console = screen()
    for sheet in sheets_of(comparison):
        print_sheet(console, sheet)
    if comparison.against:
        console.print(TESTS)
    for note in comparison.notes:
        console.print(f"note: {note}")


def print_markdown(comparison: Comparison) -> None:
    """Print the tables and notes as Markdown."""
    for sheet in sheets_of(comparison):
        print(f"**{_plain(sheet.title)}**\n")
        rules = ["---"] * sheet.words + ["---:"] * (len(sheet.columns) - sheet.words)
        for row in (sheet.columns, rules, *([cell.text for cell in row] for row in sheet.rows)):
            print(f"| {' | '.join(map(_plain, row))} |")
        print()
    for note in ([TESTS] if comparison.against else []) + list(comparison.notes):
        print(f"- {_plain(note)}")


def _plain(text: str) -> str:
    """Return the text as one line, with the characters that end a cell or begin a tag escaped."""
    return printable(" ".join(text.split())).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def print_csv(comparison: Comparison) -> None:
    """Print an unrounded row for each run; runs that differ only by their seed have the same group."""
    rows = [{"group": group.label, **_flat(run, comparison)} for group in comparison.groups for run in group.runs]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    writer.writerow({name: printable(name) for name in columns})
    writer.writerows(
        {name: printable(value) if isinstance(value, str) else value for name, value in row.items()} for row in rows
    )


def _flat(run: RunRecord, comparison: Comparison) -> dict[str, Any]:
    settings = {factor.key: Group("", [run]).setting(factor) for factor in comparison.factors}
    row: dict[str, Any] = {"run": str(run.folder), "state": run.state, "reason": run.reason, **settings}
    row |= {"seed": run.settings.get("seed", ""), **run.numbers}
    for name, best in run.best.items():
        row |= {f"best {name}": best.value, f"step of best {name}": best.step}
    for name, score in run.scores.items():
        row |= {name: score.value, f"{name} low": _or_none(score.low), f"{name} high": _or_none(score.high)}
    return row | {f"{run.scored_on}/{name}": value for name, value in run.values.items()}


def print_comparison_json(comparison: Comparison) -> None:
    """Print all values, unrounded."""
    factors = {
        factor.key: {value: dict(zip(factor.others, others, strict=True)) for value, others in factor.values.items()}
        for factor in comparison.factors
    }
    against = [{**asdict(one), "group": one.group.label} for one in comparison.against]
    record = {
        "differences": factors,
        "groups": [_group_record(group, comparison) for group in comparison.groups],
        "learning_rates": [_curve_record(curve) for curve in comparison.curves],
        "baseline": comparison.baseline.label if comparison.baseline else None,
        "against": against,
        "notes": comparison.notes,
    }
    print_json(record)


def _curve_record(curve: RateCurve) -> dict[str, Any]:
    values = [{"value": rate.value, "losses": list(rate.losses), "diverged": rate.diverged} for rate in curve.rates]
    return {"model": curve.label, "key": curve.key, "best": curve.best.value, "edge": curve.edge, "values": values}


def _group_record(group: Group, comparison: Comparison) -> dict[str, Any]:
    return {"group": group.label, "runs": [_run_record(run, comparison) for run in group.runs]}


def _run_record(run: RunRecord, comparison: Comparison) -> dict[str, Any]:
    settings = {factor.key: Group("", [run]).setting(factor) for factor in comparison.factors}
    return {**describe(run), "seed": run.settings.get("seed"), "settings": settings}


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
