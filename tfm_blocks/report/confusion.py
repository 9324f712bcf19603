"""Confusion matrices of labels: as a picture for loggers, and as tables of a report."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from tfm_blocks.data.labels import LabelCoder
from tfm_blocks.data.settings import LabelsSettings, read_data
from tfm_blocks.report.differences import Groups
from tfm_blocks.report.samples import common_test_set
from tfm_blocks.report.table import Table, numbers, texts

MOST_CLASSES = 40  # of a picture or a table
MOST_COUNTED = 15  # classes of a picture whose cells have their counts
Counts = npt.NDArray[np.int64]


def has_confusion(coder: LabelCoder) -> bool:
    """Return True if each label is one of a few classes."""
    return coder.predict in ("class", "words") and len(coder.names) <= MOST_CLASSES


def count_confusions(coder: LabelCoder, outputs: Sequence[str], references: Sequence[str]) -> Counts:
    """Return counts_CC: of the labels of the reference class in each row, those with the output class of a column."""
    counts_CC = np.zeros((len(coder.names),) * 2, np.int64)
    for output, reference in zip(outputs, references, strict=True):
        np.add.at(counts_CC, (np.array(coder.encode(reference)) - 1, np.array(coder.encode(output)) - 1), 1)
    return counts_CC


def _shares(counts_CC: Counts) -> npt.NDArray[np.float64]:
    """Return the fractions of each row."""
    shares_CC: npt.NDArray[np.float64] = counts_CC / np.maximum(counts_CC.sum(1, keepdims=True), 1)
    return shares_CC


def confusion_png(coder: LabelCoder, counts_CC: Counts) -> bytes:
    """Return a picture of a confusion matrix, whose shades are fractions of a row."""
    classes = len(coder.names)
    side = 2 + 0.4 * classes
    figure = Figure((side, side), layout="constrained")
    axes = figure.add_subplot(xlabel="output", ylabel="reference")
    axes.set_xticks(range(classes), coder.names, rotation=90, parse_math=False)
    axes.set_yticks(range(classes), coder.names, parse_math=False)
    shares_CC = _shares(counts_CC)
    axes.imshow(shares_CC, "Blues", vmin=0, vmax=1)
    for row, column in np.argwhere(counts_CC) if classes <= MOST_COUNTED else ():
        colour = "white" if shares_CC[row, column] > 0.5 else "black"
        axes.text(column, row, f"{counts_CC[row, column]}", ha="center", va="center", color=colour, fontsize=8)
    target = BytesIO()
    figure.savefig(target, format="png", dpi=100)
    return target.getvalue()


def confusions_of(groups: Groups) -> list[dict[str, Any]]:
    """Return the table of each group of runs of labels, summed over its runs with the same test set, with shades."""
    found = []
    for group in groups:
        data = read_data(group.runs[0].config.get("data"))
        lines = [line for own in common_test_set(group.runs).values() for line in own]
        if not lines or not isinstance(data, LabelsSettings) or not has_confusion(data.coder):
            continue
        counts_CC = count_confusions(data.coder, [one.output for one in lines], [one.reference for one in lines])
        columns = texts("reference") + numbers("{:,.0f}", *data.coder.names)
        rows = [[name, *counts] for name, counts in zip(data.coder.names, counts_CC.tolist(), strict=True)]
        shades = {(row, column + 1): float(share) for (row, column), share in np.ndenumerate(_shares(counts_CC))}
        found.append({"table": Table(group.label, columns, rows), "shades": shades})
    return found
