"""W&B, TensorBoard and MLflow have the values of metrics.csv."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from PIL import Image

from tests.launch.test_job import records, wandb_exit_code, wandb_summary
from tests.launch.test_resume import begin, go_on, handlers, state, stopping  # noqa: F401  a fixture
from tests.preloaded import run_python
from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.job import _wandb_id
from tfm_blocks.metric_schema import columns, find_key
from tfm_blocks.runs.files import read_json
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.runs.records import RunFile
from tfm_blocks.tracking.dashboard import FACTS, MEDIA, settings_logged, sweep_file
from tfm_blocks.tracking.loggers.wandb import WandbLogger
from tfm_blocks.training.checkpoints import PreemptedError

ROOT = Path(__file__).parents[2]
TIMES = ("train/seconds", "train/tokens_per_second", "train/waiting")  # a clock measures them, so a resume changes them
Values = dict[tuple[int, str], float]
Small = Callable[..., Composed]


def written(run: Path) -> Values:
    """Return all values of metrics.csv by step and key."""
    rows = read_rows(run / "metrics.csv")
    return {(int(row["step"]), name): value for row in rows for name, value in row.items() if name != "step"}


def in_wandb(parts: list[list[dict[str, Any]]]) -> Values:
    """Return all metrics in W&B, each of which occurs once, except the axis."""
    values: Values = {}
    for part in parts:
        for record in part:
            for name, value in record.get("history", {}).get("item", {}).items():
                if name.startswith(("train/", "val/", "test/")):
                    key = (record["history"]["item"]["_step"], name)
                    assert key not in values or name in ("train/tokens", "train/seconds"), f"{key} is there twice"
                    values[key] = float(value)
    return values


def of_kind(parts: list[list[dict[str, Any]]], kind: str) -> list[dict[str, Any]]:
    return [record[kind] for part in parts for record in part if record["type"] == kind]


def config_of(part: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the config of the run with later updates."""
    (run,) = of_kind([part], "run")
    updates = [one["update"] for one in of_kind([part], "config") if "update" in one]
    return {name: value for one in (run["config"]["update"], *updates) for name, value in one.items()}


