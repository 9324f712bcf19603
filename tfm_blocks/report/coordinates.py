"""Measurements as tables, JSON and figures: how outputs grow with the width, and the learning rates of a schedule.

They belong to `tfm coordinates` and `tfm show --schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from tfm_blocks.errors import counted
from tfm_blocks.report.drawing import PAGE, drawing_style, line_style, save_figure
from tfm_blocks.report.screen import print_table, screen
from tfm_blocks.report.table import Rows, Table, numbers, texts

BARS = "▁▂▃▄▅▆▇█"
CURVE = 60  # characters of the curve in the terminal
FIRST_STEP = 2  # from which a slope counts: before, the random initial values decide
TOLERANCE = 0.1
FLAT: dict[str, Any] = {"color": "#999999", "linewidth": 0.6, "marker": "o", "markersize": 1.5}  # style of a line
FALL = -0.5  # the slope of the logits of random weights
VERDICTS = {
    "flat": f"the mean slope from step {FIRST_STEP} on is within ±{TOLERANCE}",
    "falls": "the logits fall at most as width^-0.5, like the logits of random weights, which is not a fault",
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
        slopes = []
        for sizes_W in self.sizes_WT.T:
            logs_W = np.log(np.maximum(sizes_W, np.finfo(np.float64).tiny))
            finite = np.isfinite(sizes_W).all()
            slope = np.polyfit(np.log(self.widths), logs_W, 1)[0] if finite and sizes_W.any() else 0.0
            slopes.append(float(slope) if finite else math.nan)
        return slopes

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
    for node in next(iter(measured.values()))[0]:
        means = [np.mean([seed[node] for seed in seeds], 0) for seeds in measured.values()]
        yield NodeSizes(node, list(measured), np.array(means, np.float64), head=node in logits)


def show_coordinates(nodes: Sequence[NodeSizes], title: str, knob: str) -> None:
    """Print a row for each node: its mean at each width after the last step, two slopes, and the verdict."""
    columns = texts("node") + numbers("{:.3g}", *(f"{knob}={width}" for width in nodes[0].widths))
    columns += numbers("{:+.2f}", "slope at first", "slope") + texts("verdict")
    rows: Rows = [
        [node.node, *map(float, node.sizes_WT[:, -1]), node.slopes[0], node.slope, node.verdict] for node in nodes
    ]
    steps = len(nodes[0].slopes) - 1
    print_table(Table(f"mean |x| of {title} after {counted(steps, 'step')}, and its growth with {knob}", columns, rows))
    for verdict, reason in VERDICTS.items():
        if count := sum(node.verdict == verdict for node in nodes):
            screen().print(f"{count} {verdict}: {reason}")


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
                style = line_style(marked.index(node)) if node in marked else FLAT
                panel.plot(node.widths, node.sizes_WT[:, step], **style)
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
        save_figure(drawn, path, dpi=200)


@dataclass(frozen=True)
class RunRates:
    """The learning rates of a schedule at some steps, and the groups of weights, which multiply them.

    `groups` has for the name and the optimizer of a group, "frozen" without one, the least and the largest factor.
    """

    name: str
    steps: npt.NDArray[np.int64]
    rates: npt.NDArray[np.float64]
    groups: dict[tuple[str, str], tuple[float, float]]
    followers: dict[str, float]  # at a rate of 0: the momentum, and the factor of the weight decay


def show_rates(run: RunRates, title: str) -> None:
    """Print a row for each group, and the curve of the schedule."""
    columns = texts("group", "optimizer", "factor") + numbers("{}", "step 1", "largest", "last step")
    rows: Rows = []
    for group, factors in run.groups.items():
        rates = (1.0, run.rates[0], run.rates.max(), run.rates[-1])
        spans = [" to ".join(dict.fromkeys(f"{factor * rate:.3g}" for factor in factors)) for rate in rates]
        rows.append([*group, *(spans if any(factors) else [""] * 4)])
    print_table(Table(f"learning rates of {title}", columns, rows))
    sampled = np.interp(np.linspace(1, run.steps[-1], CURVE), run.steps, run.rates)
    bars = (sampled / run.rates.max() * (len(BARS) - 1)).round().astype(int)
    screen().print(f"{run.name}, steps 1 to {run.steps[-1]:,}: " + "".join(BARS[bar] for bar in bars))
    for name, low in run.followers.items():
        values = f"{low:g} at a rate of 0" if name == "momentum" else f"× {low:g} at a rate of 0"
        screen().print(f"{name.replace('_', ' ')} follows the rate: {values}, the optimizer's at the peak")


def rate_records(run: RunRates) -> dict[str, object]:
    """Return the rates for JSON."""
    groups = [{"group": group, "optimizer": name, "factors": list(own)} for (group, name), own in run.groups.items()]
    rates = {"steps": run.steps.tolist(), "rates": run.rates.tolist(), "groups": groups}
    return {"schedule": run.name, **rates, **run.followers}


def draw_rates(run: RunRates, title: str, path: Path) -> None:
    """Draw a line for each group that trains, or a band if its weights have several factors."""
    with drawing_style():
        drawn = Figure(figsize=(PAGE, 2.4), layout="constrained")
        axes = drawn.subplots()
        trained = [(group, factors) for group, factors in run.groups.items() if any(factors)]
        for number, (group, factors) in enumerate(trained):
            least, most = (factor * run.rates for factor in factors)
            style = line_style(number) | {"marker": ""}
            axes.plot(run.steps, most, label=": ".join(group), **style)
            axes.fill_between(run.steps, least, most, color=style["color"], alpha=0.2)
        axes.set_xlabel("step")
        axes.set_ylabel("learning rate")
        axes.set_title(f"{title}, {run.name}")
        axes.legend()
        save_figure(drawn, path, dpi=200)
