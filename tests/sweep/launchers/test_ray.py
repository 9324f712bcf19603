"""Jobs on a Ray cluster of this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.jobs import text_of, until
from tfm_blocks.distributed import signals
from tfm_blocks.sweep.job import ERROR, KILLED
from tfm_blocks.sweep.launcher import Worker, read_launcher
from tfm_blocks.training.settings import TrainerSettings

pytest.importorskip("ray")
import ray

from tfm_blocks.sweep.launchers.ray import RayLauncher, RaySettings

pytestmark = pytest.mark.grid  # starting Ray takes seconds
CONF = {"name": "ray", "address": "local", "cpus": 1, "gpus": None, "memory": None, "resources": {}}
HAS = {"GPU": 2, "memory": 4 << 30, "licence": 1}  # the resources that the cluster reports
WAITS = "trap 'sleep 0.5; exit 75' TERM; echo ready; while true; do sleep 0.05; done"


def settings_with(**changes: Any) -> RaySettings:
    settings = read_launcher(CONF | changes)
    assert isinstance(settings, RaySettings)
    return settings


@pytest.fixture
def trainer(small: Callable[..., Any]) -> TrainerSettings:
    return TrainerSettings.model_validate(small().mapping["trainer"])


@pytest.fixture(scope="module")
def launcher() -> Iterator[RayLauncher]:
    """Yield a launcher whose jobs take all cores of the machine, so that a second one waits."""
    before = {number: signal.getsignal(number) for number in signals.STOPS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps(HAS))
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        launcher = RayLauncher(settings_with())
    cores = int(ray.cluster_resources()["CPU"])
    launcher.settings = settings_with(cpus=cores)
    with launcher:
        yield launcher
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def start(launcher: RayLauncher, trainer: TrainerSettings) -> Iterator[Callable[..., Worker]]:
    """Yield a function that starts a job; release its cluster resources after the test."""
    workers: list[Worker] = []

    def start(log: Path, script: str, trainer: TrainerSettings = trainer) -> Worker:
        workers.append(launcher.start(log.stem, ["bash", "-c", script], log, trainer))
        return workers[-1]

    yield start
    for worker in workers:
        ray.kill(worker.actor)


def test_jobs_run_one_after_the_other_on_one_cpu_and_return_their_status(
    start: Callable[..., Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_SWEEP", "known")
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-sweep")
    logs = [tmp_path / f"{name}.log" for name in ("first", "second")]
    logs[0].write_text("before\n")
    first = start(logs[0], WAITS)
    until(lambda: "ready" in text_of(logs[0]))
    assert until(first.place).startswith("on ") and first.ended() is None and first.begin == len("before\n")
    second = start(logs[1], "pwd; echo $OF_THE_SWEEP $WANDB_RUN_ID; exit 3")
    assert second.place() is None
    first.stop()
    assert until(first.ended) == 75
    assert until(second.ended) == 3
    assert text_of(logs[1]) == f"{Path.cwd()}\nknown\n"


def test_a_job_has_the_requested_resources_and_the_next_waits_for_them(
    launcher: RayLauncher,
    start: Callable[..., Worker],
    tmp_path: Path,
    trainer: TrainerSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "settings", settings_with(memory="500MB", resources={"licence": 1}))
    settings = trainer.model_copy(update={"accelerator": "cuda"})
    first = start(tmp_path / "first.log", f"echo device $CUDA_VISIBLE_DEVICES; {WAITS}", settings)
    until(lambda: "ready" in text_of(tmp_path / "first.log"))
    assert text_of(tmp_path / "first.log").startswith(("device 0\n", "device 1\n"))
    until(lambda: used_resources() == {"CPU": 1, "GPU": 1, "memory": 500 << 20, "licence": 1})
    second = start(tmp_path / "second.log", "exit 3", settings)
    assert second.place() is None and second.ended() is None
    until(first.place)  # until Ray reports where a job runs, `stop` treats it as a waiting job
    first.stop()
    assert (until(first.ended), until(second.ended)) == (75, 3)


def used_resources() -> dict[str, float]:
    """Return the cluster resources that jobs use."""
    free = ray.available_resources()
    return {name: rest for name, has in ray.cluster_resources().items() if (rest := has - free.get(name, 0)) > 1e-6}


def test_a_second_signal_ends_running_and_waiting_jobs_at_once(start: Callable[..., Worker], tmp_path: Path) -> None:
    first = start(tmp_path / "first.log", WAITS.replace("exit 75", "sleep 1000"))
    until(lambda: "ready" in text_of(tmp_path / "first.log"))
    second = start(tmp_path / "second.log", "echo never")
    second.stop()
    first.kill()
    first.wait()
    assert isinstance(until(second.ended), tuple) and text_of(tmp_path / "second.log") == ""
    result = until(first.ended)
    assert result == 137 or result[0] == KILLED


def test_a_lost_node_is_reported_and_leaves_no_process(start: Callable[..., Worker], tmp_path: Path) -> None:
    worker = start(tmp_path / "x.log", "echo $$; while true; do sleep 0.05; done")
    until(lambda: "\n" in text_of(tmp_path / "x.log"))
    until(worker.place)
    ray.kill(worker.actor)
    result = until(worker.ended)
    assert result[0] == KILLED and result[1].startswith("Ray: ")
    job = Path("/proc", text_of(tmp_path / "x.log").strip())
    until(lambda: not job.exists())


def test_ray_leaves_signals_to_the_sweep(launcher: RayLauncher) -> None:
    assert signal.getsignal(signal.SIGTERM) is signals._handle


def test_a_node_without_the_shared_folder_is_an_error(start: Callable[..., Worker], tmp_path: Path) -> None:
    result = until(start(tmp_path / "nowhere" / "x.log", "true").ended)
    assert result[0] == ERROR
    assert "No such file or directory" in result[1] and "nowhere/x.log" in result[1]


def test_an_address_without_a_cluster_is_an_error() -> None:
    code = "from tests.sweep.launchers.test_ray import *\nRayLauncher(settings_with(address='nowhere'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "launcher.address: leads to no Ray cluster: " in done.stderr


def test_a_missing_extra_is_an_error_with_its_command() -> None:
    code = "import sys; sys.modules['ray'] = None\nimport tfm_blocks.sweep.launchers.ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ray is not installed" in done.stderr and "pip install -c constraints.txt -e '.[ray]'" in done.stderr
