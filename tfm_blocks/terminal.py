"""The encoding of stdout."""

from __future__ import annotations

import sys
from io import TextIOWrapper


def escape_unknown_letters() -> None:
    """Make stdout print a letter that its encoding lacks as an escape, such as `\\u2192`, as stderr always does.

    UTF-8 lacks lone surrogates, which files of a run folder and names of files may hold.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def write_utf8() -> None:
    """Make stdout UTF-8 whatever the locale, because what is printed are data that other programs read."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
