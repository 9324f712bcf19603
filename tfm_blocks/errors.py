"""Errors for users: the address, the file and line, the rule, the value and a fix; and the encoding of stdout."""

from __future__ import annotations

import difflib
import errno
import linecache
import os
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Literal

UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # control, format, surrogate, line and paragraph separator
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})  # errors of writes, which do not name a file
LONGEST_VALUE = 80
LONGEST_LINE = 160
LONGEST_TEXT = 600
LONGEST_MESSAGE = 2000


def cut(text: str, length: int = LONGEST_VALUE) -> str:
    """Shorten text to at most `length` characters, with an ellipsis before its end."""
    if len(text) <= length:
        return text
    begin = length * 2 // 3
    return f"{text[:begin]} … {text[begin + 3 - length :]}"


def shown(value: object) -> str:
    """Format a value for messages: its repr, cut to 80 characters."""
    try:
        return cut(repr(value))
    except ValueError:  # Python refuses to write integers of thousands of digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def listed(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Join texts; of more than `most`, join the first ones and count the others."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 seed`, `2,000 seeds`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def printable(text: str) -> str:
    """Escape control and format characters, such as `\\x1b`, except line breaks and tabs.

    Otherwise a file name could move the cursor, change colours or the title, or reverse the order of letters.
    """
    return "".join(map(_escaped, text)) if not text.isascii() or not text.isprintable() else text


def print_line(text: str) -> None:
    """Print a text that the terminal may wrap, at once."""
    print(printable(text), flush=True)


def is_utf8(text: str) -> bool:
    """Return False for text with lone surrogates, which Python uses for the other bytes of arguments and file names."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _escaped(letter: str) -> str:
    if letter in "\n\t" or unicodedata.category(letter) not in UNPRINTABLE:
        return letter
    return letter.encode("unicode_escape").decode("ascii")


def display_path(path: Path) -> str:
    """Return the path relative to the current folder if it is below it, else the full path."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@dataclass(frozen=True)
class Place:
    """A location in a file. `line` and `column` count from 1; `text` is the stripped line."""

    file: str
    line: int | None = None
    column: int | None = None
    text: str = ""

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        return f"{cut(where, LONGEST_LINE)}   {cut(self.text, LONGEST_LINE)}".rstrip()


def place_of(error: BaseException, module: str) -> Place | None:
    """Return the last line of a Python module, or of its submodules, in the traceback of an error, if there is one."""
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if f"{frame.f_globals.get('__name__')}.".startswith(f"{module}."):
            file = frame.f_code.co_filename
            place = Place(display_path(Path(file)), line, text=linecache.getline(file, line).strip())
    return place


@dataclass(frozen=True)
class Problem:
    """An error, a warning or a note: the `address` of the config key, and the `rule`, a sentence with the value.

    `origin` describes what set the value, and `help` is a fix. Warnings and notes do not stop the run.
    """

    address: str
    rule: str
    place: Place | None = None
    origin: str = ""
    help: str = ""
    severity: Literal["error", "warning", "note"] = "error"

    def __str__(self) -> str:
        rule = cut(self.rule, LONGEST_TEXT)
        address = f"{cut(self.address, LONGEST_LINE)}: " if self.address else ""
        lines = [f"{self.severity}: {address}{rule}"]
        if self.place:
            lines.append(f"  --> {self.place}")
        if self.origin:
            lines.append(f"  {cut(self.origin, LONGEST_LINE)}")
        if self.help:
            lines.append(f"  help: {cut(self.help, LONGEST_TEXT)}")
        return printable("\n".join(lines))


def print_on_rank_0(text: str) -> None:
    """Print to stderr on rank 0 only, because all ranks of a launcher read the same command line and files."""
    of_srun = os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    rank = "RANK" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_PROCID" if of_srun else ""
    if os.environ.get(rank, "0") == "0":
        print(printable(text), file=sys.stderr)


def print_warnings(warnings: Iterable[Problem]) -> None:
    """Print warnings to stderr, since stdout may be data."""
    for warning in warnings:
        print(warning, file=sys.stderr)


