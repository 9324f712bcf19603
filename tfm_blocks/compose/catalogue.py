"""The models that can be chosen by name, as their files describe them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tfm_blocks.compose.comments import Comment, comments_of
from tfm_blocks.compose.folders import config_folders, options, root_keys
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.files import display_path, read_model_file

EDITORS = "yaml-language-server:"  # how a comment begins that is not for people


@dataclass(frozen=True)
class Entry:
    """One file. `parents` are the models that it inherits, `knobs` what it sets by name, and `about` its own words."""

    name: str
    parents: tuple[str, ...]
    knobs: tuple[str, ...]
    about: str
    file: str


def list_models(own: Path | None) -> list[Entry]:
    """Those of conf/model, and of `own`/model. A wrong one is listed with its mistake. Raises ConfigError."""
    return [_entry(name, path) for name, path in options("model", config_folders(own)).items()]


def _entry(name: str, path: Path) -> Entry:
    try:
        file = read_model_file(path, root_keys())
    except ConfigError as error:
        return Entry(name, (), (), f"wrong: {error.problems[0].rule}", display_path(path))
    knobs = tuple(f"{key}={value}" for key, value in file.mapping.items() if key not in ("defaults", "model"))
    return Entry(name, file.parents, knobs, _about(file.text), file.shown)


def _about(text: str) -> str:
    """What stands at the begin, above `model`, or beside the models that are inherited."""
    comments = comments_of(text)
    silent = Comment()
    header = [line for line in comments[()].above if not line.startswith(EDITORS)]
    above, beside = comments.get(("model",), silent).above, comments.get(("defaults",), silent).beside
    return " ".join(header or above) or beside
