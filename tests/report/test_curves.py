"""The points of learning curves."""

import numpy as np
import pytest

from tfm_blocks.report.charts import MOST_POINTS, points

ROWS = [
    *({"step": step, "train/loss": 9 - step / 100, "train/tokens": 10 * step, "train/seconds": step / 4} for step in (20, 40, 60)),
    {"step": 30, "val/loss": 2.0}, {"step": 60, "val/loss": 1.5}, {"val/loss": 7.0},
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
