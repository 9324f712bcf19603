"""Charts and matrices as figures for papers (PDF and SVG), and line charts as SVGs for a page.

The same runs give the same bytes. Models differ in colour, dashes and markers.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tfm_blocks.errors import config_error
from tfm_blocks.report.charts import LineChart
from tfm_blocks.runs.files import write_bytes

WIDTH = 3.3  # inches of a column
PAGE = 6.9  # inches of a page with two columns
FEW = 4  # panels of a figure of a column's width
HEIGHT = {1: 2.0, 2: 1.6, 4: 1.4}  # inches of a panel, by columns of panels
HANDLE, LETTER = 0.45, 0.052  # inches of the line and of a letter in a legend
# Colours of Okabe and Ito (2008), which most colour-blind readers can distinguish; dashes and markers need no colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MARKED = 8  # most markers on a line of a paper
ALL_MARKED, MANY = 50, 16  # points up to which a page marks each; markers on a longer line
CHART, SAMPLE = (7.0, 4.1), (0.8, 0.2)  # inches of a chart of a page, and of a line in its legend
LIMIT_COLOUR = "#777777"  # of chance and the ceiling
INK, FAINT = "#000000", "#d4d4d4"  # replaced by colours of the page
UNDATED = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
STYLE: dict[Any, Any] = {
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.linewidth": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.minor.width": 0.4,
    "legend.frameon": False,
    "lines.linewidth": 1,
    "lines.markersize": 3,
    "text.parse_math": False,
    "pdf.fonttype": 42,  # embedded TrueType
    "svg.fonttype": "path",
    "svg.hashsalt": "tfm-blocks",
}
PAGE_STYLE: dict[Any, Any] = {
    "font.size": 13,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.linewidth": 1,
    "grid.color": FAINT,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "svg.fonttype": "none",
    "xtick.bottom": False,
    "ytick.left": False,
}


@contextmanager
def drawing_style(name: str = "") -> Iterator[None]:
    """Draw with the sizes and fonts of a paper, or of a page, in which `name` is unique."""
    changes = PAGE_STYLE | {"svg.hashsalt": name} if name else {}
    with matplotlib.rc_context(STYLE | changes), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name with a letter that the font lacks
        yield


def panel_columns(tasks: int) -> int:
    """Return the number of columns of panels."""
    return min(2, tasks) if tasks <= FEW else 4


def panels(tasks: int, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel of this height in inches for each task."""
    columns = panel_columns(tasks)
    rows = -(-tasks // columns)
    drawn = Figure(figsize=(WIDTH if tasks <= FEW else PAGE, rows * height), layout="constrained")
    axes = list(drawn.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[tasks:]:
        unused.remove()
    return drawn, axes[:tasks]


def draw_lines(charts: Sequence[LineChart]) -> Figure:
    """Draw charts that differ in their tasks, for a paper."""
    labels = list(dict.fromkeys(line.label for chart in charts for line in chart.lines))
    columns = panel_columns(len(charts))
    drawn, axes = panels(len(charts), HEIGHT[columns])
    handles: dict[str, Artist] = {}
    for panel, chart in zip(axes, charts, strict=True):
        artists = _draw_panel(panel, chart, chart.axes[0], labels, few=MARKED, many=MARKED)
        handles |= {label: line for label, (line, *_) in artists.items()}
        if len(charts) > 1:
            panel.set_title(chart.task)
    for panel in axes[-columns:]:
        panel.set_xlabel(charts[0].axes[0])
    drawn.supylabel(charts[0].unit, fontsize=7)
    if len(labels) > 1:
        # matplotlib hides labels that begin with an underscore
        shown = [f" {label}" if label.startswith("_") else label for label in labels]
        fitting = int(drawn.get_figwidth() / (HANDLE + LETTER * max(map(len, shown))))
        options: dict[str, Any] = {"loc": "outside lower center", "ncols": max(1, min(fitting, len(labels)))}
        drawn.legend([handles[label] for label in labels], shown, handlelength=3, **options)
    return drawn


def chart_svg(chart: LineChart, axis: str, labels: Sequence[str], name: str) -> Markup:
    """Return a chart over an axis for a page, in which `name` is unique.

    The groups of a model have a class with its number in `labels`, and its markers have tooltips.
    """
    with drawing_style(name):
        drawn = Figure(CHART, frameon=False, layout="constrained")
        panel = drawn.subplots()
        panel.patch.set_visible(False)
        panel.set_xlabel(axis)
        for label, artists in _draw_panel(panel, chart, axis, labels, few=ALL_MARKED, many=MANY).items():
            for kind, artist in zip(("line", "band"), artists, strict=False):
                artist.set_gid(f"model-{labels.index(label)} {kind}")
        root = _page_svg(drawn)
    root.attrib |= {"role": "img", "aria-label": f"{chart.title} over {axis}"}
    for line in chart.lines:
        group = root.find(f".//g[@class='model-{labels.index(line.label)} line']")
        markers = [] if group is None else list(group.iter("use"))
        texts = []
        columns = np.stack([line.x[axis], line.mean, line.low, line.high])
        for x, mean, low, high in columns[:, _marked(len(line.mean), ALL_MARKED, MANY)].T:
            if np.isfinite(x) and np.isfinite(mean):
                spread = f"\nseeds from {low:.5g} to {high:.5g}" if high > low else ""
                place = f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"
                texts.append(f"{line.label}\n{axis} {place}\n{chart.unit} {mean:.5g}{spread}")
        for marker, tip in zip(markers, texts, strict=True):
            ElementTree.SubElement(marker, "title").text = tip
    return Markup(ElementTree.tostring(root, "unicode"))


def figure_svg(draw: Callable[[], Figure], name: str, label: str) -> Markup:
    """Return a figure for a page, in which `name` is unique; `label` describes it to readers who do not see it."""
    with drawing_style(name):
        drawn = draw()
        drawn.set_size_inches(CHART)
        root = _page_svg(drawn)
    root.attrib |= {"role": "img", "aria-label": label}
    return Markup(ElementTree.tostring(root, "unicode"))


def legend_svg(number: int) -> Markup:
    """Return the line of a model in the legend of a page."""
    with drawing_style(f"legend {number}"):
        drawn = Figure(SAMPLE, frameon=False)
        drawn.add_artist(Line2D([0.05, 0.5, 0.95], [0.5] * 3, markevery=[1], **line_style(number)))
        root = _page_svg(drawn)
    root.attrib |= {"width": root.attrib["viewBox"].split()[2], "aria-hidden": "true"}
    return Markup(ElementTree.tostring(root, "unicode"))


def _draw_panel(
    panel: Axes, chart: LineChart, axis: str, labels: Sequence[str], *, few: int, many: int
) -> dict[str, list[Artist]]:
    """Draw a chart over an axis. Return the line of each model, and its band if its seeds differ.

    Up to `few` points of a line are all marked, and `many` points of a longer line.
    """
    artists: dict[str, list[Artist]] = {}
    for line in chart.lines:
        style = line_style(labels.index(line.label))
        x = line.x[axis]
        artists[line.label] = list(panel.plot(x, line.mean, markevery=_marked(len(x), few, many), **style))
        if (line.high > line.low).any():
            options: dict[str, Any] = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
            artists[line.label].append(panel.fill_between(x, line.low, line.high, **options))
    for limit in chart.limits:
        panel.axhline(limit, color=FAINT if few == ALL_MARKED else LIMIT_COLOUR, linestyle=":", linewidth=0.6, zorder=0)
    if chart.limits:  # an axis of a part of the possible values would magnify noise
        low, high = panel.get_ylim()
        panel.set_ylim(min(low, -0.04), max(high, 1.04))
    if chart.log_x:
        rates = sorted({float(x) for line in chart.lines for x in line.x[axis]})
        panel.set_xscale("log")
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.minorticks_off()
    return artists


def line_style(number: int) -> dict[str, Any]:
    """Return the style of a model, distinct for up to 56 models."""
    choices = {"color": COLOURS, "linestyle": DASHES, "marker": MARKERS}
    return {name: values[number % len(values)] for name, values in choices.items()}


def _marked(points: int, few: int, many: int) -> list[int]:
    """Return the points of a line that are marked: all of few, or evenly spaced ones that include both ends."""
    return list(range(points)) if points <= few else [round(place) for place in np.linspace(0, points - 1, many)]


def _page_svg(drawn: Figure) -> ElementTree.Element:
    """Return the SVG of a figure in the font and colours of its page: short, and with no styles for other elements."""
    drawn.savefig(file := BytesIO(), format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue().decode().replace("xlink:href", "href").replace('xmlns="http://www.w3.org/2000/svg"', "")
    root = ElementTree.fromstring(text)
    root.remove(root[0])  # a style of all elements
    root.attrib = {"viewBox": root.attrib["viewBox"], "fill": "var(--ink)"}
    referenced = set(re.findall(r"#(\w+)", text))
    for element in root.iter():
        element.text, element.tail = (element.text or "").strip(), None
        attributes = {name: _short(name, value) for name, value in element.items()}
        if attributes.get("id", "").startswith("model-"):
            attributes["class"] = attributes.pop("id")
        elif attributes.get("id") not in referenced:
            attributes.pop("id", None)
        element.attrib = {name: value for name, value in attributes.items() if value}
    _flatten(root)
    return root


def _short(name: str, value: str) -> str:
    if name == "style":
        value = re.sub(r"font-(size|family): [^;]*(; )?|stroke-dashoffset: 0; ", "", value)
        return value.replace(INK, "var(--ink)").replace(FAINT, "var(--line)").replace("; ", ";").replace(": ", ":")
    if name in ("id", "href", "clip-path", "class"):
        return value
    rounded = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), value)
    return "" if rounded.startswith("rotate(-0 ") else " ".join(rounded.split())


def _flatten(element: ElementTree.Element) -> None:
    """Remove groups without attributes, and move the style that all elements of a group share to the group."""
    children = []
    for child in element:
        _flatten(child)
        children += list(child) if child.tag == "g" and not child.attrib else [child]
    element[:] = children
    styles = {child.get("style", "") for child in children}
    if element.tag == "g" and element.attrib and len(styles) == 1 and (shared := styles.pop()):
        element.set("style", shared)
        for child in children:
            del child.attrib["style"]


def save_drawings(drawings: Sequence[tuple[str, Figure]], folder: Path) -> list[Path]:
    """Write figures by name, as PDF and SVG, into a folder, which is made if it does not exist. Return the paths."""
    if folder.exists() and not folder.is_dir():
        raise config_error("--figures", f"must be a folder, but is a file: {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for name, drawn in drawings:
        for suffix in UNDATED:
            paths.append(folder / f"{name}{suffix}")
            save_figure(drawn, paths[-1])
    return paths


def save_figure(drawn: Figure, path: Path, **options: Any) -> None:
    """Write a figure in the format of the file's suffix, without a date."""
    drawn.savefig(content := BytesIO(), format=path.suffix[1:], metadata=UNDATED.get(path.suffix, {}), **options)
    write_bytes(path, content.getvalue())
