"""The world size that trains is the requested one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.distributed.cluster import RankInfo, find_rank_info, on_all_nodes, refuse_launched_sweep
from tfm_blocks.distributed.rendezvous import cluster_environment
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.run_spec import find_restarted_run
from tfm_blocks.training.settings import DeviceSettings

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "abc", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1", "MASTER_ADDR": "first",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_RESTART_COUNT": "2",
}  # fmt: skip
RENDEZVOUS = "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=first:29400 --rdzv-id=abc"
TYPED = "python train.py name=a.b"
ALONE = {
    "nobody": {},
    "a batch script": {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    "a shell of srun's": {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "a stray variable": {"WORLD_SIZE": "2"},
}


def device_settings(**changes: Any) -> DeviceSettings:
    return DeviceSettings.model_validate({"devices": 2, "accelerator": "cpu", "num_nodes": 2} | changes)


def test_a_process_of_torchrun_has_its_rank() -> None:
    rank_info = find_rank_info(device_settings(), TORCHRUN)
    rendezvous = ("--rdzv-backend=c10d", "--rdzv-endpoint=first:29400", "--rdzv-id=abc")
    launch = {"launch": "torchrun abc", "restarts": 1, "rendezvous": rendezvous}
    assert rank_info == RankInfo(cluster="torchrun", rank=3, world=4, local_rank=1, devices=2, nodes=2, **launch)
    assert str(rank_info) == "torchrun, rank 3 of 4 on 2 nodes"


def test_starts_of_torchrun_without_an_id_differ_and_their_restarts_do_not() -> None:
    launches = [
        find_rank_info(
            device_settings(),
            TORCHRUN
            | {
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_ERROR_FILE": f"/logs/{start}/attempt_{attempt}/1/error.json",
            },
        ).launch
        for start, attempt in (("none_a", 0), ("none_a", 1), ("none_b", 1))
    ]
    assert launches == ["torchrun none_a", "torchrun none_a", "torchrun none_b"]


def test_a_process_of_srun_has_its_rank() -> None:
    rank_info = find_rank_info(device_settings(), SRUN)
    assert rank_info == RankInfo(
        cluster="slurm", rank=2, world=4, local_rank=0, devices=2, nodes=2, launch="slurm 7", restarts=2
    )


def test_torchrun_takes_precedence_inside_a_slurm_job() -> None:
    assert find_rank_info(device_settings(), SRUN | TORCHRUN).cluster == "torchrun"
    assert find_rank_info(device_settings(cluster="slurm"), SRUN | TORCHRUN).cluster == "slurm"


@pytest.mark.parametrize("environment", ALONE.values(), ids=ALONE)
def test_a_single_process_starts_the_other_ranks(environment: dict[str, str]) -> None:
    rank_info = find_rank_info(device_settings(num_nodes=1), environment)
    assert (rank_info.cluster, rank_info.world, rank_info.is_external) == ("local", 1, False)


@pytest.mark.parametrize("environment", ALONE.values(), ids=ALONE)
def test_a_requeued_slurm_job_of_one_process_is_detected(environment: dict[str, str]) -> None:
    rank_info = find_rank_info(
        device_settings(num_nodes=1), environment | {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    )
    assert (rank_info.cluster, rank_info.launch, rank_info.restarts) == ("local", "slurm 7", 1)


WRONG = {
    "fewer devices": (
        device_settings(devices=1),
        TORCHRUN,
        "requests 1 processes on each of 2 nodes, but torchrun started 4",
    ),
    "fewer nodes": (device_settings(num_nodes=1), SRUN, "requests 2 processes on each of 1 nodes, but slurm started 4"),
    "uneven nodes": (device_settings(), TORCHRUN | {"WORLD_SIZE": "3"}, "but torchrun started 3 processes"),
    "nodes of nobody": (device_settings(), {}, "starts processes on its own machine only"),
    "no torchrun": (
        device_settings(cluster="torchrun"),
        {},
        "is torchrun, but the environment of this process has no RANK",
    ),
    "no srun": (
        device_settings(cluster="slurm"),
        ALONE["a batch script"],
        "is slurm, but the environment of this process has no",
    ),
    "tasks without a number": (device_settings(), SRUN | {"SLURM_NTASKS_PER_NODE": ""}, "has no SLURM_NTASKS_PER_NODE"),
    "alone among many": (
        device_settings(cluster="local"),
        SRUN,
        "srun started 4 processes, and each would train the whole",
    ),
    "mpirun": (device_settings(num_nodes=1), {"OMPI_COMM_WORLD_SIZE": "3"}, "mpirun started 3 processes"),
    "another launcher": (
        device_settings(num_nodes=1),
        {"RANK": "0", "WORLD_SIZE": "2"},
        "a launcher started 2 processes",
    ),
}


@pytest.mark.parametrize(("settings", "environment", "message"), WRONG.values(), ids=WRONG)
def test_a_world_of_another_size_than_requested_is_refused(
    settings: DeviceSettings, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{message}(?s:.*)help: .*(torchrun|srun|trainer\.devices=2)"):
        find_rank_info(settings, environment)


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN])
def test_a_sweep_is_not_started_by_each_process_of_a_launcher(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"would train every job of the sweep(?s:.*)help: start the sweep once"):
        refuse_launched_sweep(environment)
    for alone in ALONE.values():
        refuse_launched_sweep(alone)


def test_lightning_knows_the_launcher_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variables of both, Lightning alone would choose Slurm."""
    for name, value in (SRUN | TORCHRUN).items():
        monkeypatch.setenv(name, value)
    environment = cluster_environment(find_rank_info(device_settings(), SRUN | TORCHRUN))
    assert (environment.global_rank(), environment.world_size(), environment.local_rank()) == (3, 4, 1)
    slurm: Any = cluster_environment(find_rank_info(device_settings(cluster="slurm"), SRUN | TORCHRUN))
    assert (slurm.global_rank(), slurm.world_size(), slurm.auto_requeue) == (2, 4, False)


