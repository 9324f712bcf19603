"""Read the comments of YAML files, by the path of the key that they describe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

import yaml

from tfm_blocks.language.spec import Path

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # not every build of PyYAML has the fast loader
_BESIDE = re.compile(r":?\s*#\s*(.*)")
_ABOVE = re.compile(r"\s*#(?!\s*@)\s?(.*)")


@dataclass(frozen=True)
class Comment:
    """The comment lines above a key, and the comment after its value."""

    above: tuple[str, ...] = ()
    beside: str = ""


def read_comments(text: str, prefix: Path = ()) -> dict[Path, Comment]:
    """Return the comments of a file whose keys are below `prefix`; the header of the file describes `prefix` itself."""
    lines = text.splitlines()
    root = yaml.compose(text, Loader=LOADER)
    comments = dict(_walk(root, prefix, lines)) if isinstance(root, yaml.MappingNode) else {}
    header = list(takewhile(lambda line: line.startswith("#"), lines))
    about_file = Comment(tuple(match[1] for line in header if (match := _ABOVE.fullmatch(line))))
    if comments and root and root.start_mark.line == len(header):
        first = next(iter(comments))
        comments[first] = Comment((), comments[first].beside)
    return {prefix: about_file} | comments


def _walk(node: yaml.MappingNode, prefix: Path, lines: list[str]) -> Iterator[tuple[Path, Comment]]:
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


def merge_comments(below: Mapping[Path, Comment], over: Mapping[Path, Comment]) -> dict[Path, Comment]:
    """Merge the comments of a file over those of its parents, which stay if the file has none for a key."""
    silent = Comment()
    return {
        path: Comment(
            over.get(path, silent).above or below.get(path, silent).above,
            over.get(path, silent).beside or below.get(path, silent).beside,
        )
        for path in {**below, **over}
    }
