"""debug=fast and debug=overfit, as typed by users."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.preloaded import run_python
from tests.test_train import ROOT
from tfm_blocks.runs.metrics import read_rows


def train(folder: Path, *overrides: str) -> Path:
    """Train and return the run folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "TFM_BLOCKS"))}
    environment |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
    (folder / "tmp").mkdir()
    command = [ROOT / "train.py", "name=run", "trainer.accelerator=cpu", *overrides]
    done = run_python(command, folder, environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "run"


@pytest.mark.grid
@pytest.mark.parametrize("experiment", [None, "multi30k"])
def test_fast_does_five_steps_of_everything_and_leaves_no_cache(tmp_path: Path, experiment: str | None) -> None:
    overrides = [
        "data.train=100",
        "data.val=40",
        "data.test=40",
        "layers=1",
        "d_model=16",
        "d_ff=16",
        "heads=2",
        "vocab=300",
    ]
    if experiment:
        for split in ("train", "val", "test_2016_flickr"):
            for side, line in (("en", "a red house number {}"), ("de", "ein rotes Haus Nummer {}")):
                text = "".join(f"{line.format(number)}\n" for number in range(100))
                (tmp_path / f"{split}.{side}").write_text(text)
        overrides = [f"experiment={experiment}", f"data.dir={tmp_path}", "++data.train={src: train.en, tgt: train.de}",
                 "++data.val={src: val.en, tgt: val.de}",
                 "++data.test={src: test_2016_flickr.en, tgt: test_2016_flickr.de}"]  # fmt: skip
    run = train(tmp_path, "debug=fast", *overrides)
    assert json.loads((run / "status.json").read_text())["steps"] == 5
    logged = read_rows(run / "metrics.csv")
    assert [row["step"] for row in logged if "train/loss" in row] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in logged if "val/bleu" in row] == [2, 4, 5]
    assert len([row for row in logged if "test/bleu" in row]) == 1
    assert not (tmp_path / "cache" / "tfm-blocks").exists() and not (run / "wandb").exists()
    assert not list((tmp_path / "tmp").glob("tfm-blocks*"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "moe"])
def test_overfit_brings_one_batch_to_zero_loss(tmp_path: Path, model: str) -> None:
    run = train(tmp_path, "debug=overfit", f"model={model}", "layers=1", "d_model=64", "d_ff=64", "heads=4")
    losses = [row["train/loss"] for row in read_rows(run / "metrics.csv") if "train/loss" in row]
    assert losses[0] > 1 and losses[-1] < 0.02
