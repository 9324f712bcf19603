"""Read `model.json`, the definition of a run's model, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfm_blocks.errors import Problem, RunError, shown
from tfm_blocks.runs.files import read_json
from tfm_blocks.runs.folder import MODEL, expect_folder

FORMAT = 2
READABLE = (1, FORMAT)


def read_model_record(folder: Path, plugins: Sequence[str]) -> Mapping[str, Any]:
    """Return the contents of `model.json`. Raises RunError if its format or one of its plug-ins is unknown."""
    expect_folder(folder)
    record = read_json(folder / MODEL)
    where = str(folder / MODEL)
    if record.get("format") not in READABLE:
        known = " and ".join(map(str, READABLE))
        rule = f"has the format {shown(record.get('format'))}, but this version reads {known}"
        raise RunError(Problem(where, rule, help="use the version of tfm-blocks that wrote it, or a newer one"))
    _expect_plugins(record.get("plugins"), plugins, where)
    return record


def _expect_plugins(recorded: Any, loaded: Sequence[str], where: str) -> None:
    """Raise RunError unless the caller names the plug-ins of the model, because a run folder never imports code."""
    if not isinstance(recorded, list) or not all(isinstance(module, str) for module in recorded):
        raise RunError(Problem(where, "is damaged: plugins must be a list of module names", help="restore it"))
    for module in recorded:
        if module not in loaded:
            rule = f"the model uses blocks of the plug-in {shown(module)}"
            raise RunError(Problem(where, rule, help=f"name it: --plugins {module}, or plugins=[{module!r}] in Python"))
