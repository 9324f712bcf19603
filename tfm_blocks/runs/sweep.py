"""Read the jobs of a sweep from sweep.json, also those without a run folder."""

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
LONGEST_NAME = 255  # bytes; the limit of most file systems


@dataclass(frozen=True)
class RecordedJob:
    """One job. `state` and `reason` are those in sweep.json; WAITING if it has none."""

    folder: Path
    overrides: tuple[str, ...]
    state: str
    reason: str


def is_sweep(folder: Path) -> bool:
    """Return True if the folder has a sweep.json."""
    return (folder / SWEEP).is_file()


def read_jobs(folder: Path) -> list[RecordedJob]:
    """Return the jobs in their order; an entry without the name of a folder is skipped."""
    return [_job(folder / name, entry) for name, entry in job_records(folder).items()]


def job_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of sweep.json by the name of their job; none if the file is damaged."""
    listed = list_at(read_or_empty(folder / SWEEP), "jobs")
    entries = [entry for entry in listed if isinstance(entry, dict)]
    return {name: entry for entry in entries if _is_folder_name(name := text_at(entry, "name"))}


def _is_folder_name(name: str) -> bool:
    """Return True if the name can be a folder directly in the folder of the sweep."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return 0 < len(encoded) <= LONGEST_NAME and name not in (".", "..") and not {"/", "\0"} & set(name)


def _job(run: Path, listed: Mapping[str, Any]) -> RecordedJob:
    return RecordedJob(
        run, texts_at(listed, "overrides"), text_at(listed, "state") or WAITING, text_at(listed, "reason")
    )
