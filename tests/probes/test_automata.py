"""States, against counts, an agent that walks, a list, and products of permutation matrices."""

import re
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.probes.printed import printed
from tfm_blocks.probes.automata import (
    CycleNavigation,
    EvenPairs,
    MissingDuplicate,
    Parity,
    StackManipulation,
    WordProblem,
)


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


@pytest.mark.parametrize("modulus", [2, 5, 12])
@pytest.mark.parametrize("length", [1, 40, 500])
def test_the_answer_is_the_place_where_a_walk_ends(modulus, length):
    ring = list(map(str, range(modulus)))
    for one in printed(CycleNavigation(modulus=modulus), [length], count=100):
        place = list(ring)  # the agent stays at the front, and the ring rotates
        for move in one.string:
            if move == "+1":
                place.append(place.pop(0))
            elif move == "-1":
                place.insert(0, place.pop())
            else:
                assert move == "stay"
        assert one.answer == [place[0]] and one.positions == (length,)


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


def split_string(words):
    """Return the initial stack, given by the leading bits, and the operations."""
    size = next((place for place, word in enumerate(words) if word not in "01"), len(words))
    assert all(word in ("pop", "push0", "push1") for word in words[size:])
    return words[:size], words[size:]


@pytest.mark.parametrize("length", [1, 2, 3, 40, 101])
def test_the_answer_lists_the_final_stack_from_the_top(length):
    for one in printed(StackManipulation(), [length]):
        stack, operations = split_string(one.question[:length])
        for operation in operations:
            stack = [*stack, operation[-1]] if operation != "pop" else stack[:-1]
        assert one.answer == [*stack[::-1], "end"]
        assert one.positions == tuple(range(length, length + len(one.answer)))
        assert one.question[length:] == ["_"] * (length + 1), "the number of blanks does not reveal the stack's size"


def test_sizes_of_the_initial_stack_and_operations_are_uniform():
    rows = [split_string(one.question[:20]) for one in printed(StackManipulation(), [20], count=4000)]
    sizes = Counter(len(stack) for stack, _ in rows)
    assert set(sizes) == set(range(1, 20)) and chisquare(list(sizes.values())).pvalue > 0.001
    operations = Counter(word for _, words in rows for word in words)
    assert chisquare(list(operations.values())).pvalue > 0.001


ORDERS = {"S3": 6, "A5": 60, "S5": 120}


def matrix(word):
    return np.eye(len(word), dtype=int)[[int(digit) for digit in word]]


@pytest.mark.parametrize("group", ORDERS)
@pytest.mark.parametrize("length", [1, 2, 30])
def test_each_label_is_the_product_up_to_its_token(group, length):
    for one in printed(WordProblem(group=group), [length], count=100):
        product = matrix(one.question[0])
        for place, (word, label) in enumerate(zip(one.question, one.answer, strict=True)):
            product = product if place == 0 else product @ matrix(word)
            assert (product == matrix(label)).all()
        assert one.positions == tuple(range(length))


@pytest.mark.parametrize("group", ORDERS)
def test_a_group_has_its_order_and_only_even_permutations_if_alternating(group):
    matrices = [matrix(word) for word in WordProblem(group=group).alphabet]
    assert len({each.tobytes() for each in matrices}) == ORDERS[group]
    signs = {round(np.linalg.det(each)) for each in matrices}
    assert signs == ({1} if group == "A5" else {1, -1})


def test_the_earlier_permutation_is_applied_first():
    rows = printed(WordProblem(group="S3"), [2], count=500)
    (answer,) = {tuple(one.answer) for one in rows if one.question == ["120", "102"]}
    assert answer == ("120", "021"), "0 goes to 1 and then to 0, 1 to 2, 2 to 0 and then to 1"
