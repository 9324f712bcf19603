r"""Picture → primitives with their colours → SVG, TikZ for \input in a paper with \usepackage{tikz}, PNG or PDF."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path as FilePath
from typing import NamedTuple, TypeVar

from tfm_blocks.errors import config_error, shown
from tfm_blocks.figures.draw import Content, Drawer
from tfm_blocks.figures.drawing import SIGNS, THEMES, Arrow, Box, FigurePicture, Frame, Mark, Point, Text, Theme
from tfm_blocks.figures.labels import LABEL, LEADING, text_width, wrap
from tfm_blocks.figures.layout import MARGIN, WAVE, DrawingLayout, rounded
from tfm_blocks.language.spec import Spec
from tfm_blocks.registry.blocks import Registry
from tfm_blocks.runs.files import write_bytes

SUFFIXES = (".svg", ".pdf", ".png", ".tex")
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
HEAD = "M0,0 L6,3 L0,6 L1.5,3 z"
SPECIAL = {  # letters of TikZ
    **{letter: f"\\{letter}" for letter in "#$%&_{}"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "×": r"$\times$",
    "−": "$-$",
    "–": "--",
    "…": r"\dots{}",
}
ANCHORS = {"start": "base west", "middle": "base", "end": "base east"}
TITLE_LETTERS = 36  # of a line of a title
TIKZ_BEND = 8 / 11  # a control point of TikZ, which counts twice, stands this much nearer to the line


@dataclass(frozen=True)
class Style:
    """How a picture is drawn: its theme, its title for screen readers, and its scale."""

    theme: Theme = THEMES["paper"]
    title: str = ""
    scale: float = 1.0


class Pen(NamedTuple):
    """The colour and width of a line, and the colour of the area that it surrounds."""

    colour: str
    fill: str
    width: float
    dashed: bool


class Rect(NamedTuple):
    """A rectangle with round corners; without a pen it only reacts to the pointer."""

    item: Box | Frame
    radius: int
    pen: Pen | None


class Circle(NamedTuple):
    """A circle around a point."""

    x: float
    y: float
    radius: float
    pen: Pen


class Path(NamedTuple):
    """Strokes: two points of a line, or five of two quadratic curves: start, control, middle, control, end."""

    strokes: Sequence[Sequence[Point]]
    pen: Pen


Primitive = Rect | Circle | Path | Arrow | Text  # the last two have the colour of the ink, if they have no other


def primitives_of(picture: FigurePicture, theme: Theme) -> Iterator[tuple[Box | Frame | None, list[Primitive]]]:
    """Yield the primitives of each plate, arrow (None) and box, from the back to the front."""
    for plate in picture.plates:
        yield plate, list(_primitives(plate, theme))
    for arrow in picture.arrows:
        yield None, [arrow]
    for box in picture.boxes:
        yield box, list(_primitives(box, theme))


def _primitives(item: Box | Frame, theme: Theme) -> Iterator[Primitive]:
    mark = item.mark
    colour = theme.marks[mark] if mark else theme.ink
    width, dashed = 2 if mark else 0.8, mark == "removed"
    if isinstance(item, Frame):
        yield Rect(item, 8, Pen(colour, theme.plate, width, dashed) if item.plate else None)
        yield from item.texts
        return
    if item.glyph == "box":
        yield Rect(item, 3, Pen(colour, theme.fills.get(item.kind, theme.background), width, dashed))
    elif item.glyph != "text":  # a circled plus, and the circled wave beside it
        pen, radius = Pen(colour, theme.background, width, dashed), item.width / 2
        x, y = item.x + radius, item.y + radius
        yield Circle(x, y, radius, pen)
        yield Path([[(x - 4, y), (x + 4, y)], [(x, y - 4), (x, y + 4)]], pen)
        if item.wave:
            far, y = item.wave
            sign, half, bend = -1 if far < x else 1, WAVE / 2, 11
            yield Path([[(far - sign * WAVE, y), (x + sign * radius, y)]], pen)
            yield Circle(far, y, WAVE, pen)
            curve = [(far - WAVE, y), (far - half, y - bend), (far, y), (far + half, y + bend), (far + WAVE, y)]
            yield Path([curve], pen)
    yield from (replace(text, colour=theme.faint) if text.size < 9 else text for text in item.texts)
    if mark and item.glyph == "box":
        yield Text(SIGNS[mark], item.x + item.width - 3, item.y + 10, 10, "end", colour)
    elif mark:
        yield Text(SIGNS[mark], item.x + item.width + 1, item.y + 3, 10, "start", colour)


def picture_of(spec: Spec, registry: Registry, content: Content) -> FigurePicture:
    """Return the picture of a model. Raises ConfigError if the model has nothing at the address `content.of`."""
    return DrawingLayout(Drawer(spec, registry, content).draw()).picture()


def mark_nodes(picture: FigurePicture, marks: Mapping[str, Mark]) -> FigurePicture:
    """Return the picture with the marks of nodes by address; a box has the mark of any node that it stands for."""

    def mark(item: Box | Frame) -> Mark | None:
        return next((marks[address] for address in item.addresses if address in marks), None)

    plates = tuple(replace(plate, mark=mark(plate)) for plate in picture.plates)
    return replace(picture, plates=plates, boxes=tuple(replace(box, mark=mark(box)) for box in picture.boxes))


def place_side_by_side(pictures: tuple[FigurePicture, FigurePicture], titles: tuple[str, str]) -> FigurePicture:
    """Return one picture of two models, each below its title, whose inputs stand at the same height."""
    lines = [wrap(title.split(), TITLE_LETTERS) for title in titles]
    above = MARGIN + max(map(len, lines)) * LABEL * LEADING
    height = above + max(picture.height for picture in pictures)
    first, second = (
        _below_title(picture, title, height, above) for picture, title in zip(pictures, lines, strict=True)
    )
    second = _shifted(second, first.width, 0.0)
    parts = (first.plates + second.plates, first.arrows + second.arrows, first.boxes + second.boxes)
    return FigurePicture(second.width, height, *parts)


def _below_title(picture: FigurePicture, lines: tuple[str, ...], height: float, above: float) -> FigurePicture:
    """Return the picture at the bottom of a page of this height, under a title in a band of height `above`."""
    width = max(picture.width, max(text_width(line, LABEL) for line in lines) + 2 * MARGIN)
    moved = _shifted(picture, (width - picture.width) / 2, height - picture.height)
    title = Box((), "text", lines, glyph="text", x=MARGIN, y=MARGIN)
    title.width, title.height = rounded(width - 2 * MARGIN), above - MARGIN
    baselines = (MARGIN + (row + 0.8) * LABEL * LEADING for row in range(len(lines)))
    title.texts = tuple(Text(line, rounded(width / 2), y, LABEL) for line, y in zip(lines, baselines, strict=True))
    return replace(moved, width=rounded(width), boxes=(title, *moved.boxes))


Moved = TypeVar("Moved", Box, Frame, Text)


def _shifted(picture: FigurePicture, right: float, down: float) -> FigurePicture:
    """Return the picture at another place of its page."""

    def point(place: Point) -> Point:
        return rounded(place[0] + right), rounded(place[1] + down)

    def shifted(moved: Moved) -> Moved:
        x, y = point((moved.x, moved.y))
        moved = replace(moved, x=x, y=y)
        if not isinstance(moved, Text):
            moved.texts = tuple(map(shifted, moved.texts))
        if isinstance(moved, Box):
            moved.wave = moved.wave and point(moved.wave)
        return moved

    arrows = tuple(replace(arrow, points=tuple(map(point, arrow.points))) for arrow in picture.arrows)
    plates, boxes = tuple(map(shifted, picture.plates)), tuple(map(shifted, picture.boxes))
    return FigurePicture(rounded(picture.width + right), picture.height, plates, arrows, boxes)


def svg_of(picture: FigurePicture, style: Style) -> str:
    """Return a picture as SVG. Each box is a group with the attribute `data-node`, the address of its node."""
    theme, width, height = style.theme, picture.width, picture.height
    size = f'width="{width * style.scale:g}" height="{height * style.scale:g}" viewBox="0 0 {width:g} {height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}" fill="{theme.ink}">',
        f"<title>{escape(style.title)}</title>",
        f'<defs><marker id="head" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="{HEAD}" fill="{theme.ink}"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="{theme.background}"/>',
    ]
    for item, primitives in primitives_of(picture, theme):
        drawn = [_svg(primitive, theme) for primitive in primitives]
        lines += [*_svg_group(item), *drawn, "</g>"] if item else drawn
    return "\n".join([*lines, "</svg>"]) + "\n"


def _svg_group(item: Box | Frame) -> Iterator[str]:
    addresses = list(map(escape, item.addresses))
    node = f' data-node="{addresses[0]}"' if addresses else ""
    nodes = f' data-nodes="{" ".join(addresses)}"' if len(addresses) > 1 else ""
    yield f'<g class="{"plate" if isinstance(item, Frame) else item.glyph}"{node}{nodes}>'
    if isinstance(item, Frame):
        yield f"<title>{' … '.join(dict.fromkeys((addresses[0], addresses[-1])))}</title>"
    elif item.about:
        yield f"<title>{escape(item.about)}</title>"


def _svg(primitive: Primitive, theme: Theme) -> str:
    match primitive:
        case Rect(item, radius, pen):
            place = f'x="{item.x:g}" y="{item.y:g}" width="{item.width:g}" height="{item.height:g}"'
            return f'<rect {place} rx="{radius}" {_svg_pen(pen)}/>'
        case Circle(x, y, radius, pen):
            return f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" {_svg_pen(pen)}/>'
        case Path(strokes, pen):
            return f'<path d="{_svg_strokes(strokes)}" {_svg_pen(pen)}/>'
        case Arrow(points=points, head=head):
            corners = " ".join(f"{x:g},{y:g}" for x, y in points)
            tip = ' marker-end="url(#head)"' if head else ""
            return f'<polyline points="{corners}" fill="none" stroke="{theme.ink}" stroke-width="0.9"{tip}/>'
        case Text(text, x, y, size, align, colour):
            fill = f' fill="{colour}"' if colour else ""
            place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{align}"'
            return f"<text {place}{fill}>{escape(text)}</text>"


def _svg_pen(pen: Pen | None) -> str:
    if pen is None:
        return 'fill="none"'
    dash = ' stroke-dasharray="4 2"' if pen.dashed else ""
    return f'fill="{pen.fill}" stroke="{pen.colour}" stroke-width="{pen.width}"{dash}'


def _svg_strokes(strokes: Sequence[Sequence[Point]]) -> str:
    (x, y), (next_x, next_y), *curve = strokes[0]
    if curve:
        width = curve[0][0] - x
        return f"M{x:g},{y:g} q{next_x - x:g},{next_y - y:g} {width:g},0 t{width:g},0"
    if len(strokes) == 1:
        return f"M{x:g},{y:g} H{next_x:g}"
    (x2, y2), (_, next_y2) = strokes[1]
    return f"M{x:g},{y:g} h{next_x - x:g} M{x2:g},{y2:g} v{next_y2 - y2:g}"


def tikz_of(picture: FigurePicture, style: Style) -> str:
    """Return a picture as a tikzpicture; its unit is a PostScript point."""
    theme, scale = style.theme, style.scale
    colours = {theme.ink, theme.faint, theme.plate, theme.background, *theme.fills.values(), *theme.marks.values()}
    lines = [
        f"% {' '.join(style.title.split())}. Needs \\usepackage{{tikz}}.",
        f"\\begin{{tikzpicture}}[x={scale:g}bp, y=-{scale:g}bp, inner sep=0, outer sep=0, >=stealth, line width=0.8bp]",
        *(f"\\definecolor{{{_tikz_colour(colour)}}}{{HTML}}{{{colour[1:].upper()}}}" for colour in sorted(colours)),
        f"\\fill[{_tikz_colour(theme.background)}] (0,0) rectangle ({picture.width:g},{picture.height:g});",
    ]
    for item, primitives in primitives_of(picture, theme):
        if isinstance(item, Box) and item.addresses:
            lines.append(f"% {item.addresses[0]}")
        lines += [line for primitive in primitives if (line := _tikz(primitive, style))]
    return "\n".join([*lines, "\\end{tikzpicture}%"]) + "\n"  # no space after the figure


def _tikz(primitive: Primitive, style: Style) -> str:
    match primitive:
        case Rect(item, radius, Pen() as pen):
            corner = f"({item.x + item.width:g},{item.y + item.height:g})"
            round_corners = f", rounded corners={radius}bp"
            return f"\\path[{_tikz_pen(pen)}{round_corners}] ({item.x:g},{item.y:g}) rectangle {corner};"
        case Circle(x, y, radius, pen):
            return f"\\path[{_tikz_pen(pen)}] ({x:g},{y:g}) circle[radius={radius:g}];"
        case Path(strokes, pen):
            return f"\\path[{_tikz_pen(pen)}] {' '.join(map(_tikz_stroke, strokes))};"
        case Arrow(points=points, head=head):
            corners = " -- ".join(f"({x:g},{y:g})" for x, y in points)
            return f"\\draw[{_tikz_colour(style.theme.ink)}, line width=0.9bp{', ->' if head else ''}] {corners};"
        case Text(text, x, y, size, align, colour):
            font = f"\\fontsize{{{size * style.scale:g}}}{{{size * LEADING * style.scale:g}}}\\selectfont\\sffamily"
            ink = _tikz_colour(colour or style.theme.ink)
            written = "".join(SPECIAL.get(letter, letter) for letter in text)
            return f"\\node[anchor={ANCHORS[align]}, text={ink}, font={font}] at ({x:g},{y:g}) {{{written}}};"
    return ""


def _tikz_colour(colour: str) -> str:
    return f"tfm{colour[1:]}"


def _tikz_pen(pen: Pen) -> str:
    width = f", line width={pen.width}bp" if pen.width != 0.8 else ""
    dashed = ", dashed" if pen.dashed else ""
    return f"draw={_tikz_colour(pen.colour)}{width}{dashed}, fill={_tikz_colour(pen.fill)}"


def _tikz_stroke(points: Sequence[Point]) -> str:
    (x, y), *others = points
    text = f"({x:g},{y:g})"
    if len(others) == 1:
        return f"{text} -- ({others[0][0]:g},{others[0][1]:g})"
    for (x, bend), (end_x, end_y) in zip(others[::2], others[1::2], strict=True):
        text += f" .. controls ({x:g},{y + (bend - y) * TIKZ_BEND:g}) .. ({end_x:g},{end_y:g})"
    return text


def expect_format(path: FilePath) -> None:
    """Raise ConfigError unless a figure can be written to this path."""
    if path.suffix not in SUFFIXES:
        rule = f"must be a file {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, but is {shown(path.name)}"
        raise config_error("-o", rule, f"write -o {path.stem or 'figure'}.svg")


def write_figure(path: FilePath, picture: FigurePicture, style: Style) -> None:
    """Write a picture. Raises ConfigError if the file cannot be written."""
    expect_format(path)
    if path.suffix in (".svg", ".tex"):
        content = (svg_of if path.suffix == ".svg" else tikz_of)(picture, style).encode("utf-8")
    else:
        from tfm_blocks.figures.raster import raster_of

        content = raster_of(picture, style, path.suffix)
    write_content(path, content)


def write_content(path: FilePath, content: bytes) -> None:
    """Write the file of -o. Raises ConfigError if it cannot be written."""
    try:
        write_bytes(path, content)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise config_error(str(path), rule, "choose a file in a folder that you can write") from None
