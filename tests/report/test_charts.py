"""Learning curves, accuracy over test lengths, losses over learning rates, and the size of a probe task."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.report.test_page import charts_of, marked_points
from tests.report.test_rates import LOSSES, leave
from tfm_blocks.cli import main
from tfm_blocks.report.charts import MOST_POINTS, length_charts, points
from tfm_blocks.report.comparison import find_notes
from tfm_blocks.report.differences import Group
from tfm_blocks.report.drawing import draw_lines, drawing_style
from tfm_blocks.runs.saved_run import SavedRun

ROWS = [
    *({"step": step, "train/loss": 9 - step / 100, "train/tokens": 10 * step, "train/seconds": step / 4} for step in (20, 40, 60)),
    {"step": 30, "val/loss": 2.0}, {"step": 60, "val/loss": 1.5},
]  # fmt: skip


def test_a_validation_is_placed_between_the_rows_with_the_progress_of_the_run():
    curve, every = points(ROWS, "val/loss")
    assert every == 1
    assert {name: list(values) for name, values in curve.items()} == {
        "steps": [30, 60], "tokens": [300, 600], "seconds": [7.5, 15], "y": [2.0, 1.5],
    }  # fmt: skip


def test_a_run_without_tokens_and_seconds_has_a_curve_over_steps_only():
    curve, _ = points([{"step": 30, "val/loss": 2.0}], "val/loss")
    assert np.isnan(curve["tokens"]).all() and list(curve["y"]) == [2.0]
    assert len(points([], "val/loss")[0]["y"]) == 0


@pytest.mark.parametrize("count", [MOST_POINTS, MOST_POINTS + 1, 12_345])
def test_a_long_curve_keeps_its_ends_and_has_points_that_were_measured(count):
    rows = [{"step": float(step), "train/loss": 1 / step} for step in range(1, count + 1)]
    curve, every = points(rows, "train/loss")
    assert len(curve["y"]) <= MOST_POINTS + 1 and (every == 1) == (count <= MOST_POINTS)
    assert curve["steps"][0] == 1 and curve["steps"][-1] == count
    assert np.array_equal(curve["y"], 1 / curve["steps"])


def run(name: str, task: str = "parity", *, seed: int = 1, size: str = "lite", **accuracy: float) -> SavedRun:
    values = {f"accuracy@{length[1:]}": value for length, value in accuracy.items()}
    settings = {"data.task": task, "data.size": size, "seed": seed}
    return SavedRun(Path(name), state="done", settings=settings, values={"accuracy": 0.5, **values})


def test_a_line_goes_through_the_means_over_seeds_of_each_length() -> None:
    lstm = [run("a", x128=0.5, x40=1.0), run("b", seed=2, x128=0.7, x40=0.8)]
    tasks = {"parity": {"lstm": Group("", lstm), "attention": Group("", [run("c", x40=0.6, x128=0.5)])}}
    (chart,) = length_charts(tasks)
    assert (chart.title, chart.task) == ("test accuracy over length", "parity")
    drawn = {line.label: line for line in chart.lines}
    assert list(drawn["attention"].mean) == [0.6, 0.5] == list(drawn["attention"].low)
    assert list(drawn["lstm"].x["test length"]) == [40, 128] and drawn["lstm"].mean == pytest.approx([0.9, 0.6])
    assert list(drawn["lstm"].low) == [0.8, 0.5] and list(drawn["lstm"].high) == [1.0, 0.7]


def test_lengths_have_the_scaled_accuracy_with_chance_and_ceiling_if_all_runs_have_it() -> None:
    one, other = run("a", x8=0.75, x16=0.5), run("b", "mqar")
    scaled = run("a", x8=0.75, x16=0.5)
    scaled.values |= {"scaled_accuracy@8": 0.5, "scaled_accuracy@16": 0.0}
    tasks = {"parity": {"a": Group("", [scaled])}, "mqar": {"a": Group("", [other])}}
    (chart,) = length_charts(tasks)
    assert (chart.title, chart.limits, list(chart.lines[0].mean)) == (
        "test scaled accuracy over length",
        (0, 1),
        [0.5, 0],
    )
    with drawing_style():
        (panel,) = draw_lines([chart]).axes
    low, high = panel.get_ylim()
    assert (
        low < 0 and high > 1 and {0, 1} <= {line.get_ydata()[0] for line in panel.lines if line.get_linestyle() == ":"}
    )
    tasks["parity"]["b"] = Group("", [one])
    assert length_charts(tasks)[0].title == "test accuracy over length", "not all runs have the scaled accuracy"


def test_a_single_length_has_no_chart() -> None:
    """A damaged run may have a length that is not a number."""
    damaged = run("c", "mqar", x64=1)
    damaged.values["accuracy@x"] = 0.5
    assert length_charts({"mqar": {"a": Group("", [damaged])}}) == []
    tasks = {name: {"a": Group("", [one])} for name, one in (("mqar", run("c", "mqar", x64=1)), ("none", run("d")))}
    assert length_charts(tasks) == []


def test_a_comparison_names_the_size_of_its_probe_tasks() -> None:
    notes = list(find_notes([run("a"), run("b", size="paper")]))
    assert "probe tasks in the size lite: a" in notes and "probe tasks in the size paper: b" in notes
    dates = SavedRun(Path("e"), state="done", settings={"data.train": 200})
    assert not any("probe" in note for note in find_notes([SavedRun(Path("e"), state="done"), dates]))
    smaller = SavedRun(Path("a"), state="done", settings={"data.size": "lite", "data.train": 200, "data.val": None})
    assert "probe tasks in the size lite, with data.train=200: a" in list(find_notes([smaller]))


@pytest.mark.grid
def test_the_page_draws_the_mean_loss_of_each_model_over_its_rates(tmp_path, capsys):
    for model, rates in LOSSES.items():
        for rate, losses in rates.items():
            for seed, loss in enumerate(losses, 1):
                leave(tmp_path / "runs", model, rate, seed, loss)
    main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "learning rates by the best val/loss" in text
    charts = {title: drawings for title, drawings in charts_of(text).items() if list(drawings) == ["schedule.peak"]}
    assert len(charts) == 2, "the validation loss and the score"
    losses = charts["best val/loss over schedule.peak"]["schedule.peak"]
    for model, rates in LOSSES.items():
        (x, means, *_), _ = marked_points(losses, model)
        assert list(x) == pytest.approx(sorted(rates))
        assert list(means) == pytest.approx([sum(values) / 2 for values in rates.values()])
