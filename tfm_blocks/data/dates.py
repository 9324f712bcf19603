"""A generated corpus that needs no download: dates written in several languages, paired with ISO 8601."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from itertools import chain

import numpy as np

from tfm_blocks.data.date_forms import Form
from tfm_blocks.data.settings import DatesSettings, days_of


@dataclass(frozen=True)
class DatePairs:
    """The rows of a split, and the language of each row; `address` is the split's key in the config."""

    address: str
    written: list[tuple[str, str]]
    groups: list[str]

    columns = ("src", "tgt")

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Iterate over pairs of written date and ISO date."""
        return iter(self.written)

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of the text."""
        return hashlib.sha256("\n".join(chain.from_iterable(self.written)).encode()).hexdigest()


def date_splits(settings: DatesSettings) -> dict[str, DatePairs]:
    """Return the splits train, val and, unless its size is null, test. No day occurs in two splits.

    Languages alternate, and formats are drawn at random. Each training day occurs once before any is repeated.
    """
    days = days_of(settings.first_year, settings.last_year)
    random = np.random.PCG64(np.random.SeedSequence(settings.seed, spawn_key=(1,)))  # independent of the plan's seed
    order = days.start + np.argsort(
        random.random_raw(len(days)), kind="stable"
    )  # a shuffle that is stable across NumPy versions
    held_out, begin = {}, 0
    for name, size in (("val", settings.val), ("test", settings.test)):
        if size is not None:
            held_out[name] = _draw(f"data.{name}", order[begin : begin + size].tolist(), settings, size, random)
            begin += size
    return {"train": _draw("data.train", order[begin:].tolist(), settings, settings.train, random), **held_out}


def _draw(address: str, days: list[int], settings: DatesSettings, size: int, random: np.random.PCG64) -> DatePairs:
    forms = [[Form(language, pattern) for pattern in patterns] for language, patterns in settings.patterns.items()]
    pairs, groups = [], []
    for row, number in enumerate(random.random_raw(size).tolist()):
        choices = forms[row % len(forms)]
        day, form = date.fromordinal(days[row % len(days)]), choices[number % len(choices)]
        pairs.append((form.write(day), day.isoformat()))
        groups.append(form.language)
    return DatePairs(address, pairs, groups)
