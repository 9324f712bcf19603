"""The folder of a sweep, as sweep.json describes it: its jobs, those too that have no run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfm_blocks.errors import RunError
from tfm_blocks.runs.folder import SWEEP, read_json

WAITING = "waiting"
LONGEST_NAME = 255  # bytes: what file systems take


@dataclass(frozen=True)
class SweepJob:
    """One job. `state` and `reason` are what the sweep wrote down of its end; WAITING where it did not."""

    folder: Path
    overrides: tuple[str, ...]
    state: str
    reason: str


def is_sweep(folder: Path) -> bool:
    """Whether it has a sweep.json."""
    return (folder / SWEEP).is_file()


def read_jobs(folder: Path) -> list[SweepJob]:
    """The jobs in their order; none of a damaged file, and none whose name leads out of the folder."""
    try:
        listed = read_json(folder / SWEEP).get("jobs")
    except RunError:
        return []
    jobs = [_job(folder, one) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return [job for job in jobs if job.folder.parent == folder and _fits(job.folder.name)]


def _fits(name: str) -> bool:
    return len(name.encode("utf-8", "replace")) <= LONGEST_NAME


def _job(folder: Path, listed: Mapping[str, Any]) -> SweepJob:
    overrides = listed.get("overrides")
    texts = tuple(map(str, overrides)) if isinstance(overrides, list) else ()
    state, reason = (str(listed.get(key) or "") for key in ("state", "reason"))
    name = str(listed.get("name") or "?")
    place = folder / name if name not in (".", "..") and "/" not in name else Path(name)
    return SweepJob(place, texts, state or WAITING, reason)
