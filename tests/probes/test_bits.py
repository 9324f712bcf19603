"""Parity and even pairs, against counts in the printed string."""

import re

import pytest

from tests.probes.printed import printed
from tfm_blocks.probes.bits import EvenPairs, Parity


@pytest.mark.parametrize("length", [1, 2, 3, 40, 257])
def test_parity_matches_the_number_of_ones(length):
    for one in printed(Parity(), [length]):
        assert one.answer == [str("".join(one.string).count("1") % 2)]
        assert one.positions == (length,) and one.question[length:] == ["="]


@pytest.mark.parametrize("length", [1, 2, 3, 40, 257])
def test_even_pairs_counts_the_changes_between_neighbours(length):
    for one in printed(EvenPairs(), [length]):
        changes = len(re.findall("(?=01|10)", "".join(one.string)))
        assert one.answer == [str(changes % 2)] and one.positions == (length,)


def test_bits_and_answers_are_even():
    rows = printed(Parity(), [21], count=4000)
    for words in ([word for one in rows for word in one.string], [one.answer[0] for one in rows]):
        assert abs(words.count("1") - len(words) / 2) < 4 * (len(words) / 4) ** 0.5
