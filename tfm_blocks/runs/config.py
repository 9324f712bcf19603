"""Read config.yaml of a run folder.

The C loader of YAML recurses without a limit, so deep nesting would crash the process. The parser's events, which build
nothing, are therefore checked first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tfm_blocks.errors import RunError
from tfm_blocks.language.files import SAFE_LOADER
from tfm_blocks.runs.files import DEEPEST, damaged, read_text
from tfm_blocks.runs.folder import CONFIG


def read_config(run: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of config.yaml and its mapping. Raises RunError."""
    path = run / CONFIG
    text = read_text(path)
    try:
        return text, parse_mapping(text)
    except ValueError as error:
        raise damaged(path, error) from None


def trained_context(run: Path) -> int | None:
    """Return the context length in tokens of a language model's training, if config.yaml has it."""
    context = _data(run).get("context")
    return context if type(context) is int else None


def trained_documents(run: Path) -> tuple[str, str]:
    """Return `data.documents` and `data.text_key` of a language model's training, by default lines."""
    data = _data(run)
    return str(data.get("documents", "lines")), str(data.get("text_key", "text"))


def _data(run: Path) -> dict[str, Any]:
    """Return the settings of the data, empty if config.yaml lacks them."""
    try:
        data = read_config(run)[1].get("data")
    except RunError:
        return {}
    return data if isinstance(data, dict) else {}


def parse_mapping(text: str) -> dict[str, Any]:
    """Return the mapping in a YAML text. Raises ValueError."""
    try:
        _check_events(text)
        value = yaml.load(text, SAFE_LOADER)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"it is not YAML{line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("it must be a mapping")
    return value


def _check_events(text: str) -> None:
    """Raise ValueError for deep nesting, tags, and an alias within an anchored value, which grow without bound."""
    depth, anchored = 0, 0  # `anchored`: the depth of the outermost value with an anchor that is open
    for event in yaml.parse(text, SAFE_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            anchored = anchored or (depth if event.anchor else 0)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchored = 0 if depth == anchored else anchored
            depth -= 1
        if depth > DEEPEST:
            raise ValueError(f"it nests deeper than {DEEPEST}")
        if tag := getattr(event, "tag", None):
            raise ValueError(f"it has the YAML tag {tag}")
        if isinstance(event, yaml.AliasEvent) and anchored:
            raise ValueError("it has a YAML alias within an anchored value")
