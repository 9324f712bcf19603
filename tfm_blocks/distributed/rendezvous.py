"""Let the processes of a launcher exchange values before their first collective."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from tfm_blocks.devices import rank_device, select_device
from tfm_blocks.distributed.cluster import RankInfo, step_port
from tfm_blocks.errors import Problem, RunError, TfmError
from tfm_blocks.training.gather import gather_json
from tfm_blocks.training.heartbeat import Heartbeat

POLL_INTERVAL = 0.1  # seconds; polling lets Python handle signals, which a blocking wait does not
EXIT_DELAY = 1.0  # seconds for other ranks to read an error of rank 0, whose exit closes the store under Slurm
Json = Any  # None, bool, int, float, str, and lists and dicts of them


class _SlurmStep(SLURMEnvironment):
    """A step of srun, with its own port and first node, because steps of a job may run concurrently."""

    @property
    def main_address(self) -> str:
        nodes = os.environ.get("SLURM_STEP_NODELIST") if "MASTER_ADDR" not in os.environ else None
        return self.resolve_root_node_address(nodes) if nodes else super().main_address

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT") or step_port(os.environ))


def cluster_environment(rank_info: RankInfo) -> ClusterEnvironment:
    """Return Lightning's environment of the launcher. Slurm jobs are not requeued automatically."""
    if rank_info.cluster == "slurm":
        return _SlurmStep(auto_requeue=False)
    return LightningEnvironment() if rank_info.world == 1 else TorchElasticEnvironment()


def _agree_on_start_id(store: Store, rank_info: RankInfo) -> str:
    """Return a random ID of this start of the launcher, the same on all ranks.

    torchrun keeps one store for all its restarts (torch 2.13), so its values may come from processes that exited. Each
    rank therefore writes a random token. Rank 0 answers with that token and the ID, and the rank confirms the ID.
    """
    token = uuid4().hex
    if rank_info.rank == 0:
        missing = set(range(1, rank_info.world))
        while missing:
            for rank in sorted(missing):
                store.set(f"answer {rank}", _read(store, f"question {rank}") + token)
            missing -= {rank for rank in missing if _read(store, f"accepted {rank}") == token}
            time.sleep(POLL_INTERVAL)
        return token
    store.set(f"question {rank_info.rank}", token)
    while not (answer := _read(store, f"answer {rank_info.rank}")).startswith(token):
        time.sleep(POLL_INTERVAL)
    store.set(f"accepted {rank_info.rank}", answer.removeprefix(token))
    return answer.removeprefix(token)


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


class Rendezvous:
    """Exchange values between the processes of an external launcher. Without a launcher, a process gets its own values.

    The exchange uses torch's key-value store. A collective would time out, because rank 0 may need hours to prepare the
    text, and could not report that a process failed. Values are JSON, because reading a pickle could run code.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info = rank_info
        self.store: Store | None = None
        if rank_info.is_external and rank_info.world > 1:
            environment = cluster_environment(rank_info)
            os.environ.update(MASTER_ADDR=environment.main_address, MASTER_PORT=str(environment.main_port))
            store = next(rendezvous("env://", rank_info.rank, rank_info.world))[0]
            self.store = PrefixStore(_agree_on_start_id(store, rank_info), store)
            self.combine_starts()

    def combine_starts(self) -> None:
        """Combine the launches and the restarts of all ranks in `rank_info`.

        Without --rdzv-id, the nodes have different IDs of the same start. torchrun counts a restart only on the node
        whose process failed.
        """
        starts = self.gather("start", [self.rank_info.launch, self.rank_info.restarts])
        launches, restarts = zip(*starts, strict=True)
        self.rank_info = replace(self.rank_info, launch="\n".join(dict.fromkeys(launches)), restarts=max(restarts))

    def decide(self, key: str, make: Callable[[], Json], *, leads: bool | None = None) -> Json:
        """Run `make` on one process and return its result on all of them.

        The process is rank 0, unless `leads` is passed, which is True on one process. If `make` raises, the others exit
        with the exit status of the error.
        """
        if self.store is None:
            return make()
        if not (self.rank_info.rank == 0 if leads is None else leads):
            return self._wait(key)
        try:
            value = make()
        except TfmError as error:
            self.store.set(key, json.dumps({"exit_status": error.exit_status}))
            time.sleep(EXIT_DELAY)
            raise
        self.store.set(key, json.dumps({"value": value}))
        return value

    def gather(self, key: str, value: Json) -> list[Json]:
        """Return the values of all ranks, in the order of ranks."""
        if self.store is None:
            return [value]
        self.store.set(f"{key} {self.rank_info.rank}", json.dumps({"value": value}))
        return [self._wait(f"{key} {rank}") for rank in range(self.rank_info.world)]

    def _wait(self, key: str) -> Json:
        assert self.store is not None
        while not self.store.check([key]):
            time.sleep(POLL_INTERVAL)
        message = json.loads(self.store.get(key))
        if "exit_status" in message:
            raise SystemExit(message["exit_status"])
        return message["value"]

    def prepare(
        self, settings: DataSettings, vocab: int, special: Sequence[str] = (), source_vocab: int | None = None
    ) -> Prepared:
        """Return the prepared corpora. The first process of each node writes them to the cache."""
        rank_info = self.rank_info
        report = print if rank_info.rank == 0 else lambda text: None
        with Heartbeat("preparing the text", enabled=rank_info.rank == 0):
            built: list[Prepared] = []
            key = f"text of node {rank_info.rank // rank_info.devices}"
            leads = rank_info.local_rank == 0
            arguments = settings, vocab, report, special, source_vocab
            self.decide(key, lambda: built.append(prepare(*arguments)), leads=leads)
            return built[0] if built else prepare(*arguments)

    def join(self, kind: str) -> None:
        """Initialise the process group that Lightning uses, for devices of this type."""
        if self.store is not None:
            select_device(rank_device(kind, self.rank_info.local_rank))
            backend = torch.distributed.get_default_backend_for_device(kind)
            torch.distributed.init_process_group(
                backend, store=self.store, rank=self.rank_info.rank, world_size=self.rank_info.world
            )

    def leave_together(self) -> None:
        """Leave after a barrier, so that rank 0 can write the status before the launcher sees another rank exit."""
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        self.leave()

    def leave(self) -> None:
        """Destroy the process group after the last collective. A run that failed exits without this call."""
        if self.store is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def expect_shared_folder(self, folder: Path) -> None:
        """Raise RunError on all ranks if the folder of the run does not exist on one of them."""
        if self.store is not None:
            seen = gather_json(folder.is_dir())
            if not all(seen):
                rule = f"does not exist for process {seen.index(False)}"
                help = "start all processes in the same folder, on a file system that all nodes share"
                raise RunError(Problem(str(folder), rule, help=help))