PREEMPTED = 75  # exit status of a run that a signal ended, EX_TEMPFAIL of sysexits.h: a scheduler may restart it


class TfmError(Exception):
    """Base of errors for users. Commands print it without a traceback and exit with `exit_status`."""

    exit_status = 1

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(_message(self.problems))


def _message(problems: Sequence[Problem]) -> str:
    """Join the problems that fit into 2,000 characters, at least one, and count the others."""
    lines: list[str] = []
    for number, problem in enumerate(problems):
        lines.append(str(problem))
        if sum(len(line) + 1 for line in lines) > LONGEST_MESSAGE - LONGEST_VALUE and number:
            return "\n".join([*lines[:-1], f"and {counted(len(problems) - number, 'more problem')}"])
    return "\n".join(lines)


class RuleError(ValueError):
    """A rule that a value breaks, as a sentence that continues the address of the value, and a fix in `help`."""

    def __init__(self, rule: str, help: str) -> None:
        super().__init__(rule)
        self.help = help


class ConfigError(TfmError):
    """The config is invalid; nothing was started."""

    exit_status = 2


def config_error(address: str, rule: str, help: str = "") -> ConfigError:
    """Return the error with one problem."""
    return ConfigError(Problem(address, rule, help=help))


def expect_none(problems: Sequence[Problem]) -> None:
    """Raise ConfigError if there are problems."""
    if problems:
        raise ConfigError(problems)


class DataError(TfmError):
    """A text file cannot be used."""


class LimitError(DataError):
    """A text is too long, or a number is above a limit."""


class RunError(TfmError):
    """A run folder is damaged, foreign or incomplete."""


def run_error(address: str, rule: str, help: str = "") -> RunError:
    """Return the error with one problem."""
    return RunError(Problem(address, rule, help=help))


def file_error(error: OSError, place: str) -> RunError | None:
    """Convert an error of the file system, located at `place` if it names no file; return None for other errors."""
    if isinstance(error, BrokenPipeError) or not (error.errno in FULL or (error.errno and error.filename)):
        return None
    help = "make room on the disk" if error.errno in FULL else "check the path and its permissions"
    return RunError(Problem(str(error.filename or place), f"cannot be used: {error.strerror}", help=help))


def suggest(name: str, options: Iterable[str]) -> str:
    """Return `did you mean heads?` if an option is similar, followed by the first twenty options.

    An option that contains a comma is in quotes.
    """
    known = sorted(set(options))
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    matches.sort(key=lambda option: option[:1] != name[:1])  # typing errors rarely affect the first letter
    quoted = {option: f'"{option}"' if "," in option else option for option in known}
    listed = ", ".join(list(quoted.values())[:20]) + (", …" if len(known) > 20 else "")
    hint = f"did you mean {quoted[matches[0]]}? " if matches else ""
    return f"{hint}one of: {listed}" if known else hint.strip()


def unknown_option(
    group: str, name: str, options: Iterable[str], place: Place | None = None, origin: str = ""
) -> Problem:
    """Return the problem of a name that no file of a config group has, such as of a model."""
    help = f"{suggest(name, options)}; your own: --config-dir DIR, with DIR/{group}/NAME.yaml"
    if name.endswith((".yaml", ".yml")):
        help = f"put the file into FOLDER/{group}/ and write --config-dir FOLDER {group}={Path(name).stem}"
    either = ", and there is no such run folder" if group == "model" and "/" in name and not origin else ""
    return Problem(group, f"no {group} is called {shown(name)}{either}", place, origin, help)


def escape_unknown_letters() -> None:
    """Make stdout escape characters that its encoding lacks, such as `\\u2192`, as stderr does.

    UTF-8 cannot encode lone surrogates, which file names and files of a run folder may contain.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def close_output() -> None:
    """Discard the unwritten output, so that Python does not fail when it flushes stdout at exit."""
    if sys.stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_utf8() -> None:
    """Make stdout UTF-8 in every locale, because other programs read the output."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
