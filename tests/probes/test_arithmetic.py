"""Arithmetic, against Python's evaluation of the printed text and its integers."""

from collections import Counter

import pytest
from scipy.stats import chisquare

from tests.probes.printed import printed
from tfm_blocks.probes.arithmetic import Addition, Arithmetic, ArithmeticBrackets

LENGTHS = {Arithmetic: (1, 3, 5, 39, 255), ArithmeticBrackets: (1, 2, 3, 4, 5, 6, 7, 40, 256)}


@pytest.mark.parametrize(("task", "length"), [(task, length) for task in LENGTHS for length in LENGTHS[task]])
@pytest.mark.parametrize("settings", [{}, {"modulus": 7, "operators": "*-"}])
def test_the_answer_is_the_value_that_python_computes(task, length, settings):
    drawn = task(**settings)
    for one in printed(drawn, [length], count=100):
        assert len(one.string) == length and one.positions == (length,) and one.question[length:] == ["="]
        assert one.answer == [str(eval("".join(one.string)) % drawn.modulus)]


def test_multiplication_binds_tighter():
    texts = ["".join(one.string) for one in printed(Arithmetic(), [5], count=2000)]
    assert sum(text[1] in "+-" and text[3] == "*" for text in texts) > 300, "so the test above sees the rule"


@pytest.mark.parametrize("task", [Arithmetic, ArithmeticBrackets])
def test_digits_and_operators_are_uniform(task):
    words = Counter(word for one in printed(task(operators="+*"), [39], count=2000) for word in one.string)
    assert chisquare([words[digit] for digit in "01234"]).pvalue > 0.001
    assert chisquare([words["+"], words["*"]]).pvalue > 0.001
    assert task is ArithmeticBrackets or not words["-"]


def test_the_length_of_the_left_part_is_uniform():
    left = Counter()
    for one in printed(ArithmeticBrackets(operators="+"), [8], count=3000):
        inside, depth = one.string[1:-1], 0
        for place, word in enumerate(inside):
            depth += {"(": 1, ")": -1}.get(word, 0)
            if word == "+" and not depth:
                left[place] += 1
    assert set(left) == {1, 2, 3, 4} and chisquare(list(left.values())).pvalue > 0.001


def test_without_brackets_the_length_is_odd():
    assert [length for length in range(8) if not Arithmetic().misfit(length)] == [1, 3, 5, 7]


@pytest.mark.parametrize("length", [1, 2, 5, 40])
def test_the_answer_is_the_sum(length):
    for one in printed(Addition(), [length]):
        left, right = "".join(one.question).split("+")
        assert len(left) == len(right) == length and str(int(left)) == left and str(int(right)) == right
        assert "".join(one.answer) == str(int(left) + int(right)) and one.positions is None


def test_every_pair_of_digits_occurs():
    texts = {"".join(one.question): "".join(one.answer) for one in printed(Addition(), [1], count=2000)}
    assert len(texts) == 100 and texts["0+0"] == "0" and texts["9+9"] == "18"
