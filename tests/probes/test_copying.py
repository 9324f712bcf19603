"""Copying and reordering, against the words of the question, lists and counts."""

from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.probes.printed import printed
from tfm_blocks.probes.copying import (
    BucketSort,
    Compression,
    Copy,
    OddsFirst,
    Reverse,
    ReverseString,
    SelectiveCopying,
    Sort,
)


@pytest.mark.parametrize(("settings", "length"), [({}, 256), ({"tokens": 1, "vocab": 4}, 3), ({"tokens": 5}, 11)])
def test_the_scattered_tokens_are_due_in_order_after_the_copy_token(settings, length):
    task = SelectiveCopying(**settings)
    for one in printed(task, [length]):
        copy = one.question.index("copy")
        assert copy == length - task.tokens - 1 and set(one.question[copy + 1 :]) == {"_"}
        assert one.answer == [word for word in one.question[:copy] if word != "_"]
        assert one.positions == tuple(range(copy + 1, length))


def test_every_place_before_the_copy_token_is_equally_likely():
    rows = printed(SelectiveCopying(tokens=8), [64], count=4000)
    used = np.sum([[word != "_" for word in one.question[:55]] for one in rows], axis=0)
    assert chisquare(used).pvalue > 0.001


@pytest.mark.parametrize("length", [2, 32])
def test_compression_repeats_the_string_from_the_first_compression_token_on(length):
    for one in printed(Compression(), [length]):
        string = one.question[: one.question.index("=")]
        assert len(string) == length - 1 and one.answer == string
        assert set(one.question[length - 1 :]) == {"="}
        assert one.positions == tuple(range(length - 1, 2 * length - 2))


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
