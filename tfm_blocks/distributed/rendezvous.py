"""What the processes that a launcher has started agree on before they train together."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tfm_blocks.data.prepare import Prepared, prepare
from tfm_blocks.data.settings import DataSettings
from tfm_blocks.distributed.cluster import RankInfo
from tfm_blocks.errors import Problem, RunError, TfmError
from tfm_blocks.training.gather import gather_json
from tfm_blocks.training.heartbeat import Heartbeat

LOOK = 0.1  # seconds between two looks at what another process has decided, so that a signal is heard meanwhile
LATE = 1.0  # seconds that a process lives on after it has said that it fails: the first takes Slurm's store with it
Json = Any  # None, bool, int, float, str, and lists and dicts of them


def environment_of(place: RankInfo) -> ClusterEnvironment:
    """Lightning's name for who has started the process. Slurm is to start again only what its user asks it to."""
    if place.cluster == "slurm":
        return SLURMEnvironment(auto_requeue=False)
    return LightningEnvironment() if place.world == 1 else TorchElasticEnvironment()


def backend_of(place: RankInfo, device: str) -> str:
    """What carries the collectives: `gloo`, `nccl`, or none for a process that trains alone, and the device."""
    return f"{torch.distributed.get_default_backend_for_device(device)} on {device}" if place.world > 1 else device


def _greet(store: Store, place: RankInfo) -> str:
    """A name for this start of the processes that all of them know.

    torchrun keeps one store for all its restarts (torch 2.13), and what is found there may be of processes that are
    gone. So each asks with a word of its own, and believes the answer that repeats it.
    """
    word = uuid4().hex
    if place.rank == 0:
        late = set(range(1, place.world))
        while late:
            for rank in sorted(late):
                store.set(f"answer {rank}", _read(store, f"question {rank}") + word)
            late -= {rank for rank in late if _read(store, f"heard {rank}") == word}
            time.sleep(LOOK)
        return word
    store.set(f"question {place.rank}", word)
    while not (answer := _read(store, f"answer {place.rank}")).startswith(word):
        time.sleep(LOOK)
    store.set(f"heard {place.rank}", answer.removeprefix(word))
    return answer.removeprefix(word)


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


class Meeting:
    """The processes of a launcher from outside, before the first collective; any other process decides for itself.

    They meet at a store of torch's and not in a collective, because the first can take hours to read its text, and
    because one that fails must be able to say so. The store holds JSON: reading a pickle could run code.
    """

    def __init__(self, place: RankInfo) -> None:
        self.place = place
        self.store: Store | None = None
        if place.outside and place.world > 1:
            environment = environment_of(place)
            os.environ.update(MASTER_ADDR=environment.main_address, MASTER_PORT=str(environment.main_port))
            store = next(rendezvous("env://", place.rank, place.world))[0]
            self.store = PrefixStore(_greet(store, place), store)

    def decide(self, what: str, make: Callable[[], Json], *, first: bool | None = None) -> Json:
        """Run `make` on rank 0 and send its result to the other ranks. If it raises, they exit with its status."""
        if self.store is None:
            return make()
        if not (self.place.rank == 0 if first is None else first):
            return self._wait(what)
        try:
            value = make()
        except TfmError as error:
            self.store.set(what, json.dumps({"exit_status": error.exit_status}))
            time.sleep(LATE)
            raise
        self.store.set(what, json.dumps({"value": value}))
        return value

    def gather(self, what: str, value: Json) -> list[Json]:
        """Return the value of each rank, by rank."""
        if self.store is None:
            return [value]
        self.store.set(f"{what} {self.place.rank}", json.dumps({"value": value}))
        return [self._wait(f"{what} {rank}") for rank in range(self.place.world)]

    def _wait(self, what: str) -> Json:
        assert self.store is not None
        while not self.store.check([what]):
            time.sleep(LOOK)
        message = json.loads(self.store.get(what))
        if "exit_status" in message:
            raise SystemExit(message["exit_status"])
        return message["value"]

    def prepare(self, settings: DataSettings, vocab: int) -> Prepared:
        """The text, which the first process of each node brings into the cache."""
        place = self.place
        tell = print if place.rank == 0 else lambda text: None
        with Heartbeat("preparing the text", speaks=place.rank == 0):
            if self.store is None:
                return prepare(settings, vocab, tell=tell)
            read: list[Prepared] = []
            what = f"text of node {place.rank // place.devices}"
            self.decide(what, lambda: read.append(prepare(settings, vocab, tell=tell)), first=place.local_rank == 0)
            return read[0] if read else prepare(settings, vocab, tell=tell)

    def join(self, device: str) -> None:
        """From here on the processes wait for each other in collectives, which Lightning takes up."""
        if self.store is not None:
            if device == "cuda":
                torch.cuda.set_device(self.place.local_rank)
            backend = torch.distributed.get_default_backend_for_device(device)
            torch.distributed.init_process_group(
                backend, store=self.store, rank=self.place.rank, world_size=self.place.world
            )

    def part(self) -> None:
        """Waits for all, so that no launcher ends the first process before it has written down how the run ended."""
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        self.leave()

    def leave(self) -> None:
        """After the last collective. What a run that breaks has joined ends with its process."""
        if self.store is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def expect_seen(self, folder: Path) -> None:
        """Raises RunError where a process does not see the folder of the run."""
        if self.store is not None:
            seen = gather_json(folder.is_dir())
            if not all(seen):
                rule = f"is not there for process {seen.index(False)}"
                help = "start all processes in one folder, on a file system that all nodes share"
                raise RunError(Problem(str(folder), rule, help=help))
