"""Lists on the terminal and as JSON: runs, models, and the jobs of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from tfm_blocks.compose.comments import Entry
from tfm_blocks.errors import Problem
from tfm_blocks.report.screen import print_json, print_table, screen
from tfm_blocks.report.table import COUNT, Cell, Column, Table, Value, texts
from tfm_blocks.runs.listing import size_of
from tfm_blocks.runs.saved_run import SavedRun


def show_runs(runs: Sequence[SavedRun]) -> None:
    """Print a row for each run."""
    columns = [*texts("run", "state", "model", "data"), *(Column(name, COUNT) for name in ("step", "score", "changed"))]
    print_table(Table("", columns, [_row(run) for run in runs]))


def _row(run: SavedRun) -> list[Value]:
    score = Cell(f"{run.headline[0]} {run.headline[1]:.4g}", run.headline[1]) if run.headline else None
    changed = Cell(datetime.fromtimestamp(run.changed).strftime("%Y-%m-%d %H:%M"), run.changed)
    return [str(run.folder), run.state, run.model, run.data, run.step, score, changed]


def print_runs_json(runs: Sequence[SavedRun]) -> None:
    """Print the fields of the table, unrounded, and the command lines."""
    print_json([entry_record(run) for run in runs])


def entry_record(run: SavedRun) -> dict[str, Any]:
    """Return the fields of a run for JSON."""
    changed = datetime.fromtimestamp(run.changed).astimezone().isoformat(timespec="seconds")
    return {
        "folder": str(run.folder),
        "state": run.state,
        "model": run.model,
        "data": run.data,
        "step": run.step,
        "score": dict([run.headline]) if run.headline else {},
        "changed": changed,
        "commands": run.commands,
    }


def show_sizes(folders: Sequence[Path]) -> None:
    """Print the size of each folder in megabytes."""
    for folder in folders:
        screen().print(f"{folder}: {size_of(folder) / 1e6:,.1f} MB", soft_wrap=True)


def show_models(models: Sequence[Entry]) -> None:
    """Print a row for each model."""
    rows = [[model.name, ", ".join(model.parents), model.about, " ".join(model.knobs)] for model in models]
    print_table(Table("models", texts("model", "inherits", "what it is", "knobs that it sets"), rows))


def print_models_json(models: Sequence[Entry]) -> None:
    """Print the same fields and the files of each model as JSON."""
    print_json([asdict(model) for model in models])


def show_jobs(jobs: Sequence[tuple[Sequence[str], int, Sequence[Problem]]]) -> None:
    """Print a row for each job: its overrides, and its number of parameters or the reason why it cannot start."""
    columns = [Column("job"), Column("parameters", COUNT), Column("verdict")]
    rows = [
        [
            " ".join(overrides),
            None if problems else parameters,
            "; ".join(f"{problem.address}: {problem.rule}" for problem in problems[:1]) or "fine",
        ]
        for overrides, parameters, problems in jobs
    ]
    print_table(Table(f"{len(jobs)} jobs", columns, rows))
