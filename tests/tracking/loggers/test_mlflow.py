"""The logger of MLflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfm_blocks.tracking.loggers import LoggedRun


@pytest.mark.grid
def test_a_score_of_a_length_has_a_key_that_mlflow_allows_and_is_logged_once(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from tfm_blocks.tracking.loggers.mlflow import MlflowLogger, MlflowSettings

    settings = MlflowSettings(experiment="test", uri=f"sqlite:///{tmp_path}/mlflow.db")
    for _ in range(2):
        logger = MlflowLogger(settings, LoggedRun(tmp_path, {}, {}, "abc"))
        logger.log_metrics({"test/accuracy@64": 0.5, "test/loss": 1.0}, 10)
        logger.close(0, "")
    for name in ("test/accuracy 64", "test/loss"):
        assert [entry.step for entry in logger.client.get_metric_history(logger.run_id, name)] == [10]
