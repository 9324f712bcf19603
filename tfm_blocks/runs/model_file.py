"""The file `model.json`, the definition of a run's model. Reading it imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfm_blocks.errors import Problem, RunError, shown
from tfm_blocks.registry.plugins import is_loaded
from tfm_blocks.runs.folder import MODEL, expect_folder
from tfm_blocks.runs.json_file import JsonFile

FORMAT = 1


@dataclass(frozen=True)
class SavedModel(JsonFile):
    """The content of model.json: the resolved model, the plug-in modules of its blocks, and the columns of its text."""

    FILE = MODEL

    format: int
    model: Mapping[str, Any]
    plugins: tuple[str, ...]
    columns: tuple[str, ...] = ()


def read_saved_model(folder: Path) -> SavedModel:
    """Return the content of `model.json`. Raises RunError if its format is unknown, or a plug-in is not loaded."""
    expect_folder(folder)
    file, where = SavedModel.read(folder), str(folder / MODEL)
    if file.format != FORMAT:
        rule = f"has the format {file.format}, but this version reads {FORMAT}"
        raise RunError(Problem(where, rule, help="use the version of tfm-blocks that wrote it"))
    for module in file.plugins:
        if not is_loaded(module):  # the caller names them, because a run folder never imports code
            rule = f"the model uses blocks of the plug-in {shown(module)}"
            raise RunError(Problem(where, rule, help=f"name it: --plugins {module}, or plugins=[{module!r}] in Python"))
    return file
