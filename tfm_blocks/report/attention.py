"""Attention maps as pictures: of every layer and head with tokens on the axes, and small ones for a report."""

from __future__ import annotations

import warnings
from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from PIL import Image

from tfm_blocks.errors import DataError, Problem, TfmError, config_error
from tfm_blocks.language.pairing import pattern
from tfm_blocks.report.assets import asset, content_policy, page_template
from tfm_blocks.report.differences import Groups
from tfm_blocks.runs.files import write_bytes
from tfm_blocks.runs.row_results import TranslatedLine
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.translation.classify import load_any
from tfm_blocks.translation.sentence_attention import SentenceAttention, attention_of
from tfm_blocks.translation.translator import Translator

MOST = 64  # tokens on an axis, to limit the size of the picture
SIDE = 60_000  # pixels: matplotlib draws at most 2^16
CELL = 0.15  # inches per token, so that labels of 7 points do not overlap
COLOURS = "Blues"  # from weight 0 to weight 1
GAP = 2  # cells between heads, for their titles
MOST_PICTURES = 6  # models, to limit the size of the page
SHORT = 40  # characters of a test sentence, so that the labels of eight heads fit the picture
SHADES = 14  # shades of attention; with black and white they make 16 colours, 4 bits a pixel
# On a dark page, white (no attention) becomes black, and dark blue becomes light blue.
STYLE = """svg { color: inherit; display: block; } svg text { fill: currentColor; white-space: pre; }
@media (prefers-color-scheme: dark) { svg image { filter: invert(1) hue-rotate(180deg); } }
"""


def save_attention(attention: SentenceAttention, path: Path) -> list[str]:
    """Write a self-contained page (.html) or a picture (.png). Return warnings, such as letters without a glyph.

    Raises DataError for sentences of more than MOST tokens.
    """
    if path.suffix == ".html":
        write_bytes(path, render_attention(attention).encode("utf-8"))
        return []
    write_bytes(path, png(attention))
    font = get_font(findfont("DejaVu Sans"))
    letters = {letter for tokens in attention.tokens.values() for token in tokens for letter in token}
    missing = "".join(sorted(letter for letter in letters if not font.get_char_index(ord(letter))))
    rule = f"the picture has no letters for {missing}: write a .html, which a browser shows in its own fonts"
    return [rule] if missing else []


def check_path(path: Path) -> None:
    """Raise ConfigError unless `path` ends in .html or .png, is not a folder, and lies in an existing folder."""
    if path.suffix not in (".html", ".png"):
        raise config_error("-o", f"must end in .html or .png, but is {path}")
    if path.is_dir():
        raise config_error("-o", f"is a folder: {path}", "name a file")
    if not path.parent.is_dir():
        raise config_error("-o", f"there is no folder {path.parent}", "make it first")


