"""The corpus that needs no download: dates as people write them in several languages, to ISO 8601."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
from babel import Locale, UnknownLocaleError
from babel.dates import parse_pattern, tokenize_pattern

from tfm_blocks.data.settings import DatesSettings
from tfm_blocks.errors import ConfigError, Problem

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
        pattern, _, case = self.pattern.partition(" | ")
        text = str(parse_pattern(pattern).apply(day, Locale.parse(self.language)))
        return CASES[case](text) if case else text

    def problem(self) -> str:
        """What keeps the form from having one reading, or ''."""
        pattern, bar, case = self.pattern.partition(" | ")
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


@dataclass(frozen=True)
class DatePairs:
    """The pairs of a split, and the language of each; `address` is its key in the config."""

    address: str
    written: list[tuple[str, str]]
    groups: list[str]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Written date and ISO date."""
        return iter(self.written)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the text."""
        return hashlib.sha256("\n".join(chain.from_iterable(self.written)).encode()).hexdigest()


def date_splits(settings: DatesSettings, seed: int) -> dict[str, DatePairs]:
    """train, val and test, from `seed`. No day of one split occurs in another, in any language or form.

    Languages take turns, forms are drawn; training days come once each before any comes again. Raises ConfigError.
    """
    _check(settings)
    first, last = date(settings.first_year, 1, 1).toordinal(), date(settings.last_year, 12, 31).toordinal()
    random = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(1,)))  # other numbers than the plan's
    days = first + np.argsort(random.random_raw(last - first + 1), kind="stable")  # a shuffle that NumPy never changes
    val_days, test_days, train_days = np.split(days, [settings.val, settings.val + settings.test])
    val = _draw("data.val", val_days.tolist(), settings, settings.val, random)
    test = _draw("data.test", test_days.tolist(), settings, settings.test, random)
    train = _draw("data.train", train_days.tolist(), settings, settings.train, random)
    return {"train": train, "val": val, "test": test}


def _draw(address: str, days: list[int], settings: DatesSettings, size: int, random: np.random.PCG64) -> DatePairs:
    forms = [[Form(language, pattern) for pattern in patterns] for language, patterns in settings.patterns.items()]
    pairs, groups = [], []
    for place, number in enumerate(random.random_raw(size).tolist()):
        turn = forms[place % len(forms)]
        day, form = date.fromordinal(days[place % len(days)]), turn[number % len(turn)]
        pairs.append((form.write(day), day.isoformat()))
        groups.append(form.language)
    return DatePairs(address, pairs, groups)


def _check(settings: DatesSettings) -> None:
    problems = [problem for language in settings.patterns for problem in _language_problems(settings, language)]
    if not settings.patterns:
        problems.append(Problem("data.patterns", "names no language", help="write patterns: {en: ['d MMMM y']}"))
    if not 1000 <= settings.first_year <= settings.last_year <= 9999:
        rule = f"years run from 1000 to 9999, first to last, but are {settings.first_year} to {settings.last_year}"
        problems.append(Problem("data.first_year", rule))
    problems += [
        Problem(f"data.{name}", f"must be at least 1, but is {size}")
        for name, size in (("train", settings.train), ("val", settings.val), ("test", settings.test))
        if size < 1
    ]
    held_out, days = settings.val + settings.test, 365 * (settings.last_year - settings.first_year + 1)
    if not problems and held_out >= days:
        rule = f"val and test hold out {held_out} days, and there are {days} from first_year to last_year"
        problems.append(Problem("data.val", rule, help="hold out fewer, or take more years"))
    if problems:
        raise ConfigError(problems)


def _language_problems(settings: DatesSettings, language: str) -> list[Problem]:
    address = f"data.patterns.{language}"
    try:
        Locale.parse(language)
    except (UnknownLocaleError, ValueError):
        help = "CLDR's codes: en, de, fr, es, it, nl, pt, sv, …"
        return [Problem(address, f"CLDR knows no language {language!r}", help=help)]
    patterns = settings.patterns[language]
    if not patterns:
        return [Problem(address, "has no pattern", help="write at least one, as 'd MMMM y'")]
    found = [(f"{address}.{place}", Form(language, pattern).problem()) for place, pattern in enumerate(patterns)]
    help = "one reading only: 'd MMMM y' is 3 March 1987, 'dd/MM/yy' could be another day"
    return [Problem(where, rule, help=help) for where, rule in found if rule]
