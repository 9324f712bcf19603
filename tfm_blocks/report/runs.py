"""`tfm runs`: what lies in a folder of runs, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from tfm_blocks.report.screen import screen
from tfm_blocks.runs.listing import RunEntry, size_of


def show_runs(runs: Sequence[RunEntry]) -> None:
    """Prints a line for each run."""
    table = Table("run", "state", "model", "data", "step", "score", "changed")
    table.columns[4].justify = "right"
    for one in runs:
        score = f"{one.score[0]} {one.score[1]:.4g}" if one.score else ""
        changed = datetime.fromtimestamp(one.changed).strftime("%Y-%m-%d %H:%M")
        texts = (str(one.folder), one.state, one.model, one.data, f"{one.step:,}", score, changed)
        table.add_row(*texts)
    screen().print(table)


def print_runs_json(runs: Sequence[RunEntry]) -> None:
    """Prints everything that the table shows, unrounded, and the command lines."""
    print(json.dumps([entry_record(one) for one in runs], indent=1, ensure_ascii=False))


def entry_record(run: RunEntry) -> dict[str, Any]:
    """What JSON has of it."""
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
    """Prints what each folder holds in megabytes."""
    for folder in folders:
        print(f"{folder}: {size_of(folder) / 1e6:,.1f} MB")
