"""Primitives → PNG or PDF, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib import patches
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tfm_blocks.figures.drawing import Arrow, FigurePicture, Frame, Point, Text
from tfm_blocks.figures.figure import Circle, Path, Pen, Primitive, Rect, Style, primitives_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCH = 72.0
DPI = 200
ALIGN = {"start": "left", "middle": "center", "end": "right"}
PLATES, ARROWS, BOXES = 1, 2, 3  # from the back to the front


def raster_of(picture: FigurePicture, style: Style, suffix: str) -> bytes:
    """Return a .png or .pdf file, without the time and the versions that would change its bytes."""
    truetype = 42  # which journals accept
    width, height = (length * style.scale / INCH for length in (picture.width, picture.height))
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "pdf.fonttype": truetype}):
        figure = Figure(figsize=(width, height), facecolor=style.theme.background)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, picture.width), ylim=(picture.height, 0))  # the unit is a point
        axes.axis("off")
        for item, primitives in primitives_of(picture, style.theme):
            layer = ARROWS if item is None else PLATES if isinstance(item, Frame) else BOXES
            for primitive in primitives:
                _paint(axes, primitive, style, layer)
        unnamed = {"CreationDate": None, "Creator": None, "Producer": None} if suffix == ".pdf" else {"Software": None}
        figure.savefig(content := BytesIO(), format=suffix[1:], dpi=DPI, metadata=unnamed)
    return content.getvalue()


def _paint(axes: Axes, primitive: Primitive, style: Style, layer: int) -> None:
    def outline(pen: Pen) -> dict[str, Any]:
        line = {"linewidth": pen.width * style.scale, "linestyle": "--" if pen.dashed else "-"}
        return {"facecolor": pen.fill, "edgecolor": pen.colour, "zorder": layer, **line}

    ink = style.theme.ink
    match primitive:
        case Rect(item, radius, Pen() as pen):
            form = f"round,pad=0,rounding_size={radius}"
            box = (item.x, item.y), item.width, item.height
            axes.add_patch(patches.FancyBboxPatch(*box, boxstyle=form, **outline(pen)))
        case Circle(x, y, radius, pen):
            axes.add_patch(patches.Circle((x, y), radius, **outline(pen)))
        case Path(strokes, pen):
            for points in strokes:
                x_y = zip(*(points if len(points) == 2 else _curve(points)), strict=True)
                axes.plot(*x_y, color=pen.colour, linewidth=pen.width * style.scale, zorder=layer)
        case Arrow(points=points, head=head):
            line: dict[str, Any] = {"color": ink, "linewidth": 0.9 * style.scale, "solid_joinstyle": "miter"}
            axes.plot(*zip(*points, strict=True), zorder=layer, **line)
            if head:
                tip = _tip(*points[-2:])
                axes.add_patch(patches.Polygon(tip, closed=True, facecolor=ink, linewidth=0, zorder=layer))
        case Text(text, x, y, size, align, colour):
            axes.text(
                x, y, text, size=size * style.scale, color=colour or ink, ha=ALIGN[align], va="baseline",
                parse_math=False, zorder=BOXES,
            )  # fmt: skip


def _curve(points: Sequence[Point]) -> list[Point]:
    """Return points on the two quadratic curves of a wave."""
    (first, _), (_, high), (middle, y), *_ = points
    curve = []
    for step in (number / 10 for number in range(-10, 11)):
        bow = (1 if step > 0 else -1) * 4 * abs(step) * (1 - abs(step))  # from -1 to 1, upwards first
        curve.append((middle + (middle - first) * step, y + (y - high) * bow / 2))
    return curve


def _tip(start: Point, end: Point) -> list[Point]:
    """Return the corners of an arrow's head."""
    (x, y), (tip_x, tip_y) = start, end
    far = abs(tip_x - x) + abs(tip_y - y)
    along_x, along_y = (tip_x - x) / far, (tip_y - y) / far
    corners = [(0, 0), (5.4, 2.7), (4.05, 0.0), (5.4, -2.7)]
    return [(tip_x - back * along_x + out * along_y, tip_y - back * along_y + out * along_x) for back, out in corners]
