"""`tfm models`: the available models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from tfm_blocks.compose.comments import Entry
from tfm_blocks.report.screen import screen
from tfm_blocks.report.table import Cell, Sheet, print_sheet


def show_models(models: Sequence[Entry]) -> None:
    """Print a row for each model."""
    rows = [
        [Cell(one.name), Cell(", ".join(one.parents)), Cell(one.about), Cell(" ".join(one.knobs))] for one in models
    ]
    print_sheet(screen(), Sheet("models", ("model", "inherits", "what it is", "knobs that it sets"), rows, 4))


def print_models_json(models: Sequence[Entry]) -> None:
    """Print the same fields and the files of each model as JSON."""
    print(json.dumps([asdict(one) for one in models], indent=1, ensure_ascii=False))
