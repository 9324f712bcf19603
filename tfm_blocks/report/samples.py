"""The models that a page draws, the runs that it samples, and their outputs for lines on which the runs differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from tfm_blocks.errors import RunError
from tfm_blocks.metric_schema import OBJECTIVE
from tfm_blocks.report.differences import Group, TaskGroups
from tfm_blocks.runs.row_results import TranslatedLine, read_translations
from tfm_blocks.runs.saved_run import SavedRun

MOST_SAMPLES = 20
LONGEST = 1000  # characters of a text; the time of a comparison grows with their square
PIECES = re.compile(r"\w+|\W")
MOST_RUNS = 20  # runs that are sampled on a task; the tables show all runs
MOST_MODELS = 20  # models with curves


def choose_models(tasks: TaskGroups) -> list[str]:
    """Return the MOST_MODELS models of lowest validation loss, in their order."""
    labels = [label for groups in tasks.values() for label in groups]
    groups = [group for groups in tasks.values() for group in groups.values()]
    chosen = list(dict.fromkeys(labels[place] for place in _by_model(groups)))[:MOST_MODELS]
    return [label for label in dict.fromkeys(labels) if label in chosen]


def choose_drawn(groups: Sequence[Group]) -> list[Group]:
    """Return at most MOST_RUNS runs in their groups.

    Groups take turns to get a run, the best group of each model first. A group with a lower validation loss precedes
    the other groups of its model. The runs of a group are spread evenly by validation loss, including the best and the
    worst.
    """
    counts = [0] * len(groups)
    turns = _by_model(groups)
    while turns and sum(counts) < MOST_RUNS:
        turns = [place for place in turns if counts[place] < len(groups[place].runs)]
        for place in turns[: MOST_RUNS - sum(counts)]:
            counts[place] += 1
    chosen = [
        Group(group.label, _best_to_worst(group.runs, count)) for group, count in zip(groups, counts, strict=True)
    ]
    return [group for group in chosen if group.runs]


def left_out(groups: Sequence[Group], drawn: Sequence[Group]) -> str:
    """Return a sentence about the runs that are not drawn; empty if all are drawn."""
    kept = {group.label: len(group.runs) for group in drawn}
    runs, shown = (sum(len(group.runs) for group in side) for side in (groups, drawn))
    parts = [
        f"{kept[group.label]} of the {len(group.runs)} runs of {group.label}"
        for group in groups
        if 0 < kept.get(group.label, 0) < len(group.runs)
    ]
    if missing := len(groups) - len(drawn):
        parts.append(f"none of {missing} other models of higher validation loss")
    said = f"{shown} of {runs} runs are sampled, the tables have all: {'; '.join(parts)}."
    return said if parts else ""


def _by_model(groups: Sequence[Group]) -> list[int]:
    """Return the indices of the groups: the best of each model, then the second best of each, and so on."""
    order = sorted(range(len(groups)), key=lambda place: min(map(_loss, groups[place].runs)))
    seen: Counter[str] = Counter()
    rank = {}
    for place in order:
        model = groups[place].runs[0].model
        rank[place] = seen[model]
        seen[model] += 1
    return sorted(order, key=lambda place: rank[place])


def _best_to_worst(runs: Sequence[SavedRun], count: int) -> list[SavedRun]:
    by_loss = sorted(runs, key=_loss)
    chosen = [by_loss[round(number * (len(runs) - 1) / max(1, count - 1))] for number in range(count)]
    return [run for run in runs if any(run is other for other in chosen)]


def _loss(run: SavedRun) -> float:
    return run.best[OBJECTIVE].value if OBJECTIVE in run.best else float("inf")


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
