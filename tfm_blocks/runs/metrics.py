"""Read and summarise metrics.csv, without the libraries that wrote it."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfm_blocks.errors import RunError, shown
from tfm_blocks.metric_schema import IMPROVABLE, SPEED, TOKENS
from tfm_blocks.runs.files import damaged, read_bytes, read_text

LAST_STEP = 2**31 - 1
TAIL = 65_536  # bytes that `read_last_row` reads from the end of the file

Row = Mapping[str, float]


@dataclass(frozen=True)
class Best:
    """The best value of a metric, and the first step at which it was measured."""

    value: float
    step: int


def read_rows(path: Path) -> list[Row]:
    """Return the finite numbers of each row by column; none if the file cannot be read as a table."""
    try:
        names, *rows = csv.reader(read_bytes(path).decode("utf-8", "replace").splitlines())
    except (RunError, ValueError, csv.Error):
        return []
    return [numbers for row in rows if (numbers := numbers_of(names, row))]


def read_last_row(path: Path) -> Row:
    """Return the last number of each metric in the header and the last TAIL bytes; empty if they are damaged."""
    newest: dict[str, float] = {}
    with suppress(OSError, csv.Error, ValueError):
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            header = file.readline(TAIL)
            file.seek(max(1, len(header), path.stat().st_size - TAIL) - 1)
            file.readline()  # the rest of a partial row
            tail = file.read().decode("utf-8", "replace").splitlines()
        names, *rows = csv.reader([header.decode("utf-8", "replace"), *tail])
        for row in rows:
            newest |= numbers_of(names, row)
    return newest


def read_metric_names(path: Path) -> list[str]:
    """Return the column names of the first line. Raises RunError if the first column is not `step`."""
    try:
        names = next(csv.reader(read_text(path).splitlines()), [])
    except csv.Error as error:
        raise damaged(path, error) from None
    if names[:1] != ["step"]:
        raise damaged(path, f"its first column must be step, but is {shown((names or [''])[0])}")
    return names


def numbers_of(names: Sequence[str], row: Sequence[str]) -> Row:
    """Return the finite numbers of a row by column; empty if the row has no valid step."""
    numbers = {}
    for name, text in zip(names, row, strict=False):
        with suppress(ValueError):
            if math.isfinite(number := float(text)):
                numbers[name] = number
    step = numbers.get("step", -1)
    return numbers if 0 <= step <= LAST_STEP and step.is_integer() else {}


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the tokens seen, the median of tokens per second, and the best validation of each metric."""
    speeds = [row[SPEED] for row in rows if SPEED in row]
    tokens = [row[TOKENS] for row in rows if TOKENS in row]
    best = {}
    for name, key in IMPROVABLE.items():
        sign = 1 if key.summary == "min" else -1
        if measured := [(sign * row[key.name], int(row["step"])) for row in rows if key.name in row]:
            value, step = min(measured)
            best[name] = Best(sign * value, step)
    return {
        "tokens_seen": tokens[-1] if tokens else None,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "best": best,
    }
