"""Names and free places of run folders, and their small JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tfm_blocks.errors import Place, Problem, RunError

MODEL = "model.json"
TOKENIZER = "tokenizer.json"
WEIGHTS = "weights.safetensors"
STATUS = "status.json"
CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"


def expect_folder(run: Path) -> None:
    """Raises RunError where there is no folder."""
    if not run.is_dir():
        rule = "is a file, not a run folder" if run.exists() else "there is no such run folder"
        raise RunError(Problem(str(run), rule, help="write the folder that training named, such as runs/NAME"))


def claim_folder(root: Path, name: str) -> Path:
    """Makes `root/name`, or the first free of `name-2`, `name-3`, …: no run writes into another's folder."""
    root.mkdir(parents=True, exist_ok=True)
    count = 1
    while True:
        folder = root / (name if count == 1 else f"{name}-{count}")
        try:
            folder.mkdir()
        except FileExistsError:
            count += 1
        else:
            return folder


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes the file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")
    part.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run folder. Raises RunError where it is missing, damaged or no object."""
    if not path.is_file():
        raise RunError(Problem(str(path), "the file is missing: this is no run folder, or its training did not finish"))
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(Problem(str(path), f"is damaged: {error}", Place(str(path)))) from None
    if not isinstance(value, dict):
        raise RunError(Problem(str(path), "is damaged: it holds no JSON object", Place(str(path))))
    return cast(dict[str, Any], value)
