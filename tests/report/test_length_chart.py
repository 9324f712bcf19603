"""Accuracy over test lengths in a report, and the size of a probe task in a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tfm_blocks.report.comparison import find_notes
from tfm_blocks.report.differences import Group
from tfm_blocks.report.length_chart import accuracy_by_length, length_charts
from tfm_blocks.runs.record import RunRecord


def run(name: str, task: str = "parity", *, seed: int = 1, size: str = "lite", **accuracy: float) -> RunRecord:
    values = {f"accuracy@{length[1:]}": value for length, value in accuracy.items()}
    settings = {"data.task": task, "data.size": size, "seed": seed}
    return RunRecord(Path(name), name, "done", "", settings=settings, values={"accuracy": 0.5, **values})


def lines(chart: Any) -> dict[str, tuple[list[float], list[float]]]:
    """The points of each line of a chart, by its name."""
    found = {}

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            attributes = value.get("attributes", {})
            if value.get("name") == "GlyphRenderer" and attributes["glyph"]["name"] == "Line":
                data = dict(attributes["data_source"]["attributes"]["data"]["entries"])
                found[attributes["name"]] = data["x"], data["y"]
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(chart.item)
    return found


def test_a_line_goes_through_the_means_over_seeds_of_each_length() -> None:
    lstm = [run("a", x128=0.5, x40=1.0), run("b", seed=2, x128=0.7, x40=0.8)]
    groups = [Group("lstm", lstm), Group("attention", [run("c", x40=0.6, x128=0.5)])]
    (chart,) = length_charts(groups)
    assert chart.title == "test accuracy over length: parity, lite"
    drawn = lines(chart)
    assert drawn["attention"] == ([40, 128], [0.6, 0.5])
    assert drawn["lstm"][0] == [40, 128] and drawn["lstm"][1] == pytest.approx([0.9, 0.6])


def test_each_task_and_size_has_a_chart_and_a_single_length_has_none() -> None:
    runs = [run("a", x1=1, x2=1), run("b", size="paper", x1=1, x2=1), run("c", "mqar", x64=1), run("d")]
    assert [chart.title.partition(": ")[2] for chart in length_charts([Group(one.name, [one]) for one in runs])] == [
        "parity, lite",
        "parity, paper",
    ]
    assert accuracy_by_length(runs[3]) == {}


def test_a_comparison_names_the_size_of_its_probe_tasks() -> None:
    notes = list(find_notes([run("a"), run("b", size="paper")]))
    assert "probe tasks in the size lite: a" in notes and "probe tasks in the size paper: b" in notes
    assert not any("probe" in note for note in find_notes([RunRecord(Path("e"), "e", "done", "")]))
