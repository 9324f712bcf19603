"""Read and write losses.csv: the finished model's losses for each row of the scored split."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tfm_blocks.runs.files import damaged, read_text
from tfm_blocks.runs.folder import LOSSES, settle

COLUMNS = ("loss", "nll", "tokens")
Losses = npt.NDArray[np.float64]


def write_losses(run: Path, losses_N3: Losses) -> None:
    """Write one line per row: the sums over its target tokens of the loss and of -log p, and the number of tokens."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([float(loss), float(nll), int(tokens)] for loss, nll, tokens in losses_N3)
    part = run / f"{LOSSES}.part"
    part.write_text(text.getvalue(), "utf-8")
    settle(part, run / LOSSES)


def read_losses(run: Path) -> Losses | None:
    """Return losses_N3 in the order of the split; None if the file does not exist, as in runs of older versions.

    Raises RunError if the file is damaged.
    """
    path = run / LOSSES
    if not path.exists():
        return None
    text = read_text(path)
    try:
        header, *rows = text.splitlines()
        losses_N3 = np.array([[float(number) for number in row.split(",")] for row in rows], np.float64)
        if header != ",".join(COLUMNS) or losses_N3.ndim != 2 or losses_N3.shape[1] != len(COLUMNS):
            raise ValueError(f"it needs a line {','.join(COLUMNS)}, then three numbers per line")
        if not np.isfinite(losses_N3).all() or losses_N3[:, 2].min() < 1:
            raise ValueError("losses must be finite, and each row must have a token")
    except ValueError as error:
        raise damaged(path, error) from None
    return losses_N3
