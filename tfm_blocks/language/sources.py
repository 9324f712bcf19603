"""Source locations of the values of a composed config: file, line and column, or the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from tfm_blocks.errors import Place, Problem
from tfm_blocks.language.files import YamlFile
from tfm_blocks.language.spec import Path
from tfm_blocks.registry.blocks import Registry

_KNOB = re.compile(r"\$\{\s*([A-Za-z_]\w*)\s*\}")


@dataclass
class Sources:
    """Map each path to the location that set it last. `chosen` are the requested files without their parents.

    `values` holds the text of the value at each path if that is a scalar. `files` holds each file by its display path,
    in the order in which they are merged.
    """

    written: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, str] = field(default_factory=dict)
    overrides: dict[Path, str] = field(default_factory=dict)
    chosen: set[str] = field(default_factory=set)
    files: dict[str, YamlFile] = field(default_factory=dict)

    def add_file(self, file: YamlFile, prefix: Path = (), *, chosen: bool = False) -> None:
        """Record every key of a YAML file, below `prefix`; the last file with a key wins."""
        self.files[file.shown] = file
        for path, place, value in file.entries:
            self.written[(*prefix, *path)], self.values[(*prefix, *path)] = place, value
        if chosen:
            self.chosen.add(file.shown)

    def by_file(self) -> list[Sources]:
        """Return the locations that each file sets, whether or not a later file sets them too."""
        alone = [Sources() for _ in self.files]
        for sources, file in zip(alone, self.files.values(), strict=True):
            sources.add_file(file)
        return alone

    def excerpt(self, path: Path) -> str:
        """Return the lines that write `path`: the line of its key, and the following lines that are indented deeper."""
        place = self.written[path]
        lines = self.files[place.file].text.splitlines()[(place.line or 1) - 1 :]
        indents = [len(line) - len(line.lstrip()) for line in lines]
        inside = takewhile(
            lambda pair: pair[1] > indents[0] and pair[0].strip(), zip(lines[1:], indents[1:], strict=True)
        )
        return "\n".join(line[indents[0] :] for line in (lines[0], *(line for line, _ in inside)))

    def unchanged(self, path: Path) -> Path:
        """Return `path`, or the path below `layer` that writes the value if a key of `at` leaves it unchanged."""
        for index in [index for index, key in enumerate(path) if key == "at"]:
            above = {key[:end] for key in self.overrides for end in range(1, len(key) + 1)}
            known = self.written.keys() | above
            layer, change, rest = (*path[:index], "layer"), path[: index + 2], path[index + 2 :]
            lengths = range(1, len(rest) + 1)
            in_layer, in_change = (
                max((end for end in lengths if (*outer, *rest[:end]) in known), default=0) for outer in (layer, change)
            )
            if in_layer > in_change:
                return self.unchanged((*layer, *rest))
        return path

    def place(self, path: Path) -> Place | None:
        """Return the location of `path`, or of its nearest parent key in a file."""
        path = self.unchanged(path)
        while path:
            if path in self.written:
                return self.written[path]
            path = path[:-1]
        return None

    def origin(self, path: Path) -> str:
        """Describe what set `path`, following `${knob}` to the knob; return "" if the location already shows it."""
        if path in self.overrides:
            return f"{path[-1]} comes from the command line: {self.overrides[path]}"
        knob = self.knob(path)
        if knob and (knob,) in self.overrides:
            return f"{knob} comes from the command line: {self.overrides[(knob,)]}"
        return f"{knob} is set at {self.written[(knob,)]}" if knob and (knob,) in self.written else ""

    def rank(self, path: Path) -> int | None:
        """Return the position in merge order of the file that sets `path`, the last for the command line, or None."""
        if path in self.overrides:
            return len(self.files)
        return list(self.files).index(self.written[path].file) if path in self.written else None

    def knob(self, path: Path) -> str | None:
        """Return the knob in the value of `path`, such as `heads` of `${heads}`."""
        match = _KNOB.search(self.values.get(path, ""))
        return match[1] if match else None

    def is_set_by_user(self, path: Path) -> bool:
        """Return True if the chosen file or the command line sets `path`, directly or by a knob; False if inherited."""
        return self.is_typed(path) or (path in self.written and self.written[path].file in self.chosen)

    def is_typed(self, path: Path) -> bool:
        """Return True if the command line sets `path`, directly or by a knob."""
        return path in self.overrides or (self.knob(path),) in self.overrides

    def problem(self, path: Path, rule: str, *, blame: Path | None = None, help: str = "") -> Problem:
        """Build a problem at `path`; `blame` is the path of the value that causes it, if different."""
        path = self.unchanged(path)
        return Problem(".".join(path), rule, self.place(path), self.origin(self.unchanged(blame or path)), help)


class Pass:
    """Base of the passes of the checker, which collect `problems`."""

    def __init__(self, registry: Registry, sources: Sources) -> None:
        self.registry = registry
        self.sources = sources
        self.problems: list[Problem] = []

    def report(self, path: Path, rule: str, help: str) -> None:
        self.add(self.sources.problem(path, rule, help=help))

    def add(self, problem: Problem) -> None:
        """Add a problem unless it was added before."""
        if problem not in self.problems:
            self.problems.append(problem)


def find_knobs(value: object) -> set[str]:
    """Return the names of all `${knob}` in a raw (unresolved) value."""
    if isinstance(value, Mapping):
        return set[str]().union(*map(find_knobs, value.values()))
    if isinstance(value, list):
        return set[str]().union(*map(find_knobs, value))
    return set(_KNOB.findall(value)) if isinstance(value, str) else set()
