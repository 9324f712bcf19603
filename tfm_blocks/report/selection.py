"""The choice of models that a page draws, and of runs that it samples: some of every model, best to worst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tfm_blocks.metric_schema import OBJECTIVE
from tfm_blocks.report.differences import Group
from tfm_blocks.report.model_grid import TaskGroups
from tfm_blocks.runs.saved_run import SavedRun

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
    chosen = [Group(group.label, _spread(group.runs, count)) for group, count in zip(groups, counts, strict=True)]
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


def _spread(runs: Sequence[SavedRun], count: int) -> list[SavedRun]:
    by_loss = sorted(runs, key=_loss)
    chosen = [by_loss[round(number * (len(runs) - 1) / max(1, count - 1))] for number in range(count)]
    return [run for run in runs if any(run is other for other in chosen)]


def _loss(run: SavedRun) -> float:
    return run.best[OBJECTIVE].value if OBJECTIVE in run.best else float("inf")
