"""The attention of several runs' models for one sentence, as pictures for the report."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from matplotlib import colormaps
from PIL import Image

from tfm_blocks.errors import TfmError
from tfm_blocks.report.attention_page import COLOURS, png
from tfm_blocks.report.differences import Group
from tfm_blocks.runs.row_results import TranslatedLine
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.translation.sentence_attention import attention_of
from tfm_blocks.translation.tasks import Text
from tfm_blocks.translation.translator import Translator

MOST_PICTURES = 6  # models, to limit the size of the page
SHORT = 40  # characters of a test sentence, so that the labels of eight heads fit the picture
SHADES = 14  # shades of attention; with black and white they make 16 colours, 4 bits a pixel


@dataclass(frozen=True)
class Picture:
    """The attention of one run: a PNG as a data URL, or the reason why there is none."""

    name: str
    source: str
    target: str
    address: str = ""
    reason: str = ""


def pictures_of(
    groups: Sequence[Group], lines: Mapping[str, Sequence[TranslatedLine]], sentence: str | None, plugins: Sequence[str]
) -> list[Picture]:
    """Return a picture for the first finished run of each of at most MOST_PICTURES groups.

    A picture shows the attention between `sentence` and the run's translation. Without a sentence, it shows the first
    short line of the test set and its reference.
    """
    line = None if sentence else _short_line(lines)
    if sentence is None and line is None:
        return []
    source, target = (sentence or "", None) if line is None else (line.source, line.reference)
    finished = [run for group in groups for run in [candidate for candidate in group.runs if candidate.scores][:1]]
    return [_picture(run, source, target, plugins) for run in finished[:MOST_PICTURES]]


def _short_line(lines: Mapping[str, Sequence[TranslatedLine]]) -> TranslatedLine | None:
    """Return the first line that is short on both sides, else the shortest line."""
    first = next(iter(lines.values()), [])
    return min(first, key=lambda one: max(SHORT, len(one.source), len(one.reference)), default=None)


def _picture(run: SavedRun, source: str, target: str | None, plugins: Sequence[str]) -> Picture:
    try:
        translator = Translator.load(run.folder, plugins=plugins)
        attention = attention_of(translator, _text(source, translator), target)
        address = f"data:image/png;base64,{b64encode(shrink(png(attention))).decode()}"
        return Picture(run.name, source, attention.target, address)
    except TfmError as error:
        return Picture(run.name, source, target or "", reason=error.problems[0].rule)
    except TypeError as error:  # the sentence does not have the model's sources
        return Picture(run.name, source, target or "", reason=str(error))


def _text(source: str, translator: Translator) -> Text:
    """Return the texts of several sources, which translations.jsonl joins."""
    return source if len(translator.sources) == 1 else source.split(" | ")


def shrink(picture: bytes) -> bytes:
    """Return the PNG with a palette of SHADES shades of attention, black and white."""
    target, palette = BytesIO(), Image.new("P", (1, 1))
    shades = colormaps[COLOURS](np.linspace(0, 1, SHADES), bytes=True)[:, :3]
    palette.putpalette([0, 0, 0, 255, 255, 255, *shades.ravel().tolist()])
    small = Image.open(BytesIO(picture)).convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)
    small.save(target, "PNG", optimize=True)
    return target.getvalue()
