"""The models that a page draws, the runs that it samples, and their outputs for lines on which the runs differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from tfm_blocks.errors import RunError
from tfm_blocks.metric_schema import OBJECTIVE
from tfm_blocks.report.differences import Group, Groups, Runs, TaskGroups
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


def choose_drawn(groups: Groups) -> list[Group]:
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
    drawn = []
    for group, count in zip(groups, counts, strict=True):
        by_loss, last = sorted(group.runs, key=_loss), len(group.runs) - 1
        chosen = {id(by_loss[round(number * last / max(1, count - 1))]) for number in range(count)}
        drawn.append(Group(group.label, [run for run in group.runs if id(run) in chosen]))
    return [group for group in drawn if group.runs]


def left_out(groups: Groups, drawn: Groups) -> str:
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
    return f"{shown} of {runs} runs are sampled, the tables have all: {'; '.join(parts)}." if parts else ""


def _by_model(groups: Groups) -> list[int]:
    """Return the indices of the groups: the best of each model, then the second best of each, and so on."""
    order = sorted(range(len(groups)), key=lambda place: min(map(_loss, groups[place].runs)))
    seen: Counter[str] = Counter()
    rank = {}
    for place in order:
        model = groups[place].runs[0].model
        rank[place] = seen[model]
        seen[model] += 1
    return sorted(order, key=lambda place: rank[place])


def _loss(run: SavedRun) -> float:
    return run.best[OBJECTIVE].value if OBJECTIVE in run.best else float("inf")


def samples_of(task: str, groups: Mapping[str, Group], most: int = MOST_SAMPLES) -> dict[str, Any] | None:
    """Return at most `most` lines of a task on which its runs differ, or any lines if they agree on all.

    Each line has its different outputs, the most frequent first, with the names of the models that have it, and their
    numbers of runs if not all runs of a model have it. None if no run has outputs.
    """
    labels = {run.folder: label for label, group in groups.items() for run in group.runs}
    outputs = common_test_set([run for group in groups.values() for run in group.runs])
    lines = list(zip(*outputs.values(), strict=True))
    if not lines:
        return None
    unlike = [place for place, row in enumerate(lines) if len({line.output for line in row}) > 1]
    names = [labels[folder] for folder in outputs]
    places = unlike or range(len(lines))
    count = min(most, len(places))
    spread = [places[number * len(places) // count] for number in range(count)]
    chosen = [_sample(place, lines[place], names) for place in spread]
    counts = {"runs": len(outputs), "total": len(lines), "alike": len(lines) - len(unlike)}
    return {"task": task, **counts, "lines": chosen}


def common_test_set(runs: Runs) -> dict[Path, Sequence[TranslatedLine]]:
    """Return the translations by run folder, of the runs with the same test set as the first run."""
    found: dict[Path, Sequence[TranslatedLine]] = {}
    for run in runs:
        with suppress(RunError):
            lines = read_translations(run.folder)
            first = next(iter(found.values()), lines)
            if [(line.source, line.reference) for line in lines] == [(line.source, line.reference) for line in first]:
                found[run.folder] = lines
    return found


def _sample(place: int, row: Sequence[TranslatedLine], names: Sequence[str]) -> dict[str, Any]:
    by_output: dict[str, Counter[str]] = {}
    for line, name in zip(row, names, strict=True):
        by_output.setdefault(line.output[:LONGEST], Counter())[name] += 1
    source, reference = row[0].source[:LONGEST], row[0].reference[:LONGEST]
    totals, outputs = Counter(names), []
    for output, having in sorted(by_output.items(), key=lambda item: -item[1].total()):
        shown = [
            name if count == totals[name] else f"{name} ({count} of {totals[name]})" for name, count in having.items()
        ]
        outputs.append({"pieces": mark(output, reference), "runs": having.total(), "names": ", ".join(shown)})
    return {"line": place + 1, "source": source, "reference": reference, "outputs": outputs}


def mark(output: str, reference: str) -> list[tuple[str, str]]:
    """Return the output in pieces, each with its kind: `same`, `added`, or `missing` if only the reference has it."""
    ours, theirs = PIECES.findall(output), PIECES.findall(reference)
    found = []
    for kind, a, b, c, d in SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes():
        if kind != "equal" and b > a:
            found.append(("missing", "".join(theirs[a:b])))
        if d > c:
            found.append(("same" if kind == "equal" else "added", "".join(ours[c:d])))
    return found
