"""Where each value of a composed config was written: file, line and column, or the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from tfm_blocks.errors import Place, Problem
from tfm_blocks.language.spec import Path

_KNOB = re.compile(r"\$\{\s*([A-Za-z_]\w*)\s*\}")


@dataclass(frozen=True)
class SourceKey:
    """A key in a file: the spot of the key, and the value's text where it is a scalar."""

    place: Place
    text: str


@dataclass
class Sources:
    """Paths to the spots that wrote them last. `chosen` are the files that were asked for, not their parents."""

    written: dict[Path, SourceKey] = field(default_factory=dict)
    overrides: dict[Path, str] = field(default_factory=dict)
    chosen: set[str] = field(default_factory=set)

    def add_file(self, file: str, text: str, prefix: Path = (), *, chosen: bool = False) -> None:
        """Notes every key of a YAML file, below `prefix`; the last file that has a key wins."""
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(root, yaml.MappingNode):
            self._walk(root, prefix, file, text.splitlines())
        if chosen:
            self.chosen.add(file)

    def _walk(self, node: yaml.MappingNode, path: Path, file: str, lines: Sequence[str]) -> None:
        for key, value in node.value:
            here = (*path, str(key.value))
            mark = key.start_mark
            place = Place(file, mark.line + 1, mark.column + 1, lines[mark.line].strip())
            self.written[here] = SourceKey(place, value.value if isinstance(value, yaml.ScalarNode) else "")
            if isinstance(value, yaml.MappingNode):
                self._walk(value, here, file, lines)

    def place(self, path: Path) -> Place | None:
        """The spot of `path`, or of the nearest key around it that a file wrote."""
        while path:
            if path in self.written:
                return self.written[path].place
            path = path[:-1]
        return None

    def origin(self, path: Path) -> str:
        """A sentence on who set `path`, following `${knob}` to the knob; empty where the place says it already."""
        if path in self.overrides:
            return f"{path[-1]} comes from the command line: {self.overrides[path]}"
        knob = self._knob(path)
        written = self.written.get((knob,)) if knob else None
        if knob and (knob,) in self.overrides:
            return f"{knob} comes from the command line: {self.overrides[(knob,)]}"
        return f"{knob} is set at {written.place}" if written else ""

    def _knob(self, path: Path) -> str | None:
        written = self.written.get(path)
        match = _KNOB.search(written.text) if written else None
        return match[1] if match else None

    def set_here(self, path: Path) -> bool:
        """Set by the chosen file or the command line, also through a knob, rather than inherited."""
        if path in self.overrides:
            return True
        written = self.written.get(path)
        knob = self._knob(path)
        own = written is not None and written.place.file in self.chosen
        return own or (knob is not None and (knob,) in self.overrides)

    def problem(self, path: Path, rule: str, *, blame: Path | None = None, help: str = "") -> Problem:
        """A problem at `path`; `blame` is the path of the value that causes it, where that is another."""
        return Problem(".".join(path), rule, self.place(path), self.origin(blame or path), help)


def knobs_read(mapping: Mapping[str, object]) -> set[str]:
    """The names of all `${knob}` in a raw (unresolved) mapping."""
    found: set[str] = set()
    for value in mapping.values():
        if isinstance(value, Mapping):
            found |= knobs_read(value)
        elif isinstance(value, str):
            found |= set(_KNOB.findall(value))
    return found
