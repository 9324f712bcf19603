"""Picture → PNG or PDF, by matplotlib."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Polygon

from tfm_blocks.figures.marks import sign_of
from tfm_blocks.figures.picture import FigurePicture, PlacedArrow, PlacedBox, PlacedPlate, Text
from tfm_blocks.figures.sizes import WAVE
from tfm_blocks.figures.themes import Mark, Theme
from tfm_blocks.runs.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCH = 72.0
DPI = 200
ALIGN = {"start": "left", "middle": "center", "end": "right"}
PLATES, ARROWS, BOXES = 1, 2, 3  # from the back to the front


def write_raster(path: Path, picture: FigurePicture, theme: Theme, *, scale: float = 1.0) -> None:
    """Write a picture to a .png or .pdf file, without the time and the versions that would change its bytes."""
    truetype = 42  # which journals accept
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "pdf.fonttype": truetype}):
        figure = Figure(
            figsize=(picture.width * scale / INCH, picture.height * scale / INCH), facecolor=theme.background
        )
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, picture.width), ylim=(picture.height, 0))
        axes.axis("off")
        painter = _Painter(axes, theme, scale)
        painter.paint(picture)
        none = (
            {"CreationDate": None, "Creator": None, "Producer": None} if path.suffix == ".pdf" else {"Software": None}
        )
        figure.savefig(content := BytesIO(), format=path.suffix[1:], dpi=DPI, metadata=none)
    write_bytes(path, content.getvalue())


class _Painter:
    """Paint on axes whose unit is a point."""

    def __init__(self, axes: Axes, theme: Theme, scale: float) -> None:
        self.axes = axes
        self.theme = theme
        self.scale = scale

    def paint(self, picture: FigurePicture) -> None:
        for plate in picture.plates:
            self._plate(plate)
        for arrow in picture.arrows:
            self._arrow(arrow)
        for box in picture.boxes:
            self._box(box)

    def _plate(self, plate: PlacedPlate) -> None:
        if plate.frame.plate:
            self._rectangle(plate, 8, self.theme.plate, PLATES)
        for text in plate.texts:
            self._text(text, self.theme.ink)

    def _box(self, placed: PlacedBox) -> None:
        if placed.box.glyph == "box":
            self._rectangle(placed, 3, self.theme.fill(placed.box.kind), BOXES)
        elif placed.box.glyph != "text":
            self._plus(placed)
        for text in placed.texts:
            self._text(text, self.theme.faint if text.size < 9 else self.theme.ink)
        if placed.mark:
            self._text(sign_of(placed, placed.mark), self.theme.marks[placed.mark])

    def _stroke(self, mark: Mark | None) -> tuple[str, float, str]:
        """Return the colour, the width and the style of a border."""
        colour = self.theme.marks[mark] if mark else self.theme.ink
        return colour, (2 if mark else 0.8) * self.scale, "--" if mark == "removed" else "-"

    def _rectangle(self, placed: PlacedBox | PlacedPlate, radius: float, fill: str, layer: int) -> None:
        colour, width, style = self._stroke(placed.mark)
        box = f"round,pad=0,rounding_size={radius}"
        patch = FancyBboxPatch((placed.x, placed.y), placed.width, placed.height, boxstyle=box, zorder=layer)
        patch.set(facecolor=fill, edgecolor=colour, linewidth=width, linestyle=style)
        self.axes.add_patch(patch)

    def _plus(self, placed: PlacedBox) -> None:
        """Paint a circled plus, and the circled wave beside it."""
        colour, width, style = self._stroke(placed.mark)
        options = {"edgecolor": colour, "facecolor": self.theme.background, "linewidth": width, "linestyle": style}
        radius = placed.width / 2
        x, y = placed.x + radius, placed.y + radius
        self.axes.add_patch(Circle((x, y), radius, zorder=BOXES, **options))
        self.axes.plot([x - 4, x + 4], [y, y], color=colour, linewidth=width, zorder=BOXES)
        self.axes.plot([x, x], [y - 4, y + 4], color=colour, linewidth=width, zorder=BOXES)
        if placed.wave:
            far, y = placed.wave
            sign = -1 if far < x else 1
            self.axes.plot([far - sign * WAVE, x + sign * radius], [y, y], color=colour, linewidth=width, zorder=BOXES)
            self.axes.add_patch(Circle((far, y), WAVE, zorder=BOXES, **options))
            wave = [(far + WAVE * step / 10, y - 5.5 * _bow(step / 10)) for step in range(-10, 11)]
            self.axes.plot(*zip(*wave, strict=True), color=colour, linewidth=width, zorder=BOXES)

    def _arrow(self, placed: PlacedArrow) -> None:
        ink = self.theme.ink
        points = placed.points
        self.axes.plot(
            *zip(*points, strict=True), color=ink, linewidth=0.9 * self.scale, zorder=ARROWS, solid_joinstyle="miter"
        )
        if placed.head:
            (x, y), (tip_x, tip_y) = points[-2:]
            far = abs(tip_x - x) + abs(tip_y - y)
            along, across = ((tip_x - x) / far, (tip_y - y) / far), ((tip_y - y) / far, (tip_x - x) / far)
            corners = [(5.4, 2.7), (4.05, 0.0), (5.4, -2.7)]
            head = [(tip_x, tip_y)] + [
                (tip_x - back * along[0] + out * across[0], tip_y - back * along[1] + out * across[1])
                for back, out in corners
            ]
            self.axes.add_patch(Polygon(head, closed=True, facecolor=ink, linewidth=0, zorder=ARROWS))

    def _text(self, text: Text, colour: str) -> None:
        self.axes.text(
            text.x, text.y, text.text, size=text.size * self.scale, color=colour, ha=ALIGN[text.align], va="baseline",
            parse_math=False, zorder=BOXES,
        )  # fmt: skip


def _bow(step: float) -> float:
    """Return a wave from -1 to 1, upwards first."""
    return (-1 if step > 0 else 1) * 4 * abs(step) * (1 - abs(step))
