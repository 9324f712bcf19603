"""The fraction of padding in batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.training.test_module import feed_of, make
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.plan import Ranks
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.job import train
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.training.data import TrainStream

MULTI30K = os.environ.get("TFM_BLOCKS_MULTI30K")

SPLITS = {"train": "tok/train.lc.norm.tok", "val": "tok/val.lc.norm.tok", "test": "tok/test_2016_flickr.lc.norm.tok"}


def share(composed: Composed, steps: int) -> float:
    """Return the fraction of padding in the first steps, from the lengths of their rows."""
    feed = feed_of(make(composed)[1])
    rows = [rows_B for step in islice(feed.plan(seed=1, epoch=0), steps) for rows_B in step.share(Ranks(0, 1))]
    widths_NC = feed.layout.widths_NC(feed.corpus)
    cells = sum(len(rows_B) * int(widths_NC[rows_B].max(0).sum()) for rows_B in rows)
    return 1 - sum(int(widths_NC[rows_B].sum()) for rows_B in rows) / cells


@pytest.mark.grid
def test_the_logged_share_matches_the_steps_since_the_last_row(small: Callable[..., Composed], tmp_path: Path) -> None:
    composed = small("trainer.log_every=2", "trainer.steps=2", "trainer.validate_every=2", "data.batch_tokens=200")
    train(check_run(composed), tmp_path)
    logged = read_rows(tmp_path / "run" / "metrics.csv")[0]["train/padding"]
    assert logged == pytest.approx(share(composed, 2), abs=1e-12)
    assert 0 < logged < 0.5


@pytest.mark.skipif(not MULTI30K, reason="set TFM_BLOCKS_MULTI30K to the folder of the corpus")
def test_less_than_a_tenth_of_multi30k_is_padding(small: Callable[..., Composed]) -> None:
    files = [f"data.{name}={{src: {file}.en.gz, tgt: {file}.de.gz}}" for name, file in SPLITS.items()]
    sizes = ["data.step_tokens=4096", "data.batch_tokens=8192", "data.max_length=128"]
    composed = small("data=text", f"data.dir={MULTI30K}", *files, *sizes)
    stream = TrainStream(feed_of(make(composed)[1]), seed=1, start=0, ranks=Ranks())
    counts = [step.padding for step in islice(stream, 100)]
    padding, cells = map(sum, zip(*counts, strict=True))
    print(f"padding: {padding / cells:.1%}")
    assert padding / cells < 0.1
