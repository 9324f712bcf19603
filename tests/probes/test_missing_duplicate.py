"""Missing duplicate, against the half of the string that is whole."""

import pytest
from scipy.stats import chisquare

from tests.probes.printed import printed
from tfm_blocks.probes.missing_duplicate import MissingDuplicate


@pytest.mark.parametrize("length", [2, 4, 40, 100])
def test_the_hidden_bit_is_the_one_in_the_other_half(length):
    for one in printed(MissingDuplicate(), [length]):
        halves = one.string[: length // 2], one.string[length // 2 :]
        (hidden,) = [pair for pair in zip(*halves, strict=True) if "?" in pair]
        assert one.answer == [word for word in hidden if word != "?"] and one.positions == (length,)
        assert all(left == right for left, right in zip(*halves, strict=True) if "?" not in (left, right))


def test_every_place_is_hidden_equally_often():
    rows = printed(MissingDuplicate(), [20], count=4000)
    places = [one.string.index("?") for one in rows]
    assert chisquare([places.count(place) for place in range(20)]).pvalue > 0.001


def test_two_equal_strings_have_an_even_length():
    assert [length for length in range(7) if not MissingDuplicate().misfit(length)] == [2, 4, 6]
