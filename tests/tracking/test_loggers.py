"""The loggers that a config can name, and metrics.csv, which every run writes."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tfm_blocks.compose.folders import CONF, list_options
from tfm_blocks.metric_schema import columns
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.tracking.lightning_loggers import CsvLogger, FaultTolerantLogger
from tfm_blocks.tracking.loggers import LOGGERS, RunLogger

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


class BrokenPictures(RunLogger):
    name = "W&B"

    def __init__(self) -> None:
        self.steps: list[int | None] = []

    def log_pictures(self, pictures: Mapping[str, bytes], step: int) -> None:
        time.sleep(0.2)
        raise OSError("timeout")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.steps.append(step)


def test_what_is_dropped_after_an_error_has_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    logger = FaultTolerantLogger(inner := BrokenPictures())
    logger.log_metrics({"a": 1.0}, 1)
    logger.log_pictures({"p": b""}, 1)
    for step in (2, 3):
        logger.log_metrics({"a": 1.0}, step)
    assert inner.steps == [1]
    lost = [line.partition("; the run continues")[0] for line in capsys.readouterr().err.splitlines()]
    assert lost == [
        "warning: W&B lost pictures (OSError: timeout)",
        "warning: W&B lost metrics (not sent for 4 s after an error)",
    ]


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
