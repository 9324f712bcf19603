"""Names of sweeps and of their jobs, made of the keys and values that vary."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from tfm_blocks.runs.folder import numbered_names

LONGEST = 80  # characters; leaves room for .log and a number
UNSWEPT = "sweep", "run"  # the names of a sweep without varying keys, and of its job


def sweep_name(swept: Sequence[str]) -> str:
    """Return the name of a sweep, such as `model_heads_seed`."""
    return _cut("_".join(short_keys(swept))) or UNSWEPT[0]


def job_names(swept: Sequence[str], values: Sequence[Sequence[str]]) -> list[str]:
    """Return a name such as `model-base_heads-2` for each row of values; empty values have no part in it.

    Duplicates get a number.
    """
    keys, names = short_keys(swept), []
    for row in values:
        name = _cut("_".join(f"{key}-{text}" for key, text in zip(keys, row, strict=True) if text)) or UNSWEPT[1]
        names.append(next(free for free in numbered_names(name) if free not in names))
    return names


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, or the whole key if another key ends with the same part."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]


def _cut(name: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", name.replace("+", "")).strip("_.-")
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
