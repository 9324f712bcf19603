r"""Picture → TikZ, for \input in a paper that has \usepackage{tikz}."""

from __future__ import annotations

from collections.abc import Iterator

from tfm_blocks.figures.marks import sign_of
from tfm_blocks.figures.picture import FigurePicture, PlacedArrow, PlacedBox, PlacedPlate, Text
from tfm_blocks.figures.sizes import LEADING, WAVE
from tfm_blocks.figures.themes import Mark, Theme

SPECIAL = {
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


def to_tikz(picture: FigurePicture, theme: Theme, *, title: str = "", scale: float = 1.0) -> str:
    """Return a picture as a tikzpicture; its unit is a PostScript point."""
    colours = {theme.ink, theme.faint, theme.plate, theme.background, *theme.fills.values(), *theme.marks.values()}
    size = f"x={scale:g}bp, y=-{scale:g}bp"
    lines = [
        f"% {' '.join(title.split())}. Needs \\usepackage{{tikz}}.",
        f"\\begin{{tikzpicture}}[{size}, inner sep=0, outer sep=0, >=stealth, line width=0.8bp]",
        *(f"\\definecolor{{{_colour(colour)}}}{{HTML}}{{{colour[1:].upper()}}}" for colour in sorted(colours)),
        f"\\fill[{_colour(theme.background)}] (0,0) rectangle ({picture.width:g},{picture.height:g});",
        *(line for plate in picture.plates for line in _plate(plate, theme, scale)),
        *(_arrow(arrow, theme) for arrow in picture.arrows),
        *(line for box in picture.boxes for line in _box(box, theme, scale)),
        "\\end{tikzpicture}%",  # no space after the figure
    ]
    return "\n".join(lines) + "\n"


def _colour(colour: str) -> str:
    return f"tfm{colour[1:]}"


def _plate(plate: PlacedPlate, theme: Theme, scale: float) -> Iterator[str]:
    if plate.frame.plate:
        style = _stroke(plate.mark, theme)
        yield _rectangle(plate, f"{style}, fill={_colour(theme.plate)}, rounded corners=8bp")
    yield from (_text(text, theme.ink, scale) for text in plate.texts)


def _box(placed: PlacedBox, theme: Theme, scale: float) -> Iterator[str]:
    box = placed.box
    style = _stroke(placed.mark, theme)
    if box.addresses:
        yield f"% {box.addresses[0]}"
    if box.glyph == "box":
        yield _rectangle(placed, f"{style}, fill={_colour(theme.fill(box.kind))}, rounded corners=3bp")
    elif box.glyph != "text":
        yield from _plus(placed, f"{style}, fill={_colour(theme.background)}")
    yield from (_text(text, theme.faint if text.size < 9 else theme.ink, scale) for text in placed.texts)
    if placed.mark:
        yield _text(sign_of(placed, placed.mark), theme.marks[placed.mark], scale)


def _stroke(mark: Mark | None, theme: Theme) -> str:
    if not mark:
        return f"draw={_colour(theme.ink)}"
    return f"draw={_colour(theme.marks[mark])}, line width=2bp" + (", dashed" if mark == "removed" else "")


def _rectangle(placed: PlacedBox | PlacedPlate, style: str) -> str:
    corners = f"({placed.x:g},{placed.y:g}) rectangle ({placed.x + placed.width:g},{placed.y + placed.height:g})"
    return f"\\path[{style}] {corners};"


def _plus(placed: PlacedBox, style: str) -> Iterator[str]:
    """Yield a circled plus, and the circled wave beside it."""
    radius = placed.width / 2
    x, y = placed.x + radius, placed.y + radius
    yield f"\\path[{style}] ({x:g},{y:g}) circle[radius={radius:g}];"
    yield f"\\path[{style}] ({x - 4:g},{y:g}) -- ({x + 4:g},{y:g}) ({x:g},{y - 4:g}) -- ({x:g},{y + 4:g});"
    if placed.wave:
        far, y = placed.wave
        sign = -1 if far < x else 1
        yield f"\\path[{style}] ({far - sign * WAVE:g},{y:g}) -- ({x + sign * radius:g},{y:g});"
        yield f"\\path[{style}] ({far:g},{y:g}) circle[radius={WAVE:g}];"
        yield (
            f"\\path[{style}] ({far - WAVE:g},{y:g}) .. controls ({far - WAVE / 2:g},{y - 8:g}) .. ({far:g},{y:g}) "
            f".. controls ({far + WAVE / 2:g},{y + 8:g}) .. ({far + WAVE:g},{y:g});"
        )


def _arrow(placed: PlacedArrow, theme: Theme) -> str:
    points = " -- ".join(f"({x:g},{y:g})" for x, y in placed.points)
    return f"\\draw[{_colour(theme.ink)}, line width=0.9bp{', ->' if placed.head else ''}] {points};"


def _text(text: Text, colour: str, scale: float) -> str:
    size = f"\\fontsize{{{text.size * scale:g}}}{{{text.size * LEADING * scale:g}}}\\selectfont\\sffamily"
    written = "".join(SPECIAL.get(letter, letter) for letter in text.text)
    style = f"anchor={ANCHORS[text.align]}, text={_colour(colour)}, font={size}"
    return f"\\node[{style}] at ({text.x:g},{text.y:g}) {{{written}}};"
