from __future__ import annotations

import csv
from pathlib import Path

from tfm_blocks.metric_schema import columns
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.tracking.lightning_loggers import CsvLogger


def test_metrics_csv_has_one_header_and_stable_columns(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path / "metrics.csv", columns([], ["de"]))
    logger.log_metrics({"train/loss": 2.5, "train/lr": 0.1}, 10)
    CsvLogger(tmp_path / "metrics.csv", columns([], ["de"])).log_metrics({"val/bleu": 31.0}, 20)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", *columns([], ["de"])]
    assert [(row["step"], row["train/loss"], row["val/bleu"]) for row in rows] == [
        ("10", "2.5", ""),
        ("20", "", "31.0"),
    ]
    assert read_rows(tmp_path / "metrics.csv")[0] == {"step": 10, "train/loss": 2.5, "train/lr": 0.1}
