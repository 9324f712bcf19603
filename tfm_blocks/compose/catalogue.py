"""List the models that can be selected by name, with the descriptions in their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tfm_blocks.compose.comments import Comment, read_comments
from tfm_blocks.compose.folders import config_folders, list_options, root_keys
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.files import display_path, read_model_file

EDITORS = "yaml-language-server:"  # prefix of a comment for editors


@dataclass(frozen=True)
class Entry:
    """A model file: the `parents` that it inherits, the `knobs` that it sets, and its description `about`."""

    name: str
    parents: tuple[str, ...]
    knobs: tuple[str, ...]
    about: str
    file: str


def describe_models(config_dir: Path | None) -> list[Entry]:
    """List the models of conf/model and `config_dir`/model. Invalid files are listed with their error."""
    return [_entry(name, path) for name, path in list_options("model", config_folders(config_dir)).items()]


def _entry(name: str, path: Path) -> Entry:
    try:
        file = read_model_file(path, root_keys())
    except ConfigError as error:
        return Entry(name, (), (), f"invalid: {error.problems[0].rule}", display_path(path))
    knobs = tuple(f"{key}={value}" for key, value in file.mapping.items() if key not in ("defaults", "model"))
    return Entry(name, file.parents, knobs, _about(file.text), file.shown)


def _about(text: str) -> str:
    """Return the comment at the beginning of the file, above `model`, or next to `defaults`."""
    comments = read_comments(text)
    silent = Comment()
    header = [line for line in comments[()].above if not line.startswith(EDITORS)]
    above, beside = comments.get(("model",), silent).above, comments.get(("defaults",), silent).beside
    return " ".join(header or above) or beside
