"""Log to MLflow with Lightning's logger."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from io import BytesIO

import yaml
from PIL import Image

from tfm_blocks.config.settings import Filled, Settings
from tfm_blocks.errors import PREEMPTED
from tfm_blocks.metric_schema import IN_EVERY_ROW
from tfm_blocks.tracking.loggers import LoggedRun, LoggerKind, RunLogger, TranslationSample

LOCAL = "sqlite:///mlflow.db"  # where `mlflow ui` looks
TAG = "tfm_blocks_run"
LONGEST_TAG = 5000
REFUSED = re.compile("[^a-zA-Z0-9_/. -]")  # letters that Lightning would remove from the name of a metric
ENVIRONMENT = {  # defaults for variables that are not set
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # about 15 s; MLflow's seven retries would block a step for four minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the last line of a run is its next command
}
STATES = {0: "FINISHED", PREEMPTED: "KILLED"}  # by exit status; any other is FAILED


class MlflowSettings(Settings):
    """MLflow. uri: the server or database; null: MLFLOW_TRACKING_URI, or else mlflow.db in the current folder."""

    experiment: Filled
    uri: Filled | None


class MlflowLogger(RunLogger):
    """Log to one MLflow run, which a resume finds by `id`; no value of a step is logged twice.

    The config becomes parameters, which MLflow does not allow to change. The `facts` become tags.
    """

    name = "MLflow"
    shows_pictures = True

    def __init__(self, settings: MlflowSettings, run: LoggedRun) -> None:
        from lightning.pytorch.loggers import MLFlowLogger
        from mlflow.tracking import MlflowClient

        for noisy in ("alembic", "mlflow.store.db.utils", "urllib3.connectionpool", "lightning.pytorch.loggers.mlflow"):
            logging.getLogger(noisy).setLevel(logging.CRITICAL)  # FaultTolerantLogger reports errors
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or LOCAL
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(settings.experiment)
        known = client.search_runs([experiment.experiment_id], f"tags.{TAG} = '{run.id}'") if experiment else []
        run_id = str(known[0].info.run_id) if known else None  # of the run that was logged before a resume
        self.inner = MLFlowLogger(settings.experiment, run.folder.name, uri, tags={TAG: run.id}, run_id=run_id)
        self.run_id = str(self.inner.run_id)
        self.client: MlflowClient = self.inner.experiment
        if run_id:
            self.client.update_run(run_id, "RUNNING")
        else:
            self.inner.log_hyperparams(dict(run.config))
        for name, value in run.facts.items():
            text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).strip("\n.")
            self.client.set_tag(self.run_id, name, text[:LONGEST_TAG])
        self._steps: dict[str, set[int]] = {}
        print(f"MLflow: run {self.run_id} of {settings.experiment}")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        metrics = {REFUSED.sub(" ", name): value for name, value in metrics.items()}
        for name in metrics.keys() - self._steps.keys():  # the steps before a resume too
            self._steps[name] = {entry.step for entry in self.client.get_metric_history(self.run_id, name)}
        new = {name: value for name, value in metrics.items() if step not in self._steps[name]}
        if new.keys() - IN_EVERY_ROW:
            self.inner.log_metrics(new, step)
            for name in new:
                self._steps[name].add(step or 0)

    def log_samples(self, split: str, samples: Sequence[TranslationSample], step: int) -> None:
        lines = ["source\toutput\treference", *("\t".join(sample) for sample in samples)]
        self.client.log_text(self.run_id, "\n".join(lines) + "\n", f"samples/{split}/step-{step:08d}.tsv")

    def log_pictures(self, pictures: Mapping[str, bytes], step: int) -> None:
        for name, picture in pictures.items():
            image = Image.open(BytesIO(picture)).convert("RGB")
            self.client.log_image(self.run_id, image, f"{name}/step-{step:08d}.png")

    def close(self, exit_code: int, reason: str) -> None:
        if exit_code:
            self.client.set_tag(self.run_id, "reason", reason[:LONGEST_TAG])
        self.inner.finalize(STATES.get(exit_code, "FAILED"))


LOGGER = LoggerKind(MlflowSettings, MlflowLogger, extra="mlflow")
