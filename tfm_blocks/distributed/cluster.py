"""Who has started the processes of a run, which of them this one is, and whether they are those that were asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from tfm_blocks.data.plan import Ranks
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.training.settings import DeviceSettings

FOREIGN = {"WORLD_SIZE": "a launcher", "OMPI_COMM_WORLD_SIZE": "mpirun"}
SRUN = "srun --nodes={nodes} --ntasks-per-node={devices} python train.py …"
TORCHRUN = "torchrun --nnodes={nodes} --nproc-per-node={devices} train.py …"


class _Launch(TypedDict, total=False):
    launch: str
    restarts: int


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One process of a run: its rank of `world`, and its rank among the `devices` processes of its node.

    `launch` is the launcher's name for all processes together; `restarts`: how often it has started them anew. A job of
    Slurm's has both where it is one process, too, as a batch script that starts no step is.
    """

    cluster: Literal["local", "torchrun", "slurm"] = "local"
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    devices: int = 1
    nodes: int = 1
    launch: str = ""
    restarts: int = 0

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.rank, self.world)

    @property
    def outside(self) -> bool:
        """Whether a launcher has started it, and not this package."""
        return self.cluster != "local"

    def __str__(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.cluster}, rank {self.rank} of {self.world}{nodes}"


def find_place(settings: DeviceSettings, environment: Mapping[str, str]) -> RankInfo:
    """The place of a process that a command has started. Raises ConfigError where the run would not be what was asked.

    With `auto`, torchrun comes before Slurm, because it can run inside a job of Slurm's. A batch script of Slurm's has
    its tasks in SLURM_NTASKS although it is one process; only a step of srun's has SLURM_STEP_NUM_TASKS.
    """
    found = settings.cluster if settings.cluster != "auto" else _find_cluster(environment)
    if found == "local":
        _expect_alone(environment)
        place = RankInfo(devices=settings.devices, **_slurm_job(environment))
    else:
        place = torchrun_place(environment) if found == "torchrun" else _slurm_place(environment)
    _expect_asked(settings, place)
    return place


def _find_cluster(environment: Mapping[str, str]) -> Literal["local", "torchrun", "slurm"]:
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    return "slurm" if _count(environment, "SLURM_STEP_NUM_TASKS") > 1 else "local"


def refuse_launched_sweep(environment: Mapping[str, str]) -> None:
    """Raises ConfigError where a launcher has started this process, since each of them would start every job."""
    cluster = _find_cluster(environment)
    if cluster != "local":
        rule = f"{cluster} has started this process, and each that it starts would train every job of the sweep"
        help = "start the sweep once, without it: each job starts its own processes, trainer.devices of them"
        raise ConfigError(Problem("sweep", rule, help=help))


def _count(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else 0


def _expect_alone(environment: Mapping[str, str]) -> None:
    """Raises ConfigError where this is one of several processes, each of which would train a run of its own.

    WORLD_SIZE, which anybody may set, comes with RANK from a launcher.
    """
    names = {"SLURM_STEP_NUM_TASKS": "srun"} | FOREIGN
    for name, launcher in names.items():
        count = _count(environment, name)
        if count > 1 and (name != "WORLD_SIZE" or "RANK" in environment):
            rule = f"{name}={count}: {launcher} has started {count} processes, and each would train the whole run"
            help = f"start them by torchrun or srun and leave trainer.cluster at auto: {_command(TORCHRUN, count, 1)}"
            raise ConfigError(Problem("trainer.cluster", rule, help=help))


def torchrun_place(environment: Mapping[str, str], cluster: Literal["local", "torchrun"] = "torchrun") -> RankInfo:
    """The place of a process that torch's elastic agent has started. Raises ConfigError where it has not."""
    _expect(environment, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "torchrun")
    return RankInfo(
        cluster=cluster,
        rank=int(environment["RANK"]),
        world=int(environment["WORLD_SIZE"]),
        local_rank=int(environment["LOCAL_RANK"]),
        devices=int(environment["LOCAL_WORLD_SIZE"]),
        nodes=int(environment["GROUP_WORLD_SIZE"]),
        launch=f"torchrun {environment.get('TORCHELASTIC_RUN_ID', '')}",
        restarts=_count(environment, "TORCHELASTIC_RESTART_COUNT"),
    )


def _slurm_place(environment: Mapping[str, str]) -> RankInfo:
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE")
    _expect(environment, names, "slurm")
    return RankInfo(
        cluster="slurm",
        rank=int(environment["SLURM_PROCID"]),
        world=int(environment["SLURM_NTASKS"]),
        local_rank=int(environment["SLURM_LOCALID"]),
        devices=int(environment["SLURM_NTASKS_PER_NODE"]),
        nodes=int(environment["SLURM_NNODES"]),
        **_slurm_job(environment),
    )


def _slurm_job(environment: Mapping[str, str]) -> _Launch:
    job = environment.get("SLURM_JOB_ID", "")
    return {"launch": f"slurm {job}", "restarts": _count(environment, "SLURM_RESTART_COUNT")} if job else {}


def _expect(environment: Mapping[str, str], names: tuple[str, ...], cluster: str) -> None:
    """Raises ConfigError where the environment lacks what the launcher gives each of its processes."""
    missing = [name for name in names if not environment.get(name, "").isdecimal()]
    if missing:
        command = _command(TORCHRUN if cluster == "torchrun" else SRUN, 2, 1)
        rule = f"is {cluster}, but the environment of this process has no {', '.join(missing)}"
        raise ConfigError(Problem("trainer.cluster", rule, help=f"start it by {command}"))


def _command(text: str, devices: int, nodes: int) -> str:
    command = text.format(devices=devices, nodes=nodes)
    added = [f" trainer.devices={devices}" if devices > 1 else "", f" trainer.num_nodes={nodes}" if nodes > 1 else ""]
    return command.removesuffix(" …") + "".join(added)


def _expect_asked(settings: DeviceSettings, place: RankInfo) -> None:
    """Raises ConfigError where the launcher has started other processes than the settings ask for."""
    asked = settings.devices, settings.num_nodes
    if place.cluster == "local":
        if settings.num_nodes > 1:
            rule = f"is {settings.num_nodes}, but this command starts processes on its own machine only"
            help = f"start it on each node: {_command(TORCHRUN, *asked)}, or {_command(SRUN, *asked)}"
            raise ConfigError(Problem("trainer.num_nodes", rule, help=help))
        return
    if asked != (place.devices, place.nodes) or place.world != place.devices * place.nodes:
        started = f"{place.cluster} has started {place.world} processes on {place.nodes} nodes, {place.devices} on each"
        rule = f"asks for {settings.devices} processes on each of {settings.num_nodes} nodes, but {started}"
        help = f"write trainer.devices={place.devices} trainer.num_nodes={place.nodes}, or start others"
        raise ConfigError(Problem("trainer.devices", rule, help=help))
