"""Write figures: spec → drawing → picture → a file of the format that its suffix names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tfm_blocks.errors import ConfigError, Problem, shown
from tfm_blocks.figures.content import Content
from tfm_blocks.figures.draw import draw_model
from tfm_blocks.figures.layout import lay_out
from tfm_blocks.figures.picture import FigurePicture
from tfm_blocks.figures.svg import to_svg
from tfm_blocks.figures.themes import THEMES, Theme
from tfm_blocks.figures.tikz import to_tikz
from tfm_blocks.language.spec import Spec
from tfm_blocks.registry.blocks import Registry
from tfm_blocks.runs.files import write_bytes

SUFFIXES = (".svg", ".pdf", ".png", ".tex")


@dataclass(frozen=True)
class Style:
    """How a picture is drawn: its theme, its title for screen readers, and its scale."""

    theme: Theme = THEMES["paper"]
    title: str = ""
    scale: float = 1.0


def picture_of(spec: Spec, registry: Registry, content: Content) -> FigurePicture:
    """Return the picture of a model. Raises ConfigError if the model has nothing at the address `content.of`."""
    return lay_out(draw_model(spec, registry, content))


def svg_of(picture: FigurePicture, style: Style) -> str:
    """Return a picture as SVG."""
    return to_svg(picture, style.theme, title=style.title, scale=style.scale)


def expect_format(path: Path) -> None:
    """Raise ConfigError unless a figure can be written to this path."""
    if path.suffix not in SUFFIXES:
        rule = f"must be a file {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, but is {shown(path.name)}"
        raise ConfigError(Problem("-o", rule, help=f"write -o {path.stem or 'figure'}.svg"))


def write_figure(path: Path, picture: FigurePicture, style: Style) -> None:
    """Write a picture. Raises ConfigError if the file cannot be written."""
    expect_format(path)
    try:
        if path.suffix == ".svg":
            write_bytes(path, svg_of(picture, style).encode("utf-8"))
        elif path.suffix == ".tex":
            text = to_tikz(picture, style.theme, title=style.title, scale=style.scale)
            write_bytes(path, text.encode("utf-8"))
        else:
            from tfm_blocks.figures.raster import write_raster

            write_raster(path, picture, style.theme, scale=style.scale)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise ConfigError(Problem(str(path), rule, help="choose a file in a folder that you can write")) from None
