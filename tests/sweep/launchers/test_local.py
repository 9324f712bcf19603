"""Jobs get their share of this machine; a script that prints its environment replaces the training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.jobs import text_of, until
from tfm_blocks.launch.check import available_cores
from tfm_blocks.sweep.launcher import Worker
from tfm_blocks.sweep.launchers import local
from tfm_blocks.training.settings import TrainerSettings

SEES = "echo threads $OMP_NUM_THREADS, devices $CUDA_VISIBLE_DEVICES; until [ -e {} ]; do sleep 0.05; done"
Start = Callable[..., Worker]


@pytest.fixture
def open_launcher(small: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Start]:
    """Return a function that opens a launcher for some devices and cores, and returns a function that starts its jobs."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    trainer = small().mapping["trainer"]

    def open_launcher(parallel: int, devices: str, cores: int = available_cores(), **environment: str) -> Start:
        for name, value in {"CUDA_VISIBLE_DEVICES": devices, **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(local, "accelerator", lambda: "cuda")
        monkeypatch.setattr(local, "device_count", lambda kind: len(devices.split(",")))
        monkeypatch.setattr(local, "available_cores", lambda: cores)
        launcher = local.LocalLauncher(parallel)

        def start(name: str, **changes: Any) -> Worker:
            command = ["bash", "-c", changes.pop("script", SEES).format(tmp_path / f"{name}.go")]
            settings = TrainerSettings.model_validate(trainer | {"accelerator": "cuda", "devices": 1} | changes)
            return launcher.start(name, command, tmp_path / f"{name}.log", settings)

        return start

    return open_launcher


def seen(folder: Path, name: str) -> str:
    return until(lambda: text_of(folder / f"{name}.log")).strip()


def end(folder: Path, name: str, worker: Worker) -> None:
    (folder / f"{name}.go").touch()
    assert until(worker.ended) == 0


def test_jobs_get_a_share_of_the_cores_and_a_device_that_is_then_reused(
    open_launcher: Callable[..., Start], tmp_path: Path
) -> None:
    start = open_launcher(3, "5,GPU-8a", cores=8)
    workers = {name: start(name) for name in ("first", "second")}
    assert [seen(tmp_path, name) for name in workers] == ["threads 2, devices 5", "threads 2, devices GPU-8a"]
    end(tmp_path, "second", workers["second"])
    workers["third"] = start("third")
    assert seen(tmp_path, "third") == "threads 2, devices GPU-8a"
    end(tmp_path, "first", workers["first"])
    end(tmp_path, "third", workers["third"])


def test_more_jobs_than_devices_share_them_and_jobs_without_devices_keep_the_users_setting(
    open_launcher: Callable[..., Start], tmp_path: Path
) -> None:
    start = open_launcher(2, "0,1,2,3")
    workers = {"two": start("two", devices=2), "one": start("one"), "most": start("most", devices=2)}
    workers["none"] = start("none", accelerator="cpu")
    devices = [seen(tmp_path, name).partition(", ")[2] for name in workers]
    assert devices == ["devices 0,1", "devices 2", "devices 3,0", "devices 0,1,2,3"]
    for name, worker in workers.items():
        end(tmp_path, name, worker)


def test_a_job_that_cannot_start_uses_no_device(open_launcher: Callable[..., Start], tmp_path: Path) -> None:
    start = open_launcher(2, "0,1")
    with pytest.raises(FileNotFoundError):
        start("missing/job")
    worker = start("job")
    assert seen(tmp_path, "job").endswith("devices 0")
    end(tmp_path, "job", worker)


@pytest.mark.parametrize(("parallel", "environment", "threads"), [(1, {}, ""), (4, {"OMP_NUM_THREADS": "3"}, "3")])
def test_threads_are_unchanged_for_one_job_at_a_time_or_if_the_user_set_them(
    parallel: int, environment: dict[str, str], threads: str, open_launcher: Callable[..., Start], tmp_path: Path
) -> None:
    worker = open_launcher(parallel, "0", cores=8, **environment)("x")
    assert seen(tmp_path, "x") == f"threads {threads}, devices 0"
    end(tmp_path, "x", worker)


def test_the_environment_of_a_job_has_no_launcher_and_no_other_run(
    open_launcher: Callable[..., Start], tmp_path: Path
) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_NAME NODE_RANK MASTER_ADDR MASTER_PORT"
    names += " TORCHELASTIC_RUN_ID PL_GLOBAL_SEED WANDB_SERVICE WANDB_RUN_ID"
    kept = {"WANDB_API_KEY": "k", "WANDB_MODE": "offline", "SLURM_JOB_ID": "1"}
    start = open_launcher(1, "0", **dict.fromkeys(names.split(), "1"), **kept)
    assert until(start("x", script="env > {}; echo done").ended) == 0
    environment = dict(line.partition("=")[::2] for line in (tmp_path / "x.go").read_text().splitlines())
    assert environment.keys().isdisjoint(names.split()) and kept.items() <= environment.items()
