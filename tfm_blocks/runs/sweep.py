"""sweep.json: the command of a sweep and its jobs, also those without a run folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tfm_blocks.runs.folder import SWEEP
from tfm_blocks.runs.json_file import JsonFile

FORMAT = 1
WAITING = "waiting"
LONGEST_NAME = 255  # bytes; the limit of most file systems


@dataclass(frozen=True)
class JobEntry:
    """A job of a sweep: its run folder, its log file, the hash of its config, and its state with a reason."""

    name: str
    overrides: tuple[str, ...] = ()
    log: str = ""
    config: str = ""
    state: str = WAITING
    reason: str = ""


@dataclass(frozen=True)
class SweepFile(JsonFile):
    """The content of sweep.json. The overrides `asked` identify the sweep."""

    FILE = SWEEP

    format: int = 0
    command: str = ""
    asked: tuple[str, ...] | None = None
    jobs: tuple[JobEntry, ...] = ()

    @property
    def by_name(self) -> dict[str, JobEntry]:
        """Return the jobs by name, without those whose name cannot be a folder."""
        return {job.name: job for job in self.jobs if _is_folder_name(job.name)}


def is_sweep(folder: Path) -> bool:
    """Return True if the folder has a sweep.json."""
    return (folder / SWEEP).is_file()


def _is_folder_name(name: str) -> bool:
    """Return True if the name can be a folder directly in the folder of the sweep."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return 0 < len(encoded) <= LONGEST_NAME and name not in (".", "..") and not {"/", "\0"} & set(name)