@pytest.fixture
def stopped_and_resumed(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a run with all loggers that a signal stopped after step 5 and that then resumed to its end."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    loggers = ["logger=[wandb,tensorboard,mlflow]", "logger.wandb.artifact=true", "logger.wandb.tags=[mine]"]
    with pytest.raises(PreemptedError):
        begin(small(*stopping(5), *loggers, "trainer.log_every=1", "sweep.name=sizes"), tmp_path)
    go_on(tmp_path / "run", "plugins=[faulty]")
    yield tmp_path / "run"


@pytest.mark.grid
def test_every_logger_has_every_value_of_metrics_csv_once(stopped_and_resumed: Path) -> None:
    """Also check everything else that W&B shows, in one test, because the run takes long."""
    run = stopped_and_resumed
    expected = written(run)
    assert {name for _, name in expected} >= set(columns([], []))
    seconds = {place: expected.pop(place) for place in list(expected) if place[1] == "train/seconds"}
    parts = records(run)
    for values in (in_wandb(parts), in_tensorboard(run), in_mlflow(run)):
        assert {
            place for place in values if place in seconds
        } == seconds.keys()  # if a step has two rows, the value of either
        numbers = {place: value for place, value in values.items() if place not in seconds}
        assert numbers == pytest.approx(expected, rel=1e-6)  # TensorBoard holds float32
    _expect_sent_to_wandb(run, parts)


def in_tensorboard(run: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert {"samples/val/text_summary", "samples/test/text_summary", "config/text_summary"} <= set(
        events.Tags()["tensors"]
    )
    assert events.Tags()["images"] == ["attention/1", "attention/2"]
    scalars = [((one.step, name), one.value) for name in events.Tags()["scalars"] for one in events.Scalars(name)]
    assert len(dict(scalars)) == len(scalars)
    return dict(scalars)


def in_mlflow(run: Path) -> Values:
    from mlflow.tracking import MlflowClient

    client = MlflowClient("sqlite:///mlflow.db")
    (one,) = client.search_runs(["1"])
    assert (one.info.status, one.info.run_name) == ("FINISHED", "run")
    assert one.data.params["heads"] == "2" and one.data.tags["resumed"] == "1"
    scalars = [
        ((value.step, name), value.value)
        for name in one.data.metrics
        for value in client.get_metric_history(one.info.run_id, name)
    ]
    assert len(dict(scalars)) == len(scalars)
    assert {file.path for file in client.list_artifacts(one.info.run_id, "samples")} == {"samples/val", "samples/test"}
    return dict(scalars)


def _expect_sent_to_wandb(run: Path, parts: list[list[dict[str, Any]]]) -> None:
    assert [one.get("exit_code", 0) for one in of_kind(parts, "exit")] == [75, 0]
    (alert,) = of_kind(parts, "alert")
    assert (alert["title"], alert["text"]) == ("run was preempted", "the run was stopped by SIGTERM")
    assert len(of_kind(parts, "preempting")) == 1
    for one in of_kind(parts, "run"):
        assert (one["run_id"], one["run_group"], one["job_type"]) == (
            read_json(run / "run.json")["wandb_id"], "sizes", "train",
        )  # fmt: skip
        assert one["tags"] == ["mine"]
    defined = {one.get("name") or one["glob_name"]: one for one in of_kind(parts, "metric")}
    assert defined["val/bleu"]["summary"] == {"max": True} and defined["val/loss"]["summary"] == {"min": True}
    assert defined["val/bleu"]["step_metric"] == "train/tokens"
    (weights,) = [one for one in of_kind(parts, "artifact") if one["type"] == "model"]
    names = {one["path"] for one in weights["manifest"]["contents"]}
    assert names == {"config.yaml", "model.json", "tokenizer.json", "weights.safetensors"}
    _expect_media(run, parts)
    _expect_facts(run, [config_of(part) for part in parts])


def _expect_media(run: Path, parts: list[list[dict[str, Any]]]) -> None:
    items = [one["item"] for one in of_kind(parts, "history")]
    media = [name.removesuffix("._type") for item in items for name in item if name.endswith("._type")]
    assert set(media) == set(MEDIA)
    assert [media.count(name) for name in ("samples/val", "samples/test", "attention/1")] == [3, 1, 3]
    tables = [json.loads(path.read_text()) for path in (run / "wandb").rglob("samples/val_*.table.json")]
    assert len(tables) == 3
    assert len({tuple((row[0], row[2]) for row in table["data"]) for table in tables}) == 1, "the same sentences"


def _expect_facts(run: Path, configs: list[dict[str, Any]]) -> None:
    kept = RunFile.read(run)
    assert configs[0]["facts"] == kept.facts, "the folder and the loggers have the same"
    assert configs[1]["facts"] == kept.newest_facts
    for number, config in enumerate(configs):
        facts = config["facts"]
        assert set(facts) == set(FACTS)
        assert (facts["model"], facts["seed"], facts["resumed"]) == ("tiny", 1, number)
        assert facts["parameters"] == sum(facts["parameters_by_node"].values())
        assert (config["model"], config["heads"], config["schedule"]["warmup"]) == ("tiny", 2, 2)
        assert {name for name, value in config.items() if not isinstance(value, dict)} <= settings_logged([CONF])
    assert configs[0]["facts"]["config_hash"] == configs[1]["facts"]["config_hash"]
    assert yaml.safe_load((run / "config.yaml").read_text())["vocab"] == configs[1]["vocab"]


@pytest.mark.grid
def test_wandb_has_the_keys_of_the_schema_and_the_weights_only_on_request(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also check the attention pictures of two sentences, in one test, because the run takes long."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    begin(small("logger=wandb", "data.val=200"), tmp_path)  # validates after steps 4 and 6
    run = tmp_path / "run"
    _expect_summaries(run)
    assert {one["type"] for one in of_kind(records(run), "artifact")} == {"run_table"}
    for sentence in (1, 2):
        paths = list((run / "wandb").rglob(f"images/attention/{sentence}_*.png"))
        assert len(paths) == 2 and len({Image.open(path).size for path in paths}) == 1
    assert "sizes do not match" not in caplog.text  # W&B's warning before it shows pictures incorrectly


def _expect_summaries(run: Path) -> None:
    """Check that the summary has the schema's value for each key, and otherwise only media."""
    summary = wandb_summary(run)["summary"]
    curves: dict[str, list[float]] = {}
    for (_, name), value in sorted(written(run).items()):
        curves.setdefault(name, []).append(value)
    stands = {"min": min, "max": max, "last": lambda values: values[-1]}
    for name, values in curves.items():
        kind = find_key(name).summary
        shown = summary[name] if kind == "last" else summary[name][kind]
        assert shown == pytest.approx(stands[kind](values), rel=1e-9), name
    assert len(set(curves["val/loss"])) == 2, "the lowest is one of several"
    assert {name for name in summary if not name.startswith("_")} == curves.keys() | set(MEDIA)


@pytest.mark.grid
def test_a_killed_run_resumes_in_wandb_without_gaps_or_repeated_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that W&B had not written before the kill are sent again from metrics.csv."""
    fault = "++model.graph.bad={block: faulty, harm: end, sound: 5, after: src_pos}"
    first = [
        "name=run", fault, "d_model=16", "d_ff=24", "heads=2", "layers=1", "vocab=300", "data.train=200", "data.val=20",
        "data.test=10", "data.step_tokens=240", "data.max_length=60", "trainer.steps=8", "trainer.validate_every=3",
        "trainer.log_every=1", "trainer.validate_sentences=2", "trainer.accelerator=cpu", "logger=wandb",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "TFM_BLOCKS_CACHE": str(tmp_path / "cache"),
        "WANDB_MODE": "offline",
    }
    done = run_python([ROOT / "train.py", *first, "plugins=[faulty]"], tmp_path, environment, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = tmp_path / "runs" / "run"
    for name in ("WANDB_MODE", "TFM_BLOCKS_CACHE"):
        monkeypatch.setenv(name, environment[name])
    go_on(run, "plugins=[faulty]")
    parts = records(run)
    assert len(parts) == 2
    expected, logged = written(run), in_wandb(parts)
    assert logged.keys() == expected.keys()
    for key, value in expected.items():
        assert key[1] in TIMES or math.isclose(logged[key], value, rel_tol=0)


LOST = "++model.graph.lost={block: faulty, harm: lose, sound: 2, after: src_pos}"
EVERY_STEP = ["plugins=[faulty]", "trainer.steps=4", "trainer.validate_every=4", "trainer.log_every=1"]


@pytest.fixture
def losing(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Composed]:
    """Compose a run that in its third step loses MLflow's database, TensorBoard's folder and its own config.yaml."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOSE", os.pathsep.join(["mlflow.db", "run/tensorboard", "run/config.yaml"]))
    uri = f"logger.mlflow.uri=sqlite:///{tmp_path}/mlflow.db"
    loggers = "logger=[wandb,tensorboard,mlflow]", "logger.wandb.artifact=true", uri
    return lambda *overrides: small(*EVERY_STEP, LOST, *loggers, *overrides)


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard writes in a thread
def test_a_failing_logger_is_reported_once_and_metrics_csv_is_complete(
    losing: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(losing(), tmp_path)
    run = tmp_path / "run"
    status = read_json(run / "status.json")
    assert status["state"] == "done" and status["scores"]["test/loss"] > 0
    expected = written(run)
    assert {step for step, _ in expected} == {1, 2, 3, 4}
    parts = records(run)
    assert in_wandb(parts) == pytest.approx(expected), "one that is not lost has all"
    assert [one.get("exit_code", 0) for one in of_kind(parts, "exit")] == [0]
    warnings = capsys.readouterr().err.splitlines()
    lost = [line.removeprefix("warning: ").partition(" (")[0] for line in warnings]
    assert {"W&B lost the weights", "TensorBoard lost metrics", "MLflow lost metrics"} <= set(lost)
    assert "MLflow lost the end of the run" in lost and len(lost) == len(set(lost))
    assert all(line.endswith("); the run continues, and metrics.csv has every value") for line in warnings)


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("harm", "kind", "code"), [("error", RuntimeError, 1), ("stop", PreemptedError, 75)])
def test_a_failing_logger_does_not_change_how_a_run_ends(
    losing: Small, tmp_path: Path, harm: str, kind: type[BaseException], code: int
) -> None:
    with pytest.raises(kind, match="the last rank broke" if code == 1 else "stopped by SIGTERM"):
        begin(losing(f"++model.graph.bad={{block: faulty, harm: {harm}, sound: 3, after: lost}}"), tmp_path)
    assert state(tmp_path / "run") == ("failed" if code == 1 else "preempted")
    assert wandb_exit_code(tmp_path / "run") == code


@pytest.mark.grid
def test_a_logger_that_cannot_start_ends_the_run_before_the_first_step_and_closes_the_others(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(ConfigError, match=r"logger\.mlflow: cannot be opened: .*'nowhere://here'"):
        begin(small("logger=[wandb,mlflow]", "logger.mlflow.uri=nowhere://here"), tmp_path)
    run = tmp_path / "run"
    assert state(run) == "failed" and wandb_exit_code(run) == 2
    assert not (run / "metrics.csv").exists() and not list((run / "checkpoints").iterdir())
    go_on(run, "logger=[tensorboard]", "trainer.steps=1")
    assert state(run) == "done" and (run / "tensorboard").is_dir(), "a resume can choose others"
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1


@pytest.mark.grid
def test_a_signal_while_loggers_are_closed_leaves_a_run_done(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    close = WandbLogger.close

    def close_slowly(logger: WandbLogger, exit_code: int, reason: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        close(logger, exit_code, reason)

    monkeypatch.setattr(WandbLogger, "close", close_slowly)
    begin(small("logger=wandb", "trainer.steps=1"), tmp_path)
    assert state(tmp_path / "run") == "done"


@pytest.mark.grid
def test_a_run_of_a_wandb_agent_has_the_agents_id_and_values(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B drops config values under keys that a sweep sets, such as the settings of a swept optimizer."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args
    from wandb.sdk.lib.config_util import save_config_file_from_dict

    arguments = [
        "model=tiny", "heads=2,4", "optimizer=adamw,adam", "optimizer.eps=1e-9,1e-8", "trainer.steps=1,2", "data.test=null",
        "logger=wandb",
    ]  # fmt: skip
    parameters = yaml.safe_load(sweep_file(parse_request(["-m", *arguments]), "grid", "val/loss", "project"))[
        "parameters"
    ]
    chosen = {key: {"value": one["values"][-1] if "values" in one else one["value"]} for key, one in parameters.items()}
    save_config_file_from_dict(str(tmp_path / "of_agent.yaml"), chosen)
    own = {"SWEEP_ID": "of4gent", "RUN_ID": "0123abcd", "SWEEP_PARAM_PATH": str(tmp_path / "of_agent.yaml")}
    for name, value in {**own, "MODE": "offline"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # its service read another environment
    overrides = create_sweep_command_args({"args": chosen})["args_no_hyphens"]
    composed = small(*overrides, "trainer.validate_sentences=0")
    begin(composed, tmp_path)
    wandb.teardown()
    (part,) = records(tmp_path / "run")
    (one,) = of_kind([part], "run")
    assert (one["sweep_id"], one["run_id"]) == ("of4gent", "0123abcd")
    assert read_json(tmp_path / "run" / "run.json")["wandb_id"] == "0123abcd"
    config = config_of(part)
    assert (config["model"], config["heads"]) == ("tiny", 4) and "src_emb" in config["graph"]["graph"]
    assert config["trainer.steps"] == config["trainer"]["steps"] == 2
    settings = composed.mapping["optimizer"]
    assert (config["optimizer"], settings["eps"]) == ("adam", 1e-8)
    assert {name: config[f"optimizer.{name}"] for name in settings} == settings
    assert (config["data.test"], config["data"]["test"]) == ("null", None)


def test_without_an_agent_the_run_ignores_its_id(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "of-another-run")
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    assert _wandb_id() != _wandb_id() != "of-another-run"


def test_seeds_names_loggers_and_keys_of_a_resume_do_not_change_the_config_hash(small: Small) -> None:
    from tfm_blocks.launch.facts import config_hash

    one = config_hash(small("seed=1").mapping)
    for override in ("seed=2", "name=other", "logger=csv", "trainer.workers=1"):
        assert config_hash(small(override).mapping) == one
    for override in ("heads=4", "trainer.steps=99", "trainer.average=2"):
        assert config_hash(small(override).mapping) != one


def test_a_run_without_a_sweep_has_no_group(small: Small) -> None:
    assert small("logger=wandb").mapping["logger"]["wandb"]["group"] is None
