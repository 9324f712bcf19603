"""`tfm compare`: a comparison for a terminal, as Markdown, LaTeX, CSV or JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tfm_blocks.errors import printable
from tfm_blocks.report.comparison import Comparison
from tfm_blocks.report.comparison_tables import tables_of
from tfm_blocks.report.differences import Group
from tfm_blocks.report.rates import RateCurve
from tfm_blocks.report.screen import print_json, print_table, screen
from tfm_blocks.report.table import Table, csv_text, latex, markdown, markdown_text, texts
from tfm_blocks.runs.record import RunRecord, describe

TESTS = (
    "p, sentences: two-sided paired approximate randomization over test sentences (Riezler and Maxwell 2005), about "
    "twice the p of sacreBLEU's paired bootstrap, which --json has; p, seeds: Welch's t-test over runs; corrected: for "
    "all rows of the table (Holm 1979); 95 %: intervals of the difference"
)


def show_comparison(comparison: Comparison) -> None:
    """Print the tables, then notes on what is not comparable."""
    for table in tables_of(comparison):
        print_table(table)
    console = screen()
    if comparison.against:
        console.print(TESTS)
    for note in comparison.notes:
        console.print(f"note: {note}")


def print_markdown(comparison: Comparison) -> None:
    """Print the tables and notes as Markdown."""
    for table in tables_of(comparison):
        print(markdown(table), end="\n\n")
    for note in _notes(comparison):
        print(f"- {markdown_text(note)}")


def print_latex(comparison: Comparison) -> None:
    """Print the tables as LaTeX, and the notes as comments."""
    for table in tables_of(comparison):
        print(latex(table), end="\n\n")
    for note in _notes(comparison):
        print(f"% {printable(' '.join(note.split()))}")


def _notes(comparison: Comparison) -> list[str]:
    return [*([TESTS] if comparison.against else []), *comparison.notes]


def print_csv(comparison: Comparison) -> None:
    """Print an unrounded row for each run; runs that differ only by their seed have the same group."""
    rows = [{"group": group.label, **_flat(run, comparison)} for group in comparison.groups for run in group.runs]
    names = dict.fromkeys(name for row in rows for name in row)
    print(csv_text(Table("", texts(*names), [[row.get(name) for name in names] for row in rows])), end="")


def _flat(run: RunRecord, comparison: Comparison) -> dict[str, Any]:
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
        "against": [{**asdict(one), "group": one.group.label} for one in comparison.against],
        "notes": comparison.notes,
    }
    print_json(record)


def _curve_record(curve: RateCurve) -> dict[str, Any]:
    values = [{"value": rate.value, "losses": list(rate.losses), "diverged": rate.diverged} for rate in curve.rates]
    return {"model": curve.label, "key": curve.key, "best": curve.best.value, "edge": curve.edge, "values": values}


def _run_record(run: RunRecord, comparison: Comparison) -> dict[str, Any]:
    settings = {factor.key: Group("", [run]).setting(factor) for factor in comparison.factors}
    return {**describe(run), "seed": run.settings.get("seed"), "settings": settings}
