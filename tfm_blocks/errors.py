"""What a user reads when something is wrong: an address, a place, the rule, the value and a way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A spot in a file. `line` and `column` count from 1; `text` is that line, stripped."""

    file: str
    line: int | None = None
    column: int | None = None
    text: str = ""

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        return f"{where}   {self.text}".rstrip()


@dataclass(frozen=True)
class Problem:
    """One mistake: `address` says where in the config, `rule` is a sentence that holds the rule and the value."""

    address: str
    rule: str
    place: Place | None = None
    origin: str = ""
    help: str = ""

    def __str__(self) -> str:
        lines = [f"error: {self.address}: {self.rule}" if self.address else f"error: {self.rule}"]
        if self.place:
            lines.append(f"  --> {self.place}")
        if self.origin:
            lines.append(f"  {self.origin}")
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)


class TfmError(Exception):
    """A mistake of the user's, told in full. The commands print it without a traceback and leave with `exit_status`."""

    exit_status = 1

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class ConfigError(TfmError):
    """The config is wrong; nothing was started."""

    exit_status = 2


class DataError(TfmError):
    """A text file cannot be used as it is."""


class RunError(TfmError):
    """A run folder is damaged, foreign or incomplete."""


def suggest(name: str, options: Iterable[str]) -> str:
    """`did you mean heads?` where an option is near, then the options themselves (the first twenty)."""
    known = sorted(set(options))
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    listed = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}one of: {listed}" if known else hint.strip()
