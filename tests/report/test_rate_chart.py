"""The page of runs with several learning rates."""

import pytest

from tests.report.test_page import charts_of, marked_points
from tests.report.test_rates import LOSSES, leave
from tfm_blocks.cli import main


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
