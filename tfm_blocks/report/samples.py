"""Translations of several runs side by side, with their differences from the reference marked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from tfm_blocks.errors import RunError
from tfm_blocks.runs.record import RunRecord
from tfm_blocks.runs.row_results import TranslatedLine, read_translations

MOST_SAMPLES = 20
LONGEST = 1000  # characters of a text; the time of a comparison grows with their square
PIECES = re.compile(r"\w+|\W")


@dataclass(frozen=True)
class Piece:
    """A part of an output: `added` is not in the reference, `missing` is only in the reference."""

    kind: Literal["same", "added", "missing"]
    text: str


@dataclass(frozen=True)
class SampleLine:
    """A line of the test set, numbered from 1, and the output of each run."""

    line: int
    source: str
    reference: str
    outputs: Mapping[str, Sequence[Piece]]


def common_test_set(runs: Sequence[RunRecord]) -> dict[str, Sequence[TranslatedLine]]:
    """Return the translations by run name, of the runs with the same test set as the first run."""
    found: dict[str, Sequence[TranslatedLine]] = {}
    for run in runs:
        with suppress(RunError):
            lines = read_translations(run.folder)
            first = next(iter(found.values()), lines)
            if [(one.source, one.reference) for one in lines] == [(one.source, one.reference) for one in first]:
                found[run.name] = lines
    return found


def choose_samples(translations: Mapping[str, Sequence[TranslatedLine]]) -> list[SampleLine]:
    """Return sample lines in the order of the test set, spread evenly; lines with different outputs take precedence."""
    lines = list(zip(*translations.values(), strict=True))
    unlike = [place for place, row in enumerate(lines) if len({one.output for one in row}) > 1]
    alike = sorted(set(range(len(lines))) - set(unlike))
    chosen = _spread(unlike, MOST_SAMPLES)
    chosen += _spread(alike, MOST_SAMPLES - len(chosen))
    return [_sample(place, dict(zip(translations, lines[place], strict=True))) for place in sorted(chosen)]


def _spread(places: Sequence[int], count: int) -> list[int]:
    """Return `count` of the places, evenly spaced."""
    if len(places) <= count:
        return list(places)
    return [places[number * len(places) // count] for number in range(count)]


def _sample(place: int, row: Mapping[str, TranslatedLine]) -> SampleLine:
    first = next(iter(row.values()))
    outputs = {name: mark(one.output[:LONGEST], one.reference[:LONGEST]) for name, one in row.items()}
    return SampleLine(place + 1, first.source[:LONGEST], first.reference[:LONGEST], outputs)


def mark(output: str, reference: str) -> list[Piece]:
    """Return the output in pieces, including the missing pieces of the reference."""
    ours, theirs = PIECES.findall(output), PIECES.findall(reference)
    found = []
    for kind, a, b, c, d in SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes():
        if kind == "equal":
            found.append(Piece("same", "".join(ours[c:d])))
            continue
        if b > a:
            found.append(Piece("missing", "".join(theirs[a:b])))
        if d > c:
            found.append(Piece("added", "".join(ours[c:d])))
    return found
