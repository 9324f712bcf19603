"""IsoFLOP profiles: the loss over the size of a model at equal compute, as a figure.

They are approach 2 of Hoffmann et al. (2022), without its fit of the minima. No loss is interpolated: a profile needs
sizes that were trained with the same compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter

from tfm_blocks.report.drawing import HEIGHT, line_style, panel_columns, panels
from tfm_blocks.report.scaling import Ladder
from tfm_blocks.scoring.scaling_law import ALIKE, LadderFit, LadderPoint, rungs

FEWEST = 3  # sizes that determine a parabola
MOST_TICKS = 3  # sizes below a panel
Rung = Sequence[LadderPoint]  # the runs of one size and length


def find_profiles(fit: LadderFit) -> dict[str, list[list[Rung]]]:
    """Return the profiles of each model that has any, by ascending compute.

    A profile has the rungs whose computes, 6 N D, agree within 2 % (`ALIKE`), if they have at least FEWEST sizes.
    """
    profiles: dict[str, list[list[Rung]]] = {}
    for model in fit.models:
        own, start = _rungs_by_compute(fit, model), 0
        while start < len(own):
            level = [rung for rung in own[start:] if _compute(rung) < ALIKE * _compute(own[start])]
            is_profile = len({_size(rung) for rung in level}) >= FEWEST
            if is_profile:
                profiles.setdefault(model, []).append(level)
            start += len(level) if is_profile else 1
    return profiles


def _rungs_by_compute(fit: LadderFit, model: str) -> list[Rung]:
    return sorted(rungs(point for point in fit.points if point.model == model), key=_compute)


def _compute(rung: Rung) -> float:
    return fmean(point.compute for point in rung)


def _size(rung: Rung) -> float:
    """Return log N; sizes are equal to the law if these are equal."""
    return round(math.log(rung[0].parameters), 2)


def profile_notes(fit: LadderFit) -> Iterator[str]:
    """Yield for each model without a profile the numbers of tokens that would give it one."""
    profiles = find_profiles(fit)
    for model in fit.models:
        if model not in profiles:
            compute, lengths = _missing_lengths(_rungs_by_compute(fit, model))
            runs = " and ".join(
                f"{parameters:,.0f} parameters for {tokens:,.0f} tokens" for parameters, tokens in lengths
            )
            yield (
                f"no IsoFLOP profile of {model}, because fewer than {FEWEST} of its sizes reach the same compute "
                f"within {100 * (ALIKE - 1):.0f} %; for a profile at {compute:.2g} operations, also train {runs}"
            )


def _missing_lengths(own: Sequence[Rung]) -> tuple[float, list[tuple[float, float]]]:
    """Return a compute, and the parameters and tokens of runs that would complete a profile at it.

    The profile has FEWEST neighbouring sizes and the compute of a run. It needs the fewest further runs. Of several
    such profiles, it is one whose runs are not shorter than all others, in tokens per parameter, and the cheapest.
    """
    sizes = sorted({_size(rung): rung[0].parameters for rung in own}.items())
    shortest = min(point.tokens / point.parameters for rung in own for point in rung)
    choices = []
    for compute in map(_compute, own):
        reached = {_size(rung) for rung in own if compute <= _compute(rung) < ALIKE * compute}
        for start in range(len(sizes) - FEWEST + 1):
            needed = sizes[start : start + FEWEST]
            missing = [(size, compute / 6 / size) for logarithm, size in needed if logarithm not in reached]
            is_short = any(ALIKE * tokens / size < shortest for size, tokens in missing)
            choices.append((len(missing), is_short, compute, missing))
    *_, compute, missing = min(choices)
    return compute, missing


def draw_isoflops(ladder: Ladder) -> Figure:
    """Draw the results of each profile over the size, and the parabola in log N that fits them; a panel per model.

    The parabola ends at the smallest and the largest size. At least one model has a profile.
    """
    profiles = find_profiles(ladder.fit)
    drawn, axes = panels(len(profiles), HEIGHT[panel_columns(len(profiles))])
    for panel in axes[1:]:
        panel.sharey(axes[0])
    for panel, (model, levels) in zip(axes, profiles.items(), strict=True):
        _draw_panel(panel, levels)
        panel.set_title(model)
    drawn.supxlabel("parameters without embeddings", fontsize=7)
    drawn.supylabel(ladder.axis_label, fontsize=7)
    return drawn


def _draw_panel(panel: Axes, levels: Sequence[Sequence[Rung]]) -> None:
    for number, level in enumerate(levels):
        style = line_style(number)
        marker = style.pop("marker")
        points = [point for rung in level for point in rung]
        sizes, losses = [point.parameters for point in points], [point.loss for point in points]
        parabola = np.polynomial.Polynomial.fit(np.log(sizes), losses, 2)
        curve = np.geomspace(min(sizes), max(sizes), 60)
        panel.scatter(sizes, losses, s=6, color=style["color"], marker=marker)
        panel.plot(curve, parabola(np.log(curve)), label=f"{fmean(map(_compute, level)):.2g}", **style)
    panel.legend(title="operations, 6 N D")
    shown = sorted({rung[0].parameters for level in levels for rung in level})
    panel.set_xscale("log")
    panel.minorticks_off()
    panel.set_xticks(shown[:: -(-len(shown) // MOST_TICKS)])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: EngFormatter(sep="")(float(f"{size:.2g}"))))
