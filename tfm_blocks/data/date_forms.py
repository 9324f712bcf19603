"""Date formats: CLDR patterns, and a check that a pattern is unambiguous."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from functools import cached_property
from itertools import pairwise

from babel import Locale, UnknownLocaleError
from babel.dates import DateTimePattern, parse_pattern, tokenize_pattern

CASES = {"upper": str.upper, "lower": str.lower}
FIELDS = {
    "day": {"d", "dd"},
    "month by name": {"MMM", "MMMM", "LLL", "LLLL"},
    "year of four digits": {"y", "yyyy"},
}
WEEKDAYS = {"E", "EE", "EEE", "EEEE", "ccc", "cccc"}


@dataclass(frozen=True)
class Form:
    """A date format: a CLDR pattern in a language, optionally in upper or lower case."""

    language: str
    pattern: str

    def write(self, day: date) -> str:
        """Format `day`, such as 'Dienstag, 3. März 1987'."""
        pattern, case, locale = self._parsed
        text = str(pattern.apply(day, locale))
        return CASES[case](text) if case else text

    @cached_property
    def _parsed(self) -> tuple[DateTimePattern, str, Locale]:
        pattern, _, case = self.pattern.partition(" | ")
        return parse_pattern(pattern), case, Locale.parse(self.language)


def is_language(code: str) -> bool:
    """Return True if CLDR has the language."""
    try:
        Locale.parse(code)
    except (UnknownLocaleError, ValueError):
        return False
    return True


def ambiguity(pattern: str) -> str:
    """Return why dates in this pattern can be ambiguous, or ''."""
    pattern, bar, case = pattern.partition(" | ")
    if bar and case not in CASES:
        return f"after ' | ' must follow {' or '.join(CASES)}, but {case!r} follows"
    tokens = _tokens(pattern)
    fields = [text for text, is_field in tokens if is_field]
    for name, ways in FIELDS.items():
        if sum(field in ways for field in fields) != 1:
            return f"must contain exactly one {name} ({', '.join(sorted(ways))}), but is {pattern!r}"
    others = set(fields) - set().union(*FIELDS.values()) - WEEKDAYS
    if others:
        return f"may contain only day, month, year and weekday, but has {', '.join(sorted(others))}: {pattern!r}"
    if any(char.isdigit() for text, is_field in tokens if not is_field for char in text):
        return f"must not contain literal digits, but is {pattern!r}"
    return "" if _is_separated(tokens) else f"needs a separator between day, month and year, but is {pattern!r}"


def _tokens(pattern: str) -> list[tuple[str, bool]]:
    """Return Babel's tokens of the pattern; True marks a field, such as ('MMMM', True), (' de ', False)."""
    return [
        (value, False) if isinstance(value, str) else (value[0] * value[1], True)
        for _, value in tokenize_pattern(pattern)
    ]


def _is_separated(tokens: list[tuple[str, bool]]) -> bool:
    """Return True if no two fields are adjacent; in some languages month names contain digits."""
    return not any(left and right for (_, left), (_, right) in pairwise(tokens))
