"""Arithmetic in strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_blocks.registry.expression import evaluate, names_in

NAMES = {"d_model": 512, "i": 3, "n": 6, "x": 0.5}


@pytest.mark.parametrize(
    "text",
    [
        "4*d_model",
        "d_model // 8 + i",
        "(n-1-i) % 4",
        "-i",
        "d_model/4*x",
        "-7*x // 2",
        "2 * (3 + 4)",
        "1e-4",
        "2**9",
        "0.9**(n-1-i)",
        "2**-1",
    ],
)
def test_arithmetic_is_pythons_own(text):
    assert evaluate(text, NAMES.__getitem__) == eval(text, {}, NAMES)


def test_names_are_in_order_of_appearance():
    assert names_in("(b + a) * sqrt(c) - b") == ["b", "a", "c"] and names_in("(a + b) * c") == ["a", "b", "c"]


def test_a_floor_division_of_floats_is_an_int():
    assert type(evaluate("x*d_model//3", NAMES.__getitem__)) is int


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "d_model.real",
        "[1]",
        "2^9",
        "i if n else 1",
        "lambda: 1",
        "'a'",
        "True",
        "f(1)",
        "1 < 2 < 3",
        "i := 3",
        "0o17",
        "2 * 0b11",
        "n + 1_000",
    ],
)
def test_anything_but_arithmetic_is_refused(text):
    with pytest.raises(ValueError, match=r"can hold numbers|arithmetic"):
        evaluate(text, NAMES.__getitem__)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("1//0", "divides by zero"),
        ("9" * 20, "2\\^40"),
        ("1" * 81, "at most 80"),
        ("1e308*10*x", None),
        ("9**9**9", "too large"),
        ("1e308*10//2", "too large"),
        ("(0-8)**x", "root of a negative"),
    ],
)
def test_bounds_hold(text, rule):
    if rule:
        with pytest.raises(ValueError, match=rule):
            evaluate(text, NAMES.__getitem__)


def test_names_are_listed_once_in_order():
    assert names_in("n - i*n") == ["n", "i"]


@pytest.mark.grid
@given(st.text(max_size=60))
def test_no_text_does_more_than_raise_a_sentence(text):
    try:
        evaluate(text, lambda name: 1)
    except ValueError as error:
        assert str(error)
