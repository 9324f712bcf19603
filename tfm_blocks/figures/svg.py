"""Picture → SVG. Each box is a group with the attribute `data-node`, the address of its node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from tfm_blocks.figures.marks import sign_of
from tfm_blocks.figures.picture import FigurePicture, PlacedArrow, PlacedBox, PlacedPlate, Text
from tfm_blocks.figures.sizes import WAVE
from tfm_blocks.figures.themes import Theme

FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
ARROW = "M0,0 L6,3 L0,6 L1.5,3 z"


def to_svg(picture: FigurePicture, theme: Theme, *, title: str = "", scale: float = 1.0) -> str:
    """Return a picture as SVG."""
    width, height = picture.width, picture.height
    size = f'width="{width * scale:g}" height="{height * scale:g}" viewBox="0 0 {width:g} {height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}" fill="{theme.ink}">',
        f"<title>{escape(title)}</title>",
        f'<defs><marker id="head" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="{ARROW}" fill="{theme.ink}"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="{theme.background}"/>',
        *(line for plate in picture.plates for line in _plate(plate, theme)),
        *(_arrow(arrow, theme) for arrow in picture.arrows),
        *(line for box in picture.boxes for line in _box(box, theme)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _plate(plate: PlacedPlate, theme: Theme) -> Iterator[str]:
    frame = plate.frame
    yield _group("plate", frame.addresses)
    yield f"<title>{escape(' … '.join(dict.fromkeys((frame.addresses[0], frame.addresses[-1]))))}</title>"
    paint = f'fill="{theme.plate}" {_stroke(plate, theme)}' if frame.plate else 'fill="none"'
    yield _rectangle(plate, f'rx="8" {paint}')
    yield from (_text(text) for text in plate.texts)
    yield "</g>"


def _box(placed: PlacedBox, theme: Theme) -> Iterator[str]:
    box = placed.box
    yield _group(box.glyph, box.addresses)
    if box.about:
        yield f"<title>{escape(box.about)}</title>"
    stroke = _stroke(placed, theme)
    if box.glyph == "box":
        yield _rectangle(placed, f'rx="3" fill="{theme.fill(box.kind)}" {stroke}')
    elif box.glyph != "text":
        yield from _plus(placed, f'fill="{theme.background}" {stroke}')
    yield from (_text(text, theme.faint if text.size < 9 else "") for text in placed.texts)
    if placed.mark:
        yield _text(sign_of(placed, placed.mark), theme.marks[placed.mark])
    yield "</g>"


def _stroke(placed: PlacedBox | PlacedPlate, theme: Theme) -> str:
    colour, width = (theme.marks[placed.mark], 2) if placed.mark else (theme.ink, 0.8)
    dash = ' stroke-dasharray="4 2"' if placed.mark == "removed" else ""
    return f'stroke="{colour}" stroke-width="{width}"{dash}'


def _group(name: str, addresses: Sequence[str]) -> str:
    node = f' data-node="{escape(addresses[0])}"' if addresses else ""
    all_nodes = " ".join(map(escape, addresses))
    others = f' data-nodes="{all_nodes}"' if len(addresses) > 1 else ""
    return f'<g class="{name}"{node}{others}>'


def _rectangle(placed: PlacedBox | PlacedPlate, style: str) -> str:
    place = f'x="{placed.x:g}" y="{placed.y:g}" width="{placed.width:g}" height="{placed.height:g}"'
    return f"<rect {place} {style}/>"


def _plus(placed: PlacedBox, style: str) -> Iterator[str]:
    """Yield a circled plus, and the circled wave beside it."""
    radius = placed.width / 2
    x, y = placed.x + radius, placed.y + radius
    yield f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" {style}/>'
    yield f'<path d="M{x - 4:g},{y:g} h8 M{x:g},{y - 4:g} v8" {style}/>'
    if placed.wave:
        far, y = placed.wave
        sign = -1 if far < x else 1
        yield f'<path d="M{far - sign * WAVE:g},{y:g} H{x + sign * radius:g}" {style}/>'
        yield f'<circle cx="{far:g}" cy="{y:g}" r="{WAVE:g}" {style}/>'
        yield f'<path d="M{far - WAVE:g},{y:g} q{WAVE / 2:g},-11 {WAVE:g},0 t{WAVE:g},0" {style}/>'


def _arrow(placed: PlacedArrow, theme: Theme) -> str:
    points = " ".join(f"{x:g},{y:g}" for x, y in placed.points)
    head = ' marker-end="url(#head)"' if placed.head else ""
    return f'<polyline points="{points}" fill="none" stroke="{theme.ink}" stroke-width="0.9"{head}/>'


def _text(text: Text, fill: str = "") -> str:
    colour = f' fill="{fill}"' if fill else ""
    place = f'x="{text.x:g}" y="{text.y:g}" font-size="{text.size:g}" text-anchor="{text.align}"'
    return f"<text {place}{colour}>{escape(text.text)}</text>"
