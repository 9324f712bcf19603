"""Tasks that reorder a string, against lists and counts."""

from collections import Counter

import pytest

from tests.probes.printed import printed
from tfm_blocks.errors import ConfigError
from tfm_blocks.probes.strings import BucketSort, Copy, OddsFirst, Reverse, ReverseString, Sort


def counted(words):
    """Return the words in the order of their numbers, by counting."""
    return [word for word, times in sorted(Counter(words).items(), key=lambda item: int(item[0])) for _ in range(times)]


def odds_first(words):
    places = [place for place in range(len(words)) if place % 2 == 0] + [
        place for place in range(len(words)) if place % 2
    ]
    return [words[place] for place in places]


@pytest.mark.parametrize("length", [1, 2, 7, 40, 100])
@pytest.mark.parametrize("symbols", [2, 5, 30])
@pytest.mark.parametrize(
    ("task", "solve"),
    [(ReverseString, lambda words: [*reversed(words)]), (OddsFirst, odds_first), (BucketSort, counted)],
)
def test_the_answer_is_due_at_as_many_blanks_as_the_string_has_symbols(task, solve, symbols, length):
    for one in printed(task(symbols=symbols), [length], count=50):
        assert one.answer == solve(one.string)
        assert one.positions == tuple(range(length, 2 * length)) and set(one.question[length:]) == {"_"}


@pytest.mark.parametrize("length", [1, 2, 7, 40])
@pytest.mark.parametrize(
    ("task", "solve"), [(Copy, list), (Reverse, lambda words: [*reversed(words)]), (Sort, counted)]
)
def test_the_answer_is_generated_after_the_string(task, solve, length):
    for one in printed(task(), [length], count=100):
        assert len(one.question) == length and one.answer == solve(one.question) and one.positions is None


def test_a_string_needs_two_symbols():
    with pytest.raises(ConfigError, match=r"data\.symbols: must be at least 2, but is 1"):
        BucketSort(symbols=1)
