"""Detect the launcher of a run (none, torchrun or Slurm) and this process's rank, and check them against the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tfm_blocks.data.plan import Ranks
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.training.settings import DeviceSettings

FOREIGN = {"WORLD_SIZE": "a launcher", "OMPI_COMM_WORLD_SIZE": "mpirun"}
SRUN = "srun --nodes={nodes} --ntasks-per-node={devices} python train.py …"
COUNTS = ("rank", "world", "local_rank", "devices", "nodes")  # fields of RankInfo, and where a launcher sets them
VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"),
}
TORCHRUN = "torchrun --nnodes={nodes} --nproc-per-node={devices}{rendezvous} train.py …"
PORTS, STRIDE = range(15000, 31384), 7919  # of Slurm steps: below the ephemeral ports; a prime, to spread them


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """The rank of this process in `world`, and its local rank among the `devices` processes of its node.

    `launch` is the launcher's ID of this start, or one line for each ID of its nodes, and `restarts` is the number of
    times that it restarted the processes. A Slurm job of a single process, such as a batch script without srun, has
    both too. `rendezvous` are the options by which torchrun's nodes find each other.
    """

    cluster: Literal["local", "torchrun", "slurm"] = "local"
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    devices: int = 1
    nodes: int = 1
    launch: str = ""
    restarts: int = 0
    rendezvous: tuple[str, ...] = ()

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.rank, self.world)

    @property
    def is_external(self) -> bool:
        """Return True if a launcher started the process, and not this package."""
        return self.cluster != "local"

    def __str__(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.cluster}, rank {self.rank} of {self.world}{nodes}"


def find_rank_info(settings: DeviceSettings, environment: Mapping[str, str]) -> RankInfo:
    """Return the rank of this process. Raises ConfigError if the launcher and the settings disagree.

    `auto` prefers torchrun to Slurm, because torchrun can run inside a Slurm job. A Slurm batch script is one process
    although it has SLURM_NTASKS. Only an srun step has SLURM_STEP_NUM_TASKS.
    """
    cluster = settings.cluster if settings.cluster != "auto" else _find_cluster(environment)
    if cluster == "local":
        _expect_alone(environment)
        rank_info = RankInfo(devices=settings.devices, **_slurm_job(environment))
    elif cluster == "slurm":
        rank_info = RankInfo(cluster="slurm", **_counts(environment, "slurm"), **_slurm_job(environment))
    else:
        rank_info = torchrun_rank_info(environment)
    _expect_world(settings, rank_info)
    return rank_info


def _find_cluster(environment: Mapping[str, str]) -> Literal["local", "torchrun", "slurm"]:
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    return "slurm" if _count(environment, "SLURM_STEP_NUM_TASKS") > 1 else "local"


def refuse_launched_sweep(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if a launcher started this process, because each of its processes would start every job."""
    cluster = _find_cluster(environment)
    if cluster != "local":
        rule = f"{cluster} started this process, and each of its processes would train every job of the sweep"
        help = "start the sweep once, without a launcher: each job starts trainer.devices processes"
        raise ConfigError(Problem("sweep", rule, help=help))


