"""Read the comments of YAML files by the path of their key, and list the models with their descriptions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import yaml

from tfm_blocks.compose.folders import config_folders, list_options, root_keys
from tfm_blocks.compose.overrides import override_text
from tfm_blocks.errors import ConfigError, display_path
from tfm_blocks.language.files import YamlFile, read_model_file
from tfm_blocks.language.spec import Path as KeyPath

_BESIDE = re.compile(r":?\s*#\s*(.*)")
_ABOVE = re.compile(r"\s*#(?!\s*@)\s?(.*)")
EDITORS = "yaml-language-server:"  # prefix of a comment for editors


@dataclass(frozen=True)
class Comment:
    """The comment lines above a key, and the comment after its value."""

    above: tuple[str, ...] = ()
    beside: str = ""


def read_comments(file: YamlFile, prefix: KeyPath = ()) -> dict[KeyPath, Comment]:
    """Return the comments of a file whose keys are below `prefix`; the header of the file describes `prefix` itself."""
    lines, root = file.text.splitlines(), file.root
    comments = dict(_walk(root, prefix, lines)) if isinstance(root, yaml.MappingNode) else {}
    header = list(takewhile(lambda line: line.startswith("#"), lines))
    about_file = Comment(tuple(match[1] for line in header if (match := _ABOVE.fullmatch(line))))
    if comments and root and root.start_mark.line == len(header):
        first = next(iter(comments))
        comments[first] = Comment((), comments[first].beside)
    return {prefix: about_file} | comments


def _walk(node: yaml.MappingNode, prefix: KeyPath, lines: list[str]) -> Iterator[tuple[KeyPath, Comment]]:
    for key, value in node.value:
        path = (*prefix, str(key.value))
        spread = isinstance(value, yaml.CollectionNode) and not value.flow_style
        mark = key.end_mark if spread else value.end_mark
        beside = _BESIDE.match(lines[mark.line][mark.column :].lstrip()) if mark.line < len(lines) else None
        above = () if node.flow_style else _above(lines, key.start_mark.line)
        yield path, Comment(above, beside[1].strip() if beside else "")
        if isinstance(value, yaml.MappingNode):
            yield from _walk(value, path, lines)


def _above(lines: list[str], line: int) -> tuple[str, ...]:
    comment: list[str] = []
    while line and (match := _ABOVE.fullmatch(lines[line - 1])):
        comment.insert(0, match[1])
        line -= 1
    return tuple(comment)


def merge_comments(below: Mapping[KeyPath, Comment], over: Mapping[KeyPath, Comment]) -> dict[KeyPath, Comment]:
    """Merge the comments of a file over its parents' comments, which stay for keys without a comment in the file."""
    silent = Comment()
    return {
        path: Comment(
            over.get(path, silent).above or below.get(path, silent).above,
            over.get(path, silent).beside or below.get(path, silent).beside,
        )
        for path in {**below, **over}
    }


@dataclass(frozen=True)
class Entry:
    """A model file: the `parents` that it inherits, the `knobs` that it sets, and its description `about`."""

    name: str
    parents: tuple[str, ...]
    knobs: tuple[str, ...]
    about: str
    file: str


def describe_models(config_dir: Path | None) -> list[Entry]:
    """List the models of all config folders. Invalid files are listed with their error."""
    return [_entry(name, path) for name, path in list_options("model", config_folders(config_dir)).items()]


def _entry(name: str, path: Path) -> Entry:
    try:
        file = read_model_file(path, root_keys())
    except ConfigError as error:
        return Entry(name, (), (), f"invalid: {error.problems[0].rule}", display_path(path))
    knobs = tuple(override_text(key, value) for key, value in file.value.items() if key not in ("defaults", "model"))
    comments, silent = read_comments(file), Comment()
    header = [line for line in comments[()].above if not line.startswith(EDITORS)]
    about = " ".join(header or comments.get(("model",), silent).above) or comments.get(("defaults",), silent).beside
    return Entry(name, file.parents, knobs, about, file.shown)
