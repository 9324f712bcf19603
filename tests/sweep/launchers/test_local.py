"""Jobs get their share of this machine; a script that prints its environment replaces the training."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.test_supervisor import LIMIT
from tfm_blocks.launch.check import available_cores
from tfm_blocks.sweep.launcher import Worker
from tfm_blocks.sweep.launchers import local
from tfm_blocks.sweep.launchers.local import LocalLauncher
from tfm_blocks.training.settings import TrainerSettings

SEES = "echo threads $OMP_NUM_THREADS, devices $CUDA_VISIBLE_DEVICES; until [ -e {} ]; do sleep 0.05; done"
Start = Callable[..., Worker]


@pytest.fixture
def start(small: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that starts a job; two may run concurrently, and two devices are visible."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setattr(local, "accelerator", lambda: "cuda")
    monkeypatch.setattr(local, "device_count", lambda kind: 2)
    launcher, trainer = LocalLauncher(2), small().mapping["trainer"]

    def start(name: str, **changes: Any) -> Worker:
        command = ["bash", "-c", SEES.format(tmp_path / f"{name}.go")]
        settings = TrainerSettings.model_validate(trainer | {"accelerator": "cuda", "devices": 1} | changes)
        return launcher.start(name, command, tmp_path / f"{name}.log", settings)

    return start


def until(poll: Callable[[], Any]) -> Any:
    start_time = time.monotonic()
    while (result := poll()) in (None, ""):
        assert time.monotonic() < start_time + LIMIT
        time.sleep(0.05)
    return result


def seen(folder: Path, name: str) -> str:
    log = folder / f"{name}.log"
    return until(lambda: log.read_text() if log.exists() else "").strip()


def end(folder: Path, name: str, worker: Worker) -> None:
    (folder / f"{name}.go").touch()
    assert until(worker.ended) == 0


def test_jobs_get_a_share_of_the_cores_and_a_device_that_is_then_reused(start: Start, tmp_path: Path) -> None:
    threads = f"threads {max(1, available_cores() // 2)}"
    workers = {name: start(name) for name in ("first", "second")}
    assert [seen(tmp_path, name) for name in workers] == [f"{threads}, devices 5", f"{threads}, devices 7"]
    end(tmp_path, "second", workers["second"])
    workers["third"] = start("third")
    assert seen(tmp_path, "third") == f"{threads}, devices 7"
    end(tmp_path, "first", workers["first"])
    end(tmp_path, "third", workers["third"])


def test_more_jobs_than_devices_share_them_and_jobs_without_devices_keep_the_users_setting(
    start: Start, tmp_path: Path
) -> None:
    workers = {"one": start("one"), "both": start("both", devices=2), "none": start("none", accelerator="cpu")}
    assert [seen(tmp_path, name).partition(", ")[2] for name in workers] == ["devices 5", "devices 7,5", "devices 5,7"]
    for name, worker in workers.items():
        end(tmp_path, name, worker)
