"""Runs whose processes torchrun or srun starts, on one machine and on two."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tfm_blocks.runs.checkpoints import list_checkpoints, newest_intact

ROOT = Path(__file__).parents[2]
PATIENCE = 900  # seconds: a machine may be busy
SMALL = [
    "name=run", "layers=1", "d_model=16", "d_ff=24", "heads=2", "vocab=300", "dropout=0.3", "data.train=200", "data.val=20", "data.test=10",
    "data.step_tokens=240", "data.max_length=60", "trainer.steps=8", "trainer.validate_every=4", "trainer.validate_sentences=2",
    "trainer.checkpoint_every=1", "trainer.log_every=2", "trainer.accelerator=cpu", "trainer.precision=fp32", "logger=csv",
]  # fmt: skip
ENDLESS = [text.replace("steps=8", "steps=100000") for text in SMALL]
FAULT = "++model.graph.bad={block: faulty, harm: end_once, sound: SOUND, after: src_pos}"
HARMLESS = ["plugins=[faulty]", FAULT.replace("SOUND", "1000")]
HARMFUL = ["plugins=[faulty]", FAULT.replace("SOUND", "5")]


def torchrun(nodes: int, devices: int, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes}",
        f"--nproc-per-node={devices}",
        *arguments,
    ]


def start(command: Sequence[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    own = {"TFM_BLOCKS_CACHE": str(folder.parent / "cache"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **own, **environment}, **options)


@contextmanager
def ended(processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Kill the processes at the end of the block, even if the test fails."""
    try:
        yield
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def all_end(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Return the outputs of processes, which must exit with 0."""
    with ended(processes):
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return outputs


def run_alone(folder: Path, *overrides: str) -> str:
    (output,) = all_end([start([sys.executable, str(ROOT / "train.py"), *SMALL, *overrides], folder)])
    return output


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of one command that starts two processes."""
    folder = tmp_path_factory.mktemp("alone") / "one"
    run_alone(folder, "trainer.devices=2")
    return folder


def expect_same(one: Path, other: Path) -> None:
    """Check that the saved weights of two runs, and those after the last step, are bit-identical."""
    for name in ("weights.safetensors", "checkpoints/step-00000008.safetensors"):
        first, second = (load_file(path / "runs" / "run" / name) for path in (one, other))
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert [path.name for path in (other / "runs").iterdir()] == ["run"]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.slow
def test_torchrun_restarts_a_dead_worker_and_the_weights_are_the_same(tmp_path: Path) -> None:
    run_alone(tmp_path / "whole", *HARMLESS, "trainer.devices=2")
    command = torchrun(1, 2, "--standalone", "--max-restarts=1", str(ROOT / "train.py"), *SMALL, *HARMFUL)
    (output,) = all_end([start([*command, "trainer.devices=2"], tmp_path / "restarted")])
    assert "cluster: torchrun, rank 0 of 2, gloo on cpu" in output
    assert "exitcode: -9" in output and "resume: runs/run after " in output
    expect_same(tmp_path / "whole", tmp_path / "restarted")


@pytest.mark.slow
def test_two_torchruns_train_what_one_command_trains(one: Path, tmp_path: Path) -> None:
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=x"]
    command = [*torchrun(2, 1, *meet), str(ROOT / "train.py"), *SMALL, "trainer.num_nodes=2"]
    outputs = all_end([start(command, tmp_path / "two") for _ in range(2)])
    assert sorted(line for output in outputs for line in output.splitlines() if line.startswith("cluster:")) == [
        f"cluster: torchrun, rank {rank} of 2 on 2 nodes, gloo on cpu" for rank in range(2)
    ]
    expect_same(one, tmp_path / "two")


@pytest.mark.slow
def test_a_signal_to_torchrun_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    command = [*torchrun(1, 2, "--standalone"), str(ROOT / "train.py"), *ENDLESS, "trainer.devices=2"]
    process = start(command, tmp_path / "stopped")
    run = tmp_path / "stopped" / "runs" / "run"
    with ended([process]):
        wait_for(run / "checkpoints" / "latest.json", process)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=PATIENCE)[0]
    assert json.loads((run / "status.json").read_text())["state"] == "preempted"
    assert output.count("resume: python train.py resume=runs/run") == 1


