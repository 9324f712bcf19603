"""Arithmetic: modular, without and with brackets, and the addition of two numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from numpy.random import Generator

from tfm_blocks.probes.task import (
    GENERATED_ANSWERS,
    Example,
    Ids,
    NumberTask,
    at_blanks,
    generated,
    integers,
    setting_error,
    tracking,
)

OPERATORS = "+-*"


class ArithmeticTask(NumberTask):
    """An expression over the integers modulo `modulus`. Its value is expected at the token after it."""

    presets = tracking(39, 63, 127, 255)
    least: ClassVar = {"modulus": 2}
    marks: ClassVar[tuple[str, ...]] = (*OPERATORS, "=")
    modulus: int = 5
    operators: str = OPERATORS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.operators or set(self.operators) - set(OPERATORS) or len(set(self.operators)) < len(self.operators):
            rule = f"must be one or more of {OPERATORS}, each at most once, but is {self.operators!r}"
            raise setting_error("operators", rule, "write data.operators='+-'")

    @property
    def numbers(self) -> int:
        return self.modulus

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        expressions, values = self.draw(rng, length, count)
        return at_blanks(expressions, values[:, None], blank=len(self.alphabet) - 1)

    @abstractmethod
    def draw(self, rng: Generator, length: int, count: int) -> tuple[Ids, Ids]:
        """Draw expressions, and their values."""


class Arithmetic(ArithmeticTask):
    """Predict the value of an expression without brackets, modulo `modulus`, at the token after it.

    Multiplication binds tighter. Digits and operators alternate, so the length is odd.

    modulus: digits are 0, …, modulus - 1, and the value is computed modulo this number.
    operators: the operators to draw from: any of +-*.
    """

    source = "Delétang et al. 2023 (modular arithmetic, simple); sizes of Grazzi et al. 2024"

    def misfit(self, length: int) -> str:
        return "must be odd, since digits and operators alternate" if length < 1 or not length % 2 else ""

    def draw(self, rng: Generator, length: int, count: int) -> tuple[Ids, Ids]:
        digits = integers(rng, 0, self.modulus, (count, length // 2 + 1))
        known = np.array(list(map(self.alphabet.index, self.operators)))
        operators = known[integers(rng, 0, len(self.operators), (count, length // 2))]
        expressions = np.empty((count, length), np.int64)
        expressions[:, 0::2], expressions[:, 1::2] = digits, operators
        # from left to right: the sum of finished terms, and the signed product of the open one
        plus, minus, times = map(self.alphabet.index, OPERATORS)
        total, term = np.zeros_like(digits[:, 0]), digits[:, 0]
        for operator, digit in zip(operators.T, digits.T[1:], strict=True):
            total = np.where(operator == times, total, total + term)
            term = np.select([operator == plus, operator == minus], [digit, -digit], term * digit) % self.modulus
        return expressions, (total + term) % self.modulus


class ArithmeticBrackets(ArithmeticTask):
    """Predict the value of an expression with nested brackets, modulo `modulus`, at the token after it.

    An expression is d, -d, (d) or (-d) for a digit d, or (left operator right). The length of left is drawn uniformly.

    modulus: digits are 0, …, modulus - 1, and the value is computed modulo this number.
    operators: the operators to draw from: any of +-*.
    """

    source = "Delétang et al. 2023 (modular arithmetic); sizes of Grazzi et al. 2024"
    presets = tracking(40, 64, 128, 256)
    marks = (*OPERATORS, "(", ")", "=")

    def draw(self, rng: Generator, length: int, count: int) -> tuple[Ids, Ids]:
        ids = {symbol: number for number, symbol in enumerate(self.alphabet)}
        rows = [self._expression(iter(numbers), length) for numbers in rng.random((count, length)).tolist()]
        expressions = np.array([[ids[symbol] for symbol in symbols] for symbols, _ in rows], np.int64)
        return expressions.reshape(count, length), np.array([value for _, value in rows], np.int64)

    def _expression(self, numbers: Iterator[float], length: int) -> tuple[list[str], int]:
        """Return the symbols of an expression and its value; `numbers` are uniform random numbers."""
        if length < 5:
            digit, sign, bracketed = int(next(numbers) * self.modulus), length % 2 == 0, length > 2
            symbols = ["("] * bracketed + ["-"] * sign + [str(digit)] + [")"] * bracketed
            return symbols, (-digit if sign else digit) % self.modulus
        left_length = 1 + int(next(numbers) * (length - 4))
        operator = self.operators[int(next(numbers) * len(self.operators))]
        left, x = self._expression(numbers, left_length)
        right, y = self._expression(numbers, length - 3 - left_length)
        value = {"+": x + y, "-": x - y, "*": x * y}[operator]
        return ["(", *left, operator, *right, ")"], value % self.modulus


class Addition(NumberTask):
    """The question is the sum of two decimal numbers of `length` digits each, and the answer its value.

    The answer is generated, from the first digit on. No number begins with 0, except the number 0.
    """

    source = "after Kazemnejad et al. 2023"
    presets = GENERATED_ANSWERS
    marks = ("+",)
    numbers = 10

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        digits = integers(rng, 0, 10, (count, 2 * length + 1))
        digits[:, [0, length + 1]] = integers(rng, int(length > 1), 10, (count, 2))
        digits[:, length] = self.numbers
        sums = np.zeros((count, length + 1), np.int64)
        sums[:, 1:] = digits[:, :length] + digits[:, length + 1 :]
        for place in range(length, 0, -1):  # carry from the right
            sums[:, place - 1] += sums[:, place] // 10
            sums[:, place] %= 10
        sums[sums[:, 0] == 0, 0] = -1  # no leading zero
        return generated(digits, sums)
