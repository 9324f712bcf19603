"""`tfm coordinates`: the growth of each node's output with the width, as a table, as JSON and as a figure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from tfm_blocks.report.drawing import COLOURS, DASHES, MARKERS, PAGE, UNDATED, drawing_style
from tfm_blocks.report.screen import print_table, screen
from tfm_blocks.report.table import Column, Table, Value, texts
from tfm_blocks.runs.files import write_bytes

FIRST_STEP = 2  # from which a slope counts: before, the random initial values decide
TOLERANCE = 0.1
FALL = -0.5  # the slope of the logits of random weights
VERDICTS = {
    "flat": f"the mean slope from step {FIRST_STEP} on is within ±{TOLERANCE}",
    "falls": "the logits fall at most as those of random weights, as width^-0.5, which is no fault",
    "grows": f"the mean slope exceeds {TOLERANCE}",
    "vanishes": f"the mean slope is below -{TOLERANCE}",
    "not finite": "the output overflows",
}


@dataclass(frozen=True)
class NodeSizes:
    """Mean |x| of a node's output: sizes_WT for each width and step, averaged over seeds. `head`: these are logits."""

    node: str
    widths: Sequence[int]
    sizes_WT: npt.NDArray[np.float64]
    head: bool = False

    @cached_property
    def slopes(self) -> list[float]:
        """The slope of log mean |x| on log width at each step; NaN if a mean is not finite; 0 if all are 0."""
        return [*map(self._slope, self.sizes_WT.T)]

    def _slope(self, sizes_W: npt.NDArray[np.float64]) -> float:
        if not np.isfinite(sizes_W).all():
            return math.nan
        if not sizes_W.any():
            return 0.0
        slope, _ = np.polyfit(np.log(self.widths), np.log(np.maximum(sizes_W, np.finfo(np.float64).tiny)), 1)
        return float(slope)

    @property
    def slope(self) -> float:
        """Return the mean slope from FIRST_STEP on, which the verdict judges."""
        return float(np.mean(self.slopes[FIRST_STEP:]))

    @property
    def verdict(self) -> str:
        if math.isnan(self.slope):
            return "not finite"
        if abs(self.slope) <= TOLERANCE:
            return "flat"
        if self.slope > 0:
            return "grows"
        return "falls" if self.head and self.slope >= FALL - TOLERANCE else "vanishes"

    @property
    def passes(self) -> bool:
        return self.verdict in ("flat", "falls")


def node_sizes(
    measured: Mapping[int, Sequence[Mapping[str, Sequence[float]]]], logits: Collection[str]
) -> Iterator[NodeSizes]:
    """Yield the sizes of each node from the measurements of each width, one for each seed; `logits` name logits."""
    first = next(iter(measured.values()))[0]
    for node in first:
        means = [np.mean([seed[node] for seed in seeds], 0) for seeds in measured.values()]
        yield NodeSizes(node, list(measured), np.array(means, np.float64), head=node in logits)


def show_coordinates(nodes: Sequence[NodeSizes], title: str, knob: str) -> None:
    """Print a row for each node: its mean at each width after the last step, two slopes, and the verdict."""
    widths = nodes[0].widths
    columns = [*texts("node"), *(Column(f"{knob}={width}", "{:.3g}") for width in widths)]
    columns += [Column(name, "{:+.2f}") for name in ("slope at first", "slope")] + texts("verdict")
    rows: list[list[Value]] = [
        [node.node, *map(float, node.sizes_WT[:, -1]), node.slopes[0], node.slope, node.verdict] for node in nodes
    ]
    print_table(
        Table(f"mean |x| of {title} after {len(nodes[0].slopes) - 1} steps, and its growth with {knob}", columns, rows)
    )
    counts = {verdict: sum(node.verdict == verdict for node in nodes) for verdict in VERDICTS}
    for verdict, count in counts.items():
        if count:
            screen().print(f"{count} {verdict}: {VERDICTS[verdict]}")


def coordinate_records(nodes: Sequence[NodeSizes]) -> list[dict[str, object]]:
    """Return the measurements for JSON."""
    return [
        {
            "node": node.node,
            "sizes": {str(width): sizes.tolist() for width, sizes in zip(node.widths, node.sizes_WT, strict=True)},
            "slopes": node.slopes,
            "slope": node.slope,
            "verdict": node.verdict,
        }
        for node in nodes
    ]


def draw_coordinates(nodes: Sequence[NodeSizes], title: str, knob: str, path: Path) -> None:
    """Draw mean |x| over the widths: a panel for the first step, for step 2 and for the last, a line for each node."""
    last = len(nodes[0].slopes) - 1
    steps = sorted({0, FIRST_STEP, last})
    with drawing_style():
        drawn = Figure(figsize=(PAGE, 2.4), layout="constrained")
        axes = drawn.subplots(1, len(steps), sharey=True, squeeze=False)[0]
        marked = [node for node in nodes if node.verdict != "flat"]
        for panel, step in zip(axes, steps, strict=True):
            for node in nodes:
                panel.plot(node.widths, node.sizes_WT[:, step], **_style(node, marked))
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.set_xticks(nodes[0].widths, [str(width) for width in nodes[0].widths])
            panel.minorticks_off()
            panel.set_xlabel(knob)
            panel.set_title(f"step {step}")
        axes[0].set_ylabel("mean |x|")
        axes[0].yaxis.set_major_formatter("{x:g}")
        drawn.suptitle(title, fontsize=7)
        if marked:
            lines = [line for line, node in zip(axes[0].lines, nodes, strict=True) if node in marked]
            labels = [f"{node.node} ({node.verdict})" for node in marked]
            drawn.legend(loc="outside right upper", handles=lines, labels=labels)
        content = BytesIO()
        drawn.savefig(content, format=path.suffix[1:], metadata=UNDATED.get(path.suffix, {}), dpi=200)
    write_bytes(path, content.getvalue())


def _style(node: NodeSizes, marked: Sequence[NodeSizes]) -> dict[str, Any]:
    """Return the style of a node's line: grey if it is flat."""
    if node not in marked:
        return {"color": "#999999", "linewidth": 0.6, "marker": "o", "markersize": 1.5}
    number = marked.index(node)
    style = {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)]}
    return style | {"marker": MARKERS[number % len(MARKERS)]}
