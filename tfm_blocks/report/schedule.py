"""`tfm show --schedule`: the learning rate of each group of weights over a run, as a table, as JSON and as a figure."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from tfm_blocks.report.drawing import COLOURS, DASHES, PAGE, UNDATED, drawing_style
from tfm_blocks.report.screen import print_table, screen
from tfm_blocks.report.table import Column, Table, Value, texts
from tfm_blocks.runs.files import write_bytes

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60  # characters of the curve in the terminal


@dataclass(frozen=True)
class GroupRates:
    """The optimizer of a group, "frozen" without one, and the least and the largest factor of its learning rate."""

    group: str
    optimizer: str
    factors: tuple[float, float]


@dataclass(frozen=True)
class RunRates:
    """The learning rates of a schedule at some steps, and the groups of weights, which multiply them."""

    name: str
    steps: npt.NDArray[np.int64]
    rates: npt.NDArray[np.float64]
    groups: list[GroupRates]
    followers: dict[str, float]  # at a rate of 0: the momentum, and the factor of the weight decay


def show_rates(run: RunRates, title: str) -> None:
    """Print a row for each group, and the curve of the schedule."""
    columns = [
        *texts("group", "optimizer", "factor"),
        *(Column(name, "{}") for name in ("step 1", "largest", "last step")),
    ]
    rows: list[list[Value]] = []
    for group in run.groups:
        spans = [_span(group, rate) for rate in (1.0, run.rates[0], run.rates.max(), run.rates[-1])]
        rows.append([group.group, group.optimizer, *(spans if any(group.factors) else [""] * 4)])
    print_table(Table(f"learning rates of {title}", columns, rows))
    sampled = np.interp(np.linspace(1, run.steps[-1], WIDTH), run.steps, run.rates)
    bars = (sampled / run.rates.max() * (len(BARS) - 1)).round().astype(int)
    screen().print(f"{run.name}, steps 1 to {run.steps[-1]:,}: " + "".join(BARS[bar] for bar in bars))
    for name, low in run.followers.items():
        values = f"{low:g} at a rate of 0" if name == "momentum" else f"× {low:g} at a rate of 0"
        screen().print(f"{name.replace('_', ' ')} follows the rate: {values}, the optimizer's at the peak")


def _span(group: GroupRates, rate: float) -> str:
    return " to ".join(dict.fromkeys(f"{factor * rate:.3g}" for factor in group.factors))


def rate_records(run: RunRates) -> dict[str, object]:
    """Return the rates for JSON."""
    groups = [{"group": one.group, "optimizer": one.optimizer, "factors": list(one.factors)} for one in run.groups]
    return {
        "schedule": run.name,
        "steps": run.steps.tolist(),
        "rates": run.rates.tolist(),
        "groups": groups,
        **run.followers,
    }


def draw_rates(run: RunRates, title: str, path: Path) -> None:
    """Draw a line for each group that trains, or a band if its weights have several factors."""
    with drawing_style():
        drawn = Figure(figsize=(PAGE, 2.4), layout="constrained")
        axes = drawn.subplots()
        trained = [group for group in run.groups if any(group.factors)]
        for number, group in enumerate(trained):
            least, most = (factor * run.rates for factor in group.factors)
            colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
            axes.plot(run.steps, most, label=f"{group.group}: {group.optimizer}", color=colour, linestyle=dash)
            axes.fill_between(run.steps, least, most, color=colour, alpha=0.2)
        axes.set_xlabel("step")
        axes.set_ylabel("learning rate")
        axes.set_title(f"{title}, {run.name}")
        axes.legend()
        content = BytesIO()
        drawn.savefig(content, format=path.suffix[1:], metadata=UNDATED.get(path.suffix, {}), dpi=200)
    write_bytes(path, content.getvalue())
