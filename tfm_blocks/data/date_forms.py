"""How people write dates: CLDR patterns, and which of them have one reading only."""

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
    """One way to write a date: a CLDR pattern in a language, as it comes or in one case."""

    language: str
    pattern: str

    def write(self, day: date) -> str:
        """`day` in this form, as in 'Dienstag, 3. März 1987'."""
        pattern, case, locale = self._parsed
        text = str(pattern.apply(day, locale))
        return CASES[case](text) if case else text

    @cached_property
    def _parsed(self) -> tuple[DateTimePattern, str, Locale]:
        pattern, _, case = self.pattern.partition(" | ")
        return parse_pattern(pattern), case, Locale.parse(self.language)


def is_language(code: str) -> bool:
    """Whether CLDR has it."""
    try:
        Locale.parse(code)
    except (UnknownLocaleError, ValueError):
        return False
    return True


def ambiguity(pattern: str) -> str:
    """What keeps a form of this pattern from having one reading, or ''."""
    pattern, bar, case = pattern.partition(" | ")
    if bar and case not in CASES:
        return f"after ' | ' comes {' or '.join(CASES)}, but here comes {case!r}"
    tokens = _tokens(pattern)
    fields = [text for text, is_field in tokens if is_field]
    for name, ways in FIELDS.items():
        if sum(field in ways for field in fields) != 1:
            return f"must hold one {name} ({', '.join(sorted(ways))}), but is {pattern!r}"
    others = set(fields) - set().union(*FIELDS.values()) - WEEKDAYS
    if others:
        return f"may hold a day, month, year and weekday only, but holds {', '.join(sorted(others))}: {pattern!r}"
    if any(char.isdigit() for text, is_field in tokens if not is_field for char in text):
        return f"may hold no digits of its own, but is {pattern!r}"
    return "" if _apart(tokens) else f"needs something between day, month and year, but is {pattern!r}"


def _tokens(pattern: str) -> list[tuple[str, bool]]:
    """The pattern in pieces, as Babel reads it; True marks a field, as in ('MMMM', True), (' de ', False)."""
    return [
        (value, False) if isinstance(value, str) else (value[0] * value[1], True)
        for _, value in tokenize_pattern(pattern)
    ]


def _apart(tokens: list[tuple[str, bool]]) -> bool:
    """Whether no two parts of the date touch: in some languages months are named with digits."""
    return not any(left and right for (_, left), (_, right) in pairwise(tokens))
