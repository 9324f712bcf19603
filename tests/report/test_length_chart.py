"""Accuracy over test lengths in a report, and the size of a probe task in a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfm_blocks.report.charts import length_charts
from tfm_blocks.report.comparison import find_notes
from tfm_blocks.report.differences import Group
from tfm_blocks.runs.record import RunRecord


def run(name: str, task: str = "parity", *, seed: int = 1, size: str = "lite", **accuracy: float) -> RunRecord:
    values = {f"accuracy@{length[1:]}": value for length, value in accuracy.items()}
    settings = {"data.task": task, "data.size": size, "seed": seed}
    return RunRecord(Path(name), name, "done", "", settings=settings, values={"accuracy": 0.5, **values})


def test_a_line_goes_through_the_means_over_seeds_of_each_length() -> None:
    lstm = [run("a", x128=0.5, x40=1.0), run("b", seed=2, x128=0.7, x40=0.8)]
    tasks = {"parity": {"lstm": Group("", lstm), "attention": Group("", [run("c", x40=0.6, x128=0.5)])}}
    (chart,) = length_charts(tasks)
    assert (chart.title, chart.task) == ("test accuracy over length", "parity")
    drawn = {line.label: line for line in chart.lines}
    assert list(drawn["attention"].mean) == [0.6, 0.5] == list(drawn["attention"].low)
    assert list(drawn["lstm"].x["test length"]) == [40, 128] and drawn["lstm"].mean == pytest.approx([0.9, 0.6])
    assert list(drawn["lstm"].low) == [0.8, 0.5] and list(drawn["lstm"].high) == [1.0, 0.7]


def test_a_single_length_has_no_chart() -> None:
    tasks = {name: {"a": Group("", [one])} for name, one in (("mqar", run("c", "mqar", x64=1)), ("none", run("d")))}
    assert length_charts(tasks) == []


def test_a_comparison_names_the_size_of_its_probe_tasks() -> None:
    notes = list(find_notes([run("a"), run("b", size="paper")]))
    assert "probe tasks in the size lite: a" in notes and "probe tasks in the size paper: b" in notes
    dates = RunRecord(Path("e"), "e", "done", "", settings={"data.train": 200})
    assert not any("probe" in note for note in find_notes([RunRecord(Path("e"), "e", "done", ""), dates]))


def test_numbers_of_examples_that_differ_from_the_size_are_named() -> None:
    smaller = RunRecord(Path("a"), "a", "done", "", settings={"data.size": "lite", "data.train": 200, "data.val": None})
    assert "probe tasks in the size lite, with data.train=200: a" in list(find_notes([smaller]))
