"""Copying and reordering, against the words of the question, lists and counts. States, against counts, an agent that walks,
a list, and products of permutation matrices."""

import re
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.probes.printed import printed
from tfm_blocks.probes.strings import (
    BucketSort,
    Compression,
    Copy,
    CycleNavigation,
    EvenPairs,
    MissingDuplicate,
    OddsFirst,
    Parity,
    Reverse,
    ReverseString,
    SelectiveCopying,
    Sort,
    StackManipulation,
    WordProblem,
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
