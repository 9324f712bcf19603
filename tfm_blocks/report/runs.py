"""`tfm runs`: the runs in a folder, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tfm_blocks.report.screen import print_json, screen
from tfm_blocks.report.table import Cell, Sheet, print_sheet
from tfm_blocks.runs.listing import RunEntry, size_of


def show_runs(runs: Sequence[RunEntry]) -> None:
    """Print a row for each run."""
    columns = ["run", "state", "model", "data", "step", "score", "changed"]
    print_sheet(screen(), Sheet("", columns, [_row(one) for one in runs], 4))


def _row(run: RunEntry) -> list[Cell]:
    score = Cell(f"{run.score[0]} {run.score[1]:.4g}", run.score[1]) if run.score else Cell("")
    changed = datetime.fromtimestamp(run.changed).strftime("%Y-%m-%d %H:%M")
    texts = [Cell(text) for text in (str(run.folder), run.state, run.model, run.data)]
    return [*texts, Cell(f"{run.step:,}", run.step), score, Cell(changed, run.changed)]


def print_runs_json(runs: Sequence[RunEntry]) -> None:
    """Print the fields of the table, unrounded, and the command lines."""
    print_json([entry_record(one) for one in runs])


def entry_record(run: RunEntry) -> dict[str, Any]:
    """Return the fields of a run for JSON."""
    return {
        "folder": str(run.folder),
        "state": run.state,
        "model": run.model,
        "data": run.data,
        "step": run.step,
        "score": dict([run.score]) if run.score else {},
        "changed": datetime.fromtimestamp(run.changed).astimezone().isoformat(timespec="seconds"),
        "commands": run.commands,
    }


def show_sizes(folders: Sequence[Path]) -> None:
    """Print the size of each folder in megabytes."""
    for folder in folders:
        screen().print(f"{folder}: {size_of(folder) / 1e6:,.1f} MB", soft_wrap=True)
