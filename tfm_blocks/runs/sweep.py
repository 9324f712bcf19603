"""The folder of a sweep, as sweep.json describes it: its jobs, those too that have no run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfm_blocks.runs.files import read_or_empty
from tfm_blocks.runs.folder import SWEEP
from tfm_blocks.runs.values import list_at, text_at, texts_at

WAITING = "waiting"
LONGEST_NAME = 255  # bytes: what file systems take


@dataclass(frozen=True)
class RecordedJob:
    """One job. `state` and `reason` are what the sweep wrote down of its end; WAITING where it did not."""

    folder: Path
    overrides: tuple[str, ...]
    state: str
    reason: str


def is_sweep(folder: Path) -> bool:
    """Whether it has a sweep.json."""
    return (folder / SWEEP).is_file()


def read_jobs(folder: Path) -> list[RecordedJob]:
    """Return the jobs in their order; an entry without the name of a folder is left out."""
    return [_job(folder / name, one) for name, one in job_records(folder).items()]


def job_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of sweep.json by the name of their job; none if the file is damaged."""
    listed = list_at(read_or_empty(folder / SWEEP), "jobs")
    return {name: one for one in listed if isinstance(one, dict) and _is_folder_name(name := text_at(one, "name"))}


def _is_folder_name(name: str) -> bool:
    """Return True for a name that leads to a place directly in the folder of the sweep."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:  # half a letter
        return False
    return 0 < len(encoded) <= LONGEST_NAME and name not in (".", "..") and not {"/", "\0"} & set(name)


def _job(run: Path, listed: Mapping[str, Any]) -> RecordedJob:
    return RecordedJob(
        run, texts_at(listed, "overrides"), text_at(listed, "state") or WAITING, text_at(listed, "reason")
    )