def test_steps_of_a_slurm_job_have_their_own_ports_and_first_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = set()
    for job, step, nodes in (
        ("7", "0", "node[1-2]"),
        ("7", "1", "node[3-4]"),
        ("7", "2", "node[1-4]"),
        ("8", "0", "x"),
    ):
        step_variables = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_STEP_NODELIST": nodes}
        for name, value in (SRUN | step_variables).items():
            monkeypatch.setenv(name, value)
        environment = cluster_environment(find_rank_info(device_settings(), SRUN | step_variables))
        assert 15000 <= environment.main_port < 32768, "below the ports that Linux assigns"
        endpoints.add((environment.main_address, environment.main_port))
    assert [address for address, _ in sorted(endpoints)] == ["node1", "node1", "node3", "x"]
    assert len({port for _, port in endpoints}) == 4


@pytest.mark.parametrize(
    ("environment", "program", "command"),
    [
        (TORCHRUN, "python train.py", f"{RENDEZVOUS} train.py resume=r"),
        (TORCHRUN, "tfm train", f"{RENDEZVOUS} --no-python tfm train resume=r"),
        (
            TORCHRUN | {"TORCHELASTIC_RUN_ID": "a b"},
            "python train.py",
            f"{RENDEZVOUS.replace('abc', repr('a b'))} train.py resume=r",
        ),
        (SRUN, "python train.py", "srun --nodes=2 --ntasks-per-node=2 python train.py resume=r"),
    ],
)
def test_the_command_that_resumes_a_run_on_several_nodes_has_its_launcher(
    environment: dict[str, str], program: str, command: str
) -> None:
    rank_info = find_rank_info(device_settings(), environment)
    assert on_all_nodes([*program.split(), "resume=r"], rank_info) == shlex.split(command)
    assert on_all_nodes(program.split(), RankInfo()) == program.split()


def test_restarted_processes_find_the_newest_run_of_their_launch(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    config = small().mapping
    start = "torchrun none_a\ntorchrun abc"  # of two nodes, of which one was replaced
    launches = [
        ("torchrun abc", TYPED),
        (start, TYPED),
        ("torchrun abc", "other"),
        ("torchrun other, torchrun abc", TYPED),
    ]
    for number, (launch, command) in enumerate(launches, 1):
        run = tmp_path / (f"a.b-{number}" if number > 1 else "a.b")
        run.mkdir()
        record = {
            "vocab": 300,
            "wandb_id": "x",
            "text": {"vocabulary": "x"},
            "launch": launch,
            "commands": [command, "resumed by hand"],
        }
        (run / "run.json").write_text(json.dumps(record))
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        (run / "model.json").write_text(json.dumps({"format": 2, "model": config["model"], "plugins": []}))
        (run / "status.json").write_text('{"state": "failed"}')
    (tmp_path / "a.b-5").mkdir()
    anew = find_rank_info(device_settings(), TORCHRUN)
    saved = find_restarted_run(tmp_path, "a.b", anew, TYPED)
    assert saved is not None and saved.folder.name == "a.b-2"
    assert find_restarted_run(tmp_path, "other", anew, TYPED) is None
    first = find_rank_info(device_settings(), TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0"})
    assert find_restarted_run(tmp_path, "a.b", first, TYPED) is None