def render_attention(attention: SentenceAttention) -> str:
    """Return HTML with the pictures as inline SVG, whose labels are text. Raises DataError as `draw` does."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tfm-blocks"}):
        data = _render(draw(attention), format="svg", transparent=True, metadata={"Date": None})
    _, _, picture = data.decode("utf-8").partition("<svg")
    return page_template("attention.html").render(
        policy=content_policy(()),
        title=attention.source,
        target=attention.target,
        style=Markup(asset("page.css") + STYLE),
        picture=Markup(f"<svg{picture}"),
    )


def png(attention: SentenceAttention) -> bytes:
    """Return all pictures as one PNG. Raises DataError as `draw` does."""
    figure = draw(attention)
    return _render(figure, format="png", dpi=min(100, SIDE / max(figure.get_size_inches())))


def _render(figure: Figure, **how: Any) -> bytes:
    target = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(target, **how)
    return target.getvalue()


def draw(attention: SentenceAttention) -> Figure:
    """Draw one picture for all nodes that differ only in their layer: a row for each layer, a column for each head.

    Raises DataError for a sentence of more than MOST tokens.
    """
    for name, tokens in attention.tokens.items():
        if len(tokens) > MOST:
            rule = f"{name} has {len(tokens)} tokens, and a picture shows at most {MOST}"
            raise DataError(Problem("sentence", rule, help="give a shorter one"))
    kinds: dict[tuple[str, ...], list[str]] = {}
    for address in attention.weights:
        kinds.setdefault((pattern(address), *attention.looks[address]), []).append(address)
    tiled = [_tile(attention, addresses) for addresses in kinds.values()]
    heights = [image.shape[0] + 2 * GAP for image in tiled]
    width = max(image.shape[1] for image in tiled)
    margin = 0.6 * max(len(token) for tokens in attention.tokens.values() for token in tokens)
    size = ((width + margin) * CELL, (sum(heights) + (margin + 2) * len(tiled)) * CELL)
    # the labels of the axes need some inches
    figure = Figure(figsize=(max(3.0, size[0]), max(2.0, size[1])), layout="constrained")
    rows = figure.subplots(len(tiled), squeeze=False, height_ratios=heights)[:, 0]
    for axes, image, addresses in zip(rows, tiled, kinds.values(), strict=True):
        _draw_kind(axes, image, attention, addresses)
    return figure


def _tile(attention: SentenceAttention, addresses: Sequence[str]) -> np.ndarray:
    """Return the weights of all heads and layers as one image, with NaN between them."""
    maps = [attention.weights[address].numpy() for address in addresses]
    heads = max(len(w_HTS) for w_HTS in maps)
    _, T, S = maps[0].shape
    image = np.full((len(maps), GAP + T, heads, S + GAP), np.nan)
    for layer, w_HTS in enumerate(maps):
        image[layer, GAP:, : len(w_HTS), :S] = w_HTS.transpose(1, 0, 2)
    return image.reshape(len(maps) * (T + GAP), heads * (S + GAP))[:, :-GAP]


def _draw_kind(axes: Axes, image: np.ndarray, attention: SentenceAttention, addresses: Sequence[str]) -> None:
    look = attention.looks[addresses[0]]
    rows, columns = attention.tokens[look.queries], attention.tokens[look.keys]
    high, wide = len(rows) + GAP, len(columns) + GAP
    axes.imshow(image, cmap=COLOURS, vmin=0, vmax=1, interpolation="none")
    for layer, address in enumerate(addresses):
        axes.text(-0.5, layer * high + GAP - 1.4, address, fontsize=7, parse_math=False)
        for head in range(len(attention.weights[address])):
            axes.text(head * wide - 0.5, layer * high + GAP - 0.7, f"head {head}", fontsize=7, parse_math=False)
    heads = range((image.shape[1] + GAP) // wide)
    across = [head * wide + place for head in heads for place in range(len(columns))]
    down = [layer * high + GAP + place for layer in range(len(addresses)) for place in range(len(rows))]
    axes.set_xticks(across, columns * len(heads), rotation=90, fontsize=7, parse_math=False)
    axes.set_yticks(down, rows * len(addresses), fontsize=7, parse_math=False)
    axes.set_xlabel(f"{look.keys}, looked at", fontsize=8)
    axes.set_ylabel(f"{look.queries}, looks", fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def pictures_of(
    groups: Groups, lines: Mapping[Path, Sequence[TranslatedLine]], sentence: str | None, plugins: Sequence[str]
) -> list[dict[str, str]]:
    """Return a picture for the first finished run of each of at most MOST_PICTURES groups, or why there is none.

    Its `address` is a PNG as a data URL, or empty. A picture shows the attention between `sentence` and the run's
    translation. Without a sentence, it shows the first short line of the test set and its reference.
    """
    first = next(iter(lines.values()), []) if not sentence else []
    line = min(first, key=lambda one: max(SHORT, len(one.source), len(one.reference)), default=None)
    if sentence is None and line is None:
        return []
    source, target = (sentence or "", None) if line is None else (line.source, line.reference)
    finished = [run for group in groups for run in [candidate for candidate in group.runs if candidate.scores][:1]]
    return [_picture(run, source, target, plugins) for run in finished[:MOST_PICTURES]]


def _picture(run: SavedRun, source: str, target: str | None, plugins: Sequence[str]) -> dict[str, str]:
    picture = {"name": run.name, "source": source, "target": target or "", "address": ""}
    try:
        reader = load_any(run.folder, plugins=plugins)
        several = isinstance(reader, Translator) and len(reader.sources) > 1  # translations.jsonl joins their texts
        attention = attention_of(reader, source.split(" | ") if several else source, target)
        address = f"data:image/png;base64,{b64encode(shrink(png(attention))).decode()}"
        return picture | {"target": attention.target, "address": address}
    except TfmError as error:
        return picture | {"reason": error.problems[0].rule}
    except TypeError as error:  # the sentence does not have the model's sources
        return picture | {"reason": str(error)}


def shrink(picture: bytes) -> bytes:
    """Return the PNG with a palette of SHADES shades of attention, black and white."""
    target, palette = BytesIO(), Image.new("P", (1, 1))
    shades = colormaps[COLOURS](np.linspace(0, 1, SHADES), bytes=True)[:, :3]
    palette.putpalette([0, 0, 0, 255, 255, 255, *shades.ravel().tolist()])
    small = Image.open(BytesIO(picture)).convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)
    small.save(target, "PNG", optimize=True)
    return target.getvalue()
