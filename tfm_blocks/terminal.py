"""The encoding of stdout."""

from __future__ import annotations

import sys
from io import TextIOWrapper


def escape_unknown_letters() -> None:
    """Make stdout escape characters that its encoding lacks, such as `\\u2192`, as stderr does.

    UTF-8 cannot encode lone surrogates, which file names and files of a run folder may contain.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def write_utf8() -> None:
    """Make stdout UTF-8 in every locale, because other programs read the output."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
