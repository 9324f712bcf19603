"""A job: its process reads the checked config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import COMPOSER
from tests.sweep.jobs import Small, job_of
from tests.sweep.test_engine import run
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.run import compose_job, job_record, read_job
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.check import check_run
from tfm_blocks.runs.files import read_json
from tfm_blocks.sweep.checks import JobChecker
from tfm_blocks.sweep.command import make_trial
from tfm_blocks.sweep.folder import claim_sweep

TINY = [
    "layers=1", "d_model=16", "d_ff=16", "vocab=300", "data.train=200", "data.val=10", "data.test=10",
    "trainer.steps=2", "trainer.validate_sentences=2", "trainer.accelerator=cpu",
]  # fmt: skip


def written(path: Path, composed: Composed, **changes: object) -> Composed:
    path.write_text(json.dumps(job_record(composed, changes, ["python", "train.py"])))
    return read_job(path)[0]


def test_a_job_reads_the_checked_config_even_if_the_environment_changed(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "checked")
    composed = small("seed=7", "logger=wandb", "logger.wandb.entity=${oc.env:WHERE}", "logger.wandb.tags=['${name}']")
    monkeypatch.setenv("WHERE", "changed")
    restored = written(tmp_path / "job.json", composed, name="seed-7", sweep_name="seed")
    expected = {**composed.mapping, "name": "seed-7", "sweep_name": "seed"}
    expected["logger"]["wandb"]["tags"] = ["seed-7"]
    assert restored.mapping == expected and restored.choices == composed.choices
    assert restored.with_vocab(290).mapping["model"]["args"]["vocab"] == 290


def test_an_error_in_a_job_names_the_file_and_the_override_as_the_check_would(small: Small, tmp_path: Path) -> None:
    composed = small("heads=4")
    restored = written(tmp_path / "job.json", composed)
    path = ("model", "args", "heads")
    before, after = (one.sources.problem(path, "is wrong") for one in (composed, restored))
    assert before == after and "heads comes from the command line: heads=4" in str(after)


def test_a_job_names_the_plug_ins_of_its_own_model_and_the_command_that_trains_it_alone(
    small: Small, tmp_path: Path
) -> None:
    composed = small("plugins=[math]")
    job = job_of(composed, "plain")
    job.settings = job.settings.model_copy(update={"plugins": []})
    folder = claim_sweep(tmp_path, "x", [], "", ["python", "train.py"])
    restored, command = read_job(folder.write_job(job))
    assert (restored.mapping["plugins"], restored.mapping["name"], restored.mapping["sweep_name"]) == ([], "plain", "x")
    assert command == ["python", "train.py", "heads=2", "name=plain", "sweep.name=x"]


def test_jobs_with_equal_configs_are_equal_whatever_their_names(small: Small) -> None:
    configs = [job_of(small(text)).config for text in ("seed=1", "name=other", "seed=2")]
    assert configs[0] == configs[1] != configs[2]


@pytest.mark.grid
@pytest.mark.parametrize(
    "how",
    [
        ["heads=2,4"],
        ["heads=2,4", "sweep=random", "sweep.trials=2"],
        ["heads=2,4", "sweep=optuna", "sweep.trials=2", "sweep.halving=null"],
    ],
    ids=["grid", "random", "optuna"],
)
def test_a_sweep_trains_all_its_jobs_with_the_loggers_of_the_default_config(how: list[str], tmp_path: Path) -> None:
    """No override selects a logger, and each W&B run is in the sweep's group."""
    if "sweep=optuna" in how:
        pytest.importorskip("optuna")
    (tmp_path / "my_conf").mkdir()
    status, output = run(tmp_path, *how, "sweep.parallel=2", "sweep.name=x", base=TINY)
    assert status == 0 and "sweep: 2 of 2 runs done" in output, output
    assert len(list((tmp_path / "runs" / "x").glob("*/wandb/offline-run-*"))) == 2
    assert all(read_json(path)["state"] == "done" for path in (tmp_path / "runs" / "x").glob("*/status.json"))


@pytest.mark.slow
def test_added_seeds_train_only_new_jobs(tmp_path: Path) -> None:
    (tmp_path / "my_conf").mkdir()
    assert run(tmp_path, "heads=2,4", "seed=1,2", base=TINY)[0] == 0
    before = {path: path.stat().st_mtime for path in (tmp_path / "runs").glob("*/*/weights.safetensors")}
    status, output = run(tmp_path, "heads=2,4", "seed=1,2,3", base=TINY)
    assert status == 0 and "sweep: runs/heads_seed, 6 jobs, 4 done before" in output, output
    assert {path: path.stat().st_mtime for path in before} == before and len(before) == 4
    assert len(list((tmp_path / "runs" / "heads_seed").glob("*/weights.safetensors"))) == 6


def test_a_search_whose_conf_changes_starts_no_further_trial(small: Small) -> None:
    checker = JobChecker(COMPOSER, check_run, used={"heads"})
    sample = job_of(compose_job(["heads=2"], COMPOSER))
    assert make_trial(["heads"], sample, checker, 7, ["heads=4"]).name == "007_heads-4"
    with pytest.raises(ConfigError, match="a file of conf/ has changed since the search started"):
        make_trial(["heads"], job_of(small()), checker, 8, ["heads=4"])
