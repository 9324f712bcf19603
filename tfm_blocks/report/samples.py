"""Outputs of several runs for lines on which the runs differ, with their differences from the reference marked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from tfm_blocks.errors import RunError
from tfm_blocks.report.differences import Group
from tfm_blocks.runs.row_results import TranslatedLine, read_translations
from tfm_blocks.runs.saved_run import SavedRun

MOST_SAMPLES = 20
LONGEST = 1000  # characters of a text; the time of a comparison grows with their square
PIECES = re.compile(r"\w+|\W")


@dataclass(frozen=True)
class Piece:
    """A part of an output: `added` is not in the reference, `missing` is only in the reference."""

    kind: Literal["same", "added", "missing"]
    text: str


@dataclass(frozen=True)
class SampleOutput:
    """An output, and the runs that have it: names of models, with their numbers of runs if not all have it."""

    pieces: Sequence[Piece]
    runs: int
    names: str


@dataclass(frozen=True)
class SampleLine:
    """A line of the test set, numbered from 1, and the different outputs, the most frequent first."""

    line: int
    source: str
    reference: str
    outputs: Sequence[SampleOutput]


@dataclass(frozen=True)
class Samples:
    """Lines of a task on which its runs differ, or lines on which they agree if they differ on none."""

    task: str
    runs: int
    total: int
    alike: int
    lines: Sequence[SampleLine]


def samples_of(task: str, groups: Mapping[str, Group], most: int = MOST_SAMPLES) -> Samples | None:
    """Return at most `most` sample lines of the models of a task; None if no run has outputs."""
    runs = {run.name: label for label, group in groups.items() for run in group.runs}
    outputs = common_test_set([run for group in groups.values() for run in group.runs])
    lines = list(zip(*outputs.values(), strict=True))
    if not lines:
        return None
    unlike = [place for place, row in enumerate(lines) if len({line.output for line in row}) > 1]
    names = [runs[name] for name in outputs]
    chosen = [_sample(place, lines[place], names) for place in _spread(unlike or range(len(lines)), most)]
    return Samples(task, len(outputs), len(lines), len(lines) - len(unlike), chosen)


def common_test_set(runs: Sequence[SavedRun]) -> dict[str, Sequence[TranslatedLine]]:
    """Return the translations by run name, of the runs with the same test set as the first run."""
    found: dict[str, Sequence[TranslatedLine]] = {}
    for run in runs:
        with suppress(RunError):
            lines = read_translations(run.folder)
            first = next(iter(found.values()), lines)
            if [(line.source, line.reference) for line in lines] == [(line.source, line.reference) for line in first]:
                found[run.name] = lines
    return found


def _spread(places: Sequence[int], count: int) -> list[int]:
    """Return `count` of the places, evenly spaced."""
    if len(places) <= count:
        return list(places)
    return [places[number * len(places) // count] for number in range(count)]


def _sample(place: int, row: Sequence[TranslatedLine], names: Sequence[str]) -> SampleLine:
    by_output: dict[str, list[str]] = {}
    for line, name in zip(row, names, strict=True):
        by_output.setdefault(line.output[:LONGEST], []).append(name)
    source, reference = row[0].source[:LONGEST], row[0].reference[:LONGEST]
    totals = Counter(names)
    outputs = [
        SampleOutput(mark(output, reference), len(having), _name(Counter(having), totals))
        for output, having in sorted(by_output.items(), key=lambda item: -len(item[1]))
    ]
    return SampleLine(place + 1, source, reference, outputs)


def _name(having: Mapping[str, int], totals: Mapping[str, int]) -> str:
    parts = [name if count == totals[name] else f"{name} ({count} of {totals[name]})" for name, count in having.items()]
    return ", ".join(parts)


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
