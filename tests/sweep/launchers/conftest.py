"""A cluster whose commands are stubs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

STUBS = Path(__file__).parent / "slurm"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of the stubs; kill the processes that they started afterwards."""
    from tfm_blocks.sweep.launchers import slurm

    folder = tmp_path / "cluster"
    folder.mkdir()
    monkeypatch.setenv("SLURM_STUBS", str(folder))
    monkeypatch.setenv("PATH", f"{STUBS}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "SQUEUE_INTERVAL", 0.2)
    monkeypatch.setattr(slurm, "STATUS_INTERVAL", 0.1)
    monkeypatch.setattr(slurm, "STATUS_DELAY", 1.0)
    slurm.submitit.SlurmJob.watcher.clear()  # it caches job numbers, which the stubs reuse
    yield folder
    for tasks in folder.glob("jobs/*/tasks"):
        for task in tasks.read_text().split():
            subprocess.run(["kill", "-9", task], check=False, stderr=subprocess.DEVNULL)