def _count(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else 0


def _expect_alone(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if this is one of several processes, because each would train a separate run.

    WORLD_SIZE counts only together with RANK, as launchers set both.
    """
    for name, launcher in ({"SLURM_STEP_NUM_TASKS": "srun"} | FOREIGN).items():
        count = _count(environment, name)
        if count > 1 and (name != "WORLD_SIZE" or "RANK" in environment):
            rule = f"{name}={count}: {launcher} started {count} processes, and each would train the whole run"
            help = f"start them with torchrun or srun and keep trainer.cluster=auto: {_command(TORCHRUN, count, 1)}"
            raise ConfigError(Problem("trainer.cluster", rule, help=help))


def torchrun_rank_info(environment: Mapping[str, str], cluster: Literal["local", "torchrun"] = "torchrun") -> RankInfo:
    """Return the rank of a process of torch's elastic agent. Raises ConfigError if its variables are missing."""
    launch, restarts = environment.get("TORCHELASTIC_RUN_ID", ""), _count(environment, "TORCHELASTIC_RESTART_COUNT")
    counts = _counts(environment, "torchrun")
    address = environment.get("MASTER_ADDR", "FIRST_MACHINE")
    rendezvous = _rendezvous_options(address, launch) if counts["nodes"] > 1 else ()
    if launch == "none":  # the default of --rdzv-id; the folder of the agent's logs differs at each start of torchrun
        launch = Path(environment.get("TORCHELASTIC_ERROR_FILE", "").partition("/attempt_")[0]).name or launch
    return RankInfo(cluster=cluster, launch=f"torchrun {launch}", restarts=restarts, rendezvous=rendezvous, **counts)


def _rendezvous_options(address: str, launch: str) -> tuple[str, ...]:
    id = [f"--rdzv-id={launch}"] if launch != "none" else []
    return ("--rdzv-backend=c10d", f"--rdzv-endpoint={address}:29400", *id)


def _slurm_job(environment: Mapping[str, str]) -> dict[str, Any]:
    job = environment.get("SLURM_JOB_ID", "")
    return {"launch": f"slurm {job}", "restarts": _count(environment, "SLURM_RESTART_COUNT")} if job else {}


def _counts(environment: Mapping[str, str], cluster: Literal["torchrun", "slurm"]) -> dict[str, Any]:
    """Return the fields of RankInfo that the launcher sets. Raises ConfigError if one of its variables is missing."""
    names = [*VARIABLES[cluster], *(["SLURM_NODEID"] if cluster == "slurm" else [])]  # Lightning reads the node's ID
    missing = [name for name in names if not environment.get(name, "").isdecimal()]
    if missing:
        command = _command(TORCHRUN if cluster == "torchrun" else SRUN, 2, 1)
        rule = f"is {cluster}, but the environment of this process has no {', '.join(missing)}"
        raise ConfigError(Problem("trainer.cluster", rule, help=f"start the run with {command}"))
    return {field: int(environment[name]) for field, name in zip(COUNTS, VARIABLES[cluster], strict=True)}


def _command(text: str, devices: int, nodes: int) -> str:
    overrides = {" trainer.devices": devices, " trainer.num_nodes": nodes}
    written = "".join(f"{key}={count}" for key, count in overrides.items() if count > 1)
    rendezvous = ["", *(_rendezvous_options("FIRST_MACHINE", "NAME") if nodes > 1 else ())]
    return text.format(devices=devices, nodes=nodes, rendezvous=" ".join(rendezvous)).removesuffix(" …") + written


def on_all_nodes(words: Sequence[str], rank_info: RankInfo) -> list[str]:
    """Return a command with the launcher of this process, if that started processes on several nodes.

    torchrun starts it on each node, and the node of rank 0 is the endpoint.
    """
    if rank_info.nodes == 1:
        return [*words]
    if rank_info.cluster == "torchrun":  # it runs a Python file, or any program
        words = [*rank_info.rendezvous, *(words[1:] if words[0] == "python" else ["--no-python", *words])]
    launcher = TORCHRUN if rank_info.cluster == "torchrun" else SRUN
    return [*launcher.format(nodes=rank_info.nodes, devices=rank_info.devices, rendezvous="").split()[:3], *words]


def step_port(environment: Mapping[str, str]) -> int:
    """Return a port for a step of a Slurm job. Steps of a job may run concurrently on one node, as may jobs."""
    job, step = _count(environment, "SLURM_JOB_ID"), _count(environment, "SLURM_STEP_ID")
    return PORTS[(job + STRIDE * step) % len(PORTS)]


def _expect_world(settings: DeviceSettings, rank_info: RankInfo) -> None:
    """Raise ConfigError if the processes of the launcher are not those that the settings request."""
    requested = settings.devices, settings.num_nodes
    if rank_info.cluster == "local":
        if settings.num_nodes > 1:
            rule = f"is {settings.num_nodes}, but this command starts processes on its own machine only"
            help = f"start it on each node: {_command(TORCHRUN, *requested)}, or {_command(SRUN, *requested)}"
            raise ConfigError(Problem("trainer.num_nodes", rule, help=help))
        return
    if requested != (rank_info.devices, rank_info.nodes) or rank_info.world != rank_info.devices * rank_info.nodes:
        count = f"{rank_info.world} processes on {rank_info.nodes} nodes, {rank_info.devices} on each"
        started = f"{rank_info.cluster} started {count}"
        rule = f"requests {settings.devices} processes on each of {settings.num_nodes} nodes, but {started}"
        help = f"write trainer.devices={rank_info.devices} trainer.num_nodes={rank_info.nodes}, or change the launcher"
        raise ConfigError(Problem("trainer.devices", rule, help=help))
