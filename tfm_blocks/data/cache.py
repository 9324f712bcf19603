"""A cache of folders on disk, named by a hash of their inputs."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import platformdirs

from tfm_blocks.errors import config_error

SUMS = "sums.json"
NOTHING_KEPT = "none"
TRIES = 20
HELP = "write data.cache=PATH, or set TFM_BLOCKS_CACHE"


def cache_folder(setting: str | None) -> Path:
    """Return `data.cache`, else $TFM_BLOCKS_CACHE, else the user's cache folder; `none` is a temporary folder."""
    if setting == NOTHING_KEPT:
        folder = Path(tempfile.mkdtemp(prefix="tfm-blocks-cache-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder
    chosen = setting or os.environ.get("TFM_BLOCKS_CACHE")
    address = "data.cache" if setting else "TFM_BLOCKS_CACHE"
    return expand_home(address, chosen) if chosen else Path(platformdirs.user_cache_dir("tfm-blocks"))


def cache_key(*parts: object) -> str:
    """Return a folder name that depends only on `parts`, which must be plain JSON."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def find_or_build(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return a folder with the output of `build`, from the cache if it is undamaged.

    A file is undamaged if it has its size and time of the build, or else, such as after a copy, its checksum.

    Any number of processes may call this concurrently: each builds in a temporary folder and renames it, and the first
    rename wins. Finished folders are never changed or removed, since another process may be reading them; the
    replacement of a damaged folder gets the next number. Raises ConfigError if the cache is not writable.
    """
    try:
        for number in range(TRIES):
            candidate = folder.with_name(f"{folder.name}-{number}")
            if not candidate.exists():
                candidate.parent.mkdir(parents=True, exist_ok=True)
                temporary = candidate.with_name(f".building-{uuid4().hex}")
                temporary.mkdir()  # with the permissions of a new folder, because a cache may be shared
                try:
                    build(temporary)
                    files = sorted(temporary.iterdir())
                    sums = {path.name: [*_size_and_time(path), file_digest(path)] for path in files}
                    (temporary / SUMS).write_text(json.dumps(sums))
                    temporary.rename(candidate)
                except OSError:
                    if not candidate.exists():  # otherwise another process was first
                        raise
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
            if _is_undamaged(candidate):
                return candidate
    except OSError as error:
        rule = f"the cache {folder.parent} cannot be used: {error.strerror}"
        raise config_error("data.cache", rule, HELP) from None
    raise config_error("data.cache", f"{TRIES} copies of {folder} are damaged", HELP)


def _is_undamaged(folder: Path) -> bool:
    """Return True if all files are as they were built. Raises PermissionError."""
    try:
        sums = json.loads((folder / SUMS).read_text())
        for name, (size, time, digest) in sums.items():
            now = _size_and_time(folder / name)
            if now[0] != size or (now[1] != time and file_digest(folder / name) != digest):
                return False
        return True
    except PermissionError:
        raise
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expand_home(address: str, path: str) -> Path:
    """Replace a leading `~` or `~user` by the home folder. Raises ConfigError if the user does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        rule = f"names the home folder of a user that does not exist: {path}"
        raise config_error(address, rule, "write the full path, or ./ before a literal ~") from None
