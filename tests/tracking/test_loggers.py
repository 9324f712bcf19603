"""The loggers that a config can name, and metrics.csv, which every run writes."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from tfm_blocks.compose.folders import CONF, list_options
from tfm_blocks.metric_schema import columns
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.tracking.lightning_loggers import CsvLogger
from tfm_blocks.tracking.loggers import LOGGERS

LIBRARIES = ("lightning", "wandb", "mlflow", "tensorboard")


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


def test_every_logger_has_a_config_file() -> None:
    assert LOGGERS.keys() == list_options("logger", [CONF]).keys()


def test_settings_of_loggers_are_read_without_their_libraries() -> None:
    code = (
        "import sys; from tfm_blocks.tracking.loggers import LoggerSettings; "
        "LoggerSettings.model_validate({'wandb': {'project': 'p', 'entity': None}}); "
        f"print([name for name in {LIBRARIES} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
