"""Launcher that runs jobs on a Ray cluster, each under an actor; the jobs end with the command."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from tfm_blocks.config.settings import Count, RuleError
from tfm_blocks.devices import VISIBLE
from tfm_blocks.distributed.signals import install_handlers
from tfm_blocks.errors import config_error, shown
from tfm_blocks.sweep import supervisor
from tfm_blocks.sweep.job import ERROR, KILLED
from tfm_blocks.sweep.launcher import PATIENCE, ClusterSettings, Launcher, Result, Worker, clean, job_file_content
from tfm_blocks.training.settings import TrainerSettings

try:
    import ray
except ImportError:
    help = "pip install -c constraints.txt -e '.[ray]'"
    raise config_error("launcher", "is ray, and ray is not installed", help) from None

KILL_SECONDS = 10.0  # seconds for an actor to kill its job's processes before the actor is killed
CALLS = 3  # concurrent calls of an actor: one of them waits for the end of the job
MACHINE_VARIABLES = frozenset({*VISIBLE.values(), "HOSTNAME", "TMPDIR"})  # variables that hold for this machine only


def _amounts(mapping: dict[str, Any]) -> dict[str, Any]:
    for key, value in mapping.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            rule = f"must say how much of each, but {key} is {shown(value)}"
            raise RuleError(rule, f"write launcher.resources.{key}=1")
    return mapping


class RaySettings(ClusterSettings):
    """Settings of the Ray launcher.

    address: address of the cluster, auto, or local to start Ray on this machine for this command. cpus: cores per
    device of a job. resources: amount of each custom resource of the cluster per job.
    """

    name: Literal["ray"]
    address: str
    cpus: Count
    resources: Annotated[dict[str, Any], AfterValidator(_amounts)]

    def open(self, parallel: int, timeout: float | None) -> RayLauncher:
        return RayLauncher(self)


class RayLauncher(Launcher):
    """Connect to a Ray cluster or start a local one, and reinstall our signal handlers, which Ray replaces."""

    queue = "the queue of Ray"

    def __init__(self, settings: RaySettings) -> None:
        self.settings = settings
        options: dict[str, Any] = {"include_dashboard": False} if settings.address == "local" else {}
        try:
            ray.init(address=settings.address, log_to_driver=False, logging_level="ERROR", **options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            rule = f"leads to no Ray cluster: {str(error).strip().splitlines()[0]}"
            help = "write launcher.address=HOST:6379, or launcher.address=local for one of this machine"
            raise config_error("launcher.address", rule, help) from None
        finally:
            install_handlers()
        ray.cloudpickle.register_pickle_by_value(supervisor)  # so a node does not need to import it
        self.actors = ray.remote(supervisor.SupervisedJob)

    def __exit__(self, *error: object) -> None:
        ray.shutdown()

    def start(self, name: str, command: Sequence[str], log: Path, trainer: TrainerSettings) -> Worker:
        """Start an actor for the job, with this command's environment except the variables of this machine."""
        job_file = job_file_content(command, log)
        job_file["with"] = {k: v for k, v in clean(os.environ).items() if k not in MACHINE_VARIABLES} | job_file["with"]
        own = self.settings
        actor = self.actors.options(
            name=None,
            num_cpus=own.cpus * trainer.devices,
            num_gpus=own.gpus_of(trainer),
            memory=own.memory,
            resources=own.resources or None,
            max_restarts=0,
            max_concurrency=CALLS,
        ).remote(job_file)
        return _RayWorker(actor, job_file["begin"])


class _RayWorker:
    patience = PATIENCE

    def __init__(self, actor: Any, begin: int) -> None:
        self.actor, self.begin = actor, begin
        self.end, self.host = actor.status.remote(), actor.place.remote()
        self.node: str | None = None

    def place(self) -> str | None:
        if self.node is None and _is_ready(self.host):
            with suppress(ray.exceptions.RayError):
                self.node = f"on {ray.get(self.host)}"
        return self.node

    def ended(self) -> int | Result | None:
        if not _is_ready(self.end):
            return None
        try:
            return int(ray.get(self.end))
        except ray.exceptions.RayError as error:  # it did not start, or its process or node died
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return KILLED if self.place() else ERROR, f"Ray: {lines[-1] if lines else type(error).__name__}"
        finally:
            ray.kill(self.actor)  # releases its resources

    def stop(self) -> None:
        """Stop the job with a checkpoint if it runs; a waiting job has nothing to save, so its actor is killed."""
        if self.place():
            self.actor.stop.remote()
        else:
            ray.kill(self.actor)

    def kill(self) -> None:
        self.actor.kill.remote()

    def wait(self) -> None:
        """Wait for the job for up to KILL_SECONDS seconds, then kill its actor."""
        start = time.monotonic()
        while not _is_ready(self.end) and time.monotonic() < start + KILL_SECONDS:
            time.sleep(supervisor.POLL_SECONDS)
        ray.kill(self.actor)


def _is_ready(answer: Any) -> bool:
    return bool(ray.wait([answer], timeout=0)[0])


LAUNCHER = RaySettings
