"""The page of runs with several learning rates in a browser."""

import pytest

from tests.browser import browser
from tests.report.test_page import complaints, show
from tests.report.test_rates import LOSSES, leave
from tfm_blocks.cli import main

LINES = """
return Bokeh.documents.flatMap(one => [...one.all_models])
  .filter(one => one.type === 'GlyphRenderer' && one.glyph.type === 'Line' && !('steps' in one.data_source.data))
  .map(one => [one.name, [...one.data_source.data['schedule.peak']], [...one.data_source.data.mean], one.glyph.x.field])
"""


@pytest.mark.grid
def test_the_page_draws_the_mean_loss_of_each_model_over_its_rates(tmp_path, capsys):
    for model, rates in LOSSES.items():
        for rate, losses in rates.items():
            for seed, loss in enumerate(losses, 1):
                leave(tmp_path / "runs", model, rate, seed, loss)
    main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")])
    with browser() as opened:
        show(opened, tmp_path / "page.html")
        opened.execute_script("document.querySelector('input[name=axis][value=tokens]').click()")
        lines = opened.execute_script(LINES)
        assert complaints(opened) == []
        assert "learning rates by the best val/loss" in opened.page_source
    assert len(lines) == 4, "the validation loss and the score of each model"
    for (name, x, means, field), (model, rates) in zip(lines, LOSSES.items(), strict=False):
        assert (name, x, field) == (model, pytest.approx(sorted(rates)), "schedule.peak")
        assert means == pytest.approx([sum(losses) / 2 for losses in rates.values()])
