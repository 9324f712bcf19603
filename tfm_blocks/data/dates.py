"""A generated corpus that needs no download: dates written in several languages, paired with ISO 8601."""

from __future__ import annotations

from datetime import date
from functools import cache
from importlib.metadata import version
from itertools import cycle, islice

import numpy as np
from babel import Locale
from babel.dates import parse_pattern

from tfm_blocks.data.cache import cache_key
from tfm_blocks.data.pair_settings import CASES, DatesSettings, days_of
from tfm_blocks.data.text import Split
from tfm_blocks.language.spec import TARGET

FORMAT = 1  # version of how a date is written; a new number renews cached corpora


def write_date(day: date, language: str, pattern: str) -> str:
    """Write a day, such as 'Dienstag, 3. März 1987', by a CLDR pattern, optionally in upper or lower case."""
    pattern, _, case = pattern.partition(" | ")
    text = str(parse_pattern(pattern).apply(day, _locale(language)))  # Babel caches parsed patterns
    return CASES[case](text) if case else text


_locale = cache(Locale.parse)


def date_splits(settings: DatesSettings) -> dict[str, Split]:
    """Return the splits train, val and, unless its size is null, test. No day occurs in two splits.

    Languages alternate, and formats are drawn at random. Each training day occurs once before any is repeated.
    """
    days = days_of(settings.first_year, settings.last_year)
    random = np.random.PCG64(np.random.SeedSequence(settings.seed, spawn_key=(1,)))  # independent of the plan's seed
    numbers = random.random_raw(len(days))
    order = days.start + np.argsort(numbers, kind="stable")  # a shuffle that is stable across NumPy versions
    held_out, begin = {}, 0
    for name, size in (("val", settings.val), ("test", settings.test)):
        if size is not None:
            held_out[name] = _draw(f"data.{name}", order[begin : begin + size].tolist(), settings, size, random)
            begin += size
    return {"train": _draw("data.train", order[begin:].tolist(), settings, settings.train, random), **held_out}


def _draw(address: str, days: list[int], settings: DatesSettings, size: int, random: np.random.PCG64) -> Split:
    """Draw the formats. The dates are written when they are first read, which a cached corpus never needs."""
    forms = list(settings.patterns.items())
    numbers = random.random_raw(size).tolist()

    @cache
    def pairs() -> list[tuple[str, str]]:
        rows = []
        for row, number in enumerate(numbers):
            language, patterns = forms[row % len(forms)]
            day = date.fromordinal(days[row % len(days)])
            rows.append((write_date(day, language, patterns[number % len(patterns)]), day.isoformat()))
        return rows

    def digest() -> str:
        return cache_key(FORMAT, version("babel"), settings.patterns, days, numbers)

    groups = list(islice(cycle(settings.patterns), size))
    return Split(address, ("src", TARGET), lambda: iter(pairs()), digest, groups)
