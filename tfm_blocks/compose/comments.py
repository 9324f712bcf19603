"""The comments of YAML files, by the path of the key that they are about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

import yaml

from tfm_blocks.language.spec import Path

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the fast one is not in every build of PyYAML
_BESIDE = re.compile(r":?\s*#\s*(.*)")
_ABOVE = re.compile(r"\s*#(?!\s*@)\s?(.*)")


@dataclass(frozen=True)
class Comment:
    """The lines above a key, and what stands behind its value."""

    above: tuple[str, ...] = ()
    beside: str = ""


def comments_of(text: str, prefix: Path = ()) -> dict[Path, Comment]:
    """The comments of a file whose keys are below `prefix`; what the file begins with is about `prefix` itself."""
    lines = text.splitlines()
    root = yaml.compose(text, Loader=LOADER)
    found = dict(_walk(root, prefix, lines)) if isinstance(root, yaml.MappingNode) else {}
    header = list(takewhile(lambda line: line.startswith("#"), lines))
    about_file = Comment(tuple(match[1] for line in header if (match := _ABOVE.fullmatch(line))))
    if found and root and root.start_mark.line == len(header):
        first = next(iter(found))
        found[first] = Comment((), found[first].beside)
    return {prefix: about_file} | found


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
    found: list[str] = []
    while line and (match := _ABOVE.fullmatch(lines[line - 1])):
        found.insert(0, match[1])
        line -= 1
    return tuple(found)


def lay_over(below: Mapping[Path, Comment], over: Mapping[Path, Comment]) -> dict[Path, Comment]:
    """The comments of a file on top of those of what it inherits, which stay where it says nothing."""
    silent = Comment()
    return {
        path: Comment(
            over.get(path, silent).above or below.get(path, silent).above,
            over.get(path, silent).beside or below.get(path, silent).beside,
        )
        for path in {**below, **over}
    }