@pytest.mark.slow
def test_no_process_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    """The ranks also write a checkpoint, although the next one was due much later."""
    rarely = [text.replace("checkpoint_every=1", "checkpoint_every=100000") for text in ENDLESS]
    process = start([sys.executable, str(ROOT / "train.py"), *rarely, "trainer.devices=2"], tmp_path / "killed")
    checkpoints = tmp_path / "killed" / "runs" / "run" / "checkpoints"
    with ended([process]):
        wait_for(checkpoints / "step-00000004.safetensors", process)
        assert [one.step for one in list_checkpoints(checkpoints)] == [0]
        process.kill()
        process.wait()
        killed_at = time.monotonic()
        with pytest.raises(ProcessLookupError):  # no process of its session is alive
            while time.monotonic() < killed_at + PATIENCE:
                os.killpg(process.pid, 0)
                time.sleep(0.1)
    newest = newest_intact(checkpoints)
    assert newest is not None and newest.step >= 4


@pytest.mark.slow
def test_a_world_of_another_size_ends_before_the_run_starts(tmp_path: Path) -> None:
    process = start([*torchrun(1, 2, "--standalone"), str(ROOT / "train.py"), *SMALL], tmp_path / "other")
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode != 0
    assert "requests 1 processes on each of 1 nodes, but torchrun started 2 processes on 1 nodes" in output
    assert "help: write trainer.devices=2 trainer.num_nodes=1" in output
    assert not list((tmp_path / "other").iterdir())


def slurm(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the environment that srun gives each task, with one task on each node."""
    return {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": str(world), "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank), "SLURM_NNODES": str(world),
        "SLURM_STEP_NUM_TASKS": str(world), "SLURM_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


@pytest.mark.slow
def test_slurm_tasks_train_what_one_command_trains(one: Path, tmp_path: Path) -> None:
    command, port = [sys.executable, str(ROOT / "train.py"), *SMALL, "trainer.num_nodes=2"], free_port()
    outputs = all_end([start(command, tmp_path / "two", **slurm(rank, 2, port)) for rank in range(2)])
    assert "cluster: slurm, rank 0 of 2 on 2 nodes, gloo on cpu" in outputs[0]
    expect_same(one, tmp_path / "two")


@pytest.mark.slow
def test_different_command_lines_on_nodes_are_refused_before_data_is_read(tmp_path: Path) -> None:
    command, port = [sys.executable, str(ROOT / "train.py"), *SMALL, "trainer.num_nodes=2"], free_port()
    words = [[*command, f"label_smoothing=0.{rank}"] for rank in range(2)]
    processes = [start(words[rank], tmp_path / "two", **slurm(rank, 2, port)) for rank in range(2)]
    with ended(processes):
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert "process 1 has another config than process 0" in outputs[0] and outputs[1] == ""
    assert not list((tmp_path / "two").iterdir())


@contextmanager
def hosts() -> Iterator[list[list[str]]]:
    """Connect two network namespaces, 10.77.0.1 and 10.77.0.2; yield the command prefix that enters each."""
    names = [f"tfm-{os.getpid()}-{number}" for number in (1, 2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth77", "netns", names[0], "type", "veth", "peer", "name", "eth77", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth77")
            for device in ("lo", "eth77"):
                ip("-n", name, "link", "set", device, "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("ip"), reason="needs the command ip, of iproute2")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
def test_two_hosts_train_what_one_command_trains(one: Path, tmp_path: Path) -> None:
    with hosts() as commands:
        processes = []
        for number, command in enumerate(commands, 1):
            meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", "--rdzv-id=x"]
            meet += [f"--rdzv-conf=is_host={str(number == 1).lower()}", f"--local-addr=10.77.0.{number}"]
            words = [*command, *torchrun(2, 1, *meet), str(ROOT / "train.py"), *SMALL, "trainer.num_nodes=2"]
            processes.append(start(words, tmp_path / "two", GLOO_SOCKET_IFNAME="eth77"))
        outputs = all_end(processes)
    assert any("cluster: torchrun, rank 0 of 2 on 2 nodes" in output for output in outputs)
    expect_same(one, tmp_path / "two")
