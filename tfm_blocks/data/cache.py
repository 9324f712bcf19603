"""Folders on disk that are named by what went into them, so that nothing is computed twice."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

from tfm_blocks.data.home import expand_home
from tfm_blocks.errors import ConfigError, Problem

SUMS = "sums.json"
NOTHING_KEPT = "none"
TRIES = 20
HELP = "write data.cache=PATH, or set TFM_BLOCKS_CACHE"


def cache_folder(setting: str | None) -> Path:
    """`data.cache`, else $TFM_BLOCKS_CACHE, else the user's cache folder; of `none` one that ends with the process."""
    if setting == NOTHING_KEPT:
        folder = Path(tempfile.mkdtemp(prefix="tfm-blocks-cache-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder
    chosen = setting or os.environ.get("TFM_BLOCKS_CACHE")
    address = "data.cache" if setting else "TFM_BLOCKS_CACHE"
    return expand_home(address, chosen) if chosen else Path(platformdirs.user_cache_dir("tfm-blocks"))


def cache_key(*parts: object) -> str:
    """A folder name that is the same for the same `parts`, which must be plain JSON."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def find_or_build(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns a folder with what `build` writes. A cached folder is taken where its checksums hold.

    Any number of processes may call this at once: each builds in a temporary folder and renames it, and the first one
    stays. Finished folders are never changed or removed, since another process may be reading them: the replacement of
    a damaged folder gets the next number. Raises ConfigError where the cache cannot be written.
    """
    try:
        for number in range(TRIES):
            place = folder.with_name(f"{folder.name}-{number}")
            if not place.exists():
                _build_aside(place, build)
            if _is_undamaged(place):
                return place
    except OSError as error:
        rule = f"the cache {folder.parent} cannot be used: {error.strerror}"
        raise ConfigError(Problem("data.cache", rule, help=HELP)) from None
    raise ConfigError(Problem("data.cache", f"{TRIES} copies of {folder} are damaged", help=HELP))


def _build_aside(place: Path, build: Callable[[Path], None]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".building-", dir=place.parent))
    try:
        build(aside)
        (aside / SUMS).write_text(json.dumps({path.name: _digest(path) for path in sorted(aside.iterdir())}))
        aside.rename(place)
    except OSError:
        if not place.exists():  # otherwise another process was first
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_undamaged(place: Path) -> bool:
    try:
        sums = json.loads((place / SUMS).read_text())
        return all(_digest(place / name) == digest for name, digest in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
