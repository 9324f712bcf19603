"""Arithmetic: modular, without and with brackets, and the addition of two numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfm_blocks.probes.task import (
    GENERATED_ANSWERS,
    Example,
    Ids,
    SampledTask,
    at_blanks,
    generated,
    integers,
    require_at_least,
    setting_error,
    tracking,
)

OPERATORS = "+-*"
PLUS = 10


@dataclass(frozen=True)
class ArithmeticTask(SampledTask):
    """An expression over the integers modulo `modulus`. Its value is expected at the token after it."""

    presets: ClassVar = tracking(39, 63, 127, 255)
    brackets: ClassVar[str] = ""
    modulus: int = 5
    operators: str = OPERATORS

    def __post_init__(self) -> None:
        require_at_least(self, modulus=2)
        if not self.operators or set(self.operators) - set(OPERATORS) or len(set(self.operators)) < len(self.operators):
            rule = f"must be one or more of {OPERATORS}, each at most once, but is {self.operators!r}"
            raise setting_error("operators", rule, "write data.operators='+-'")

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*map(str, range(self.modulus)), *OPERATORS, *self.brackets, "=")

    @property
    def chance(self) -> float:
        return 1 / self.modulus

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        expressions, values = self.draw(rng, length, count)
        return at_blanks(expressions, values[:, None], blank=len(self.alphabet) - 1)

    @abstractmethod
    def draw(self, rng: np.random.Generator, length: int, count: int) -> tuple[Ids, Ids]:
        """Draw expressions, and their values."""

    @property
    def _operator_ids(self) -> Ids:
        return np.array([self.alphabet.index(operator) for operator in self.operators])


@dataclass(frozen=True)
class Arithmetic(ArithmeticTask):
    """What is the value of an expression without brackets, modulo 5? The answer is at the token after it.

    Multiplication binds tighter. Digits and operators alternate, so the length is odd.

    modulus: digits are 0, …, modulus - 1, and the value is taken modulo it.
    operators: the operators to draw from, of +-*.
    """

    source: ClassVar = "Delétang et al. 2023 (modular arithmetic, simple); sizes of Grazzi et al. 2024"

    def misfit(self, length: int) -> str:
        return "must be odd, since digits and operators alternate" if length < 1 or not length % 2 else ""

    def draw(self, rng: np.random.Generator, length: int, count: int) -> tuple[Ids, Ids]:
        digits = integers(rng, 0, self.modulus, (count, length // 2 + 1))
        operators = self._operator_ids[integers(rng, 0, len(self.operators), (count, length // 2))]
        expressions = np.empty((count, length), np.int64)
        expressions[:, 0::2], expressions[:, 1::2] = digits, operators
        return expressions, self._values(digits, operators)

    def _values(self, digits: Ids, operators: Ids) -> Ids:
        """Evaluate from left to right: the sum of finished terms, and the signed product of the open one."""
        plus, minus, times = (self.alphabet.index(operator) for operator in OPERATORS)
        total, term = np.zeros_like(digits[:, 0]), digits[:, 0]
        for operator, digit in zip(operators.T, digits.T[1:], strict=True):
            total = np.where(operator == times, total, total + term)
            term = np.select([operator == plus, operator == minus], [digit, -digit], term * digit) % self.modulus
        values: Ids = (total + term) % self.modulus
        return values


@dataclass(frozen=True)
class ArithmeticBrackets(ArithmeticTask):
    """What is the value of an expression with nested brackets, modulo 5? The answer is at the token after it.

    An expression is d, -d, (d) or (-d) for a digit d, or (left operator right). The length of left is drawn uniformly.

    modulus: digits are 0, …, modulus - 1, and the value is taken modulo it.
    operators: the operators to draw from, of +-*.
    """

    source: ClassVar = "Delétang et al. 2023 (modular arithmetic); sizes of Grazzi et al. 2024"
    presets: ClassVar = tracking(40, 64, 128, 256)
    brackets: ClassVar = "()"

    def draw(self, rng: np.random.Generator, length: int, count: int) -> tuple[Ids, Ids]:
        ids = {symbol: number for number, symbol in enumerate(self.alphabet)}
        rows = [self._expression(iter(numbers), length) for numbers in rng.random((count, length)).tolist()]
        expressions = np.array([[ids[symbol] for symbol in symbols] for symbols, _ in rows], np.int64)
        return expressions.reshape(count, length), np.array([value for _, value in rows], np.int64)

    def _expression(self, numbers: Iterator[float], length: int) -> tuple[list[str], int]:
        """Return the symbols of an expression and its value; `numbers` are uniform random numbers."""
        if length < 5:
            return self._leaf(int(next(numbers) * self.modulus), length)
        left_length = 1 + int(next(numbers) * (length - 4))
        operator = self.operators[int(next(numbers) * len(self.operators))]
        left, x = self._expression(numbers, left_length)
        right, y = self._expression(numbers, length - 3 - left_length)
        value = {"+": x + y, "-": x - y, "*": x * y}[operator]
        return ["(", *left, operator, *right, ")"], value % self.modulus

    def _leaf(self, digit: int, length: int) -> tuple[list[str], int]:
        sign, bracketed = length % 2 == 0, length > 2
        symbols = ["("] * bracketed + ["-"] * sign + [str(digit)] + [")"] * bracketed
        return symbols, (-digit if sign else digit) % self.modulus


@dataclass(frozen=True)
class Addition(SampledTask):
    """The question is the sum of two decimal numbers of `length` digits each, and the answer its value.

    The answer is generated, from the first digit on. No number begins with 0, except the number 0.
    """

    source: ClassVar = "after Kazemnejad et al. 2023"
    presets: ClassVar = GENERATED_ANSWERS
    alphabet = (*map(str, range(10)), "+")
    chance = 0.1

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        digits = integers(rng, 0, 10, (count, 2 * length + 1))
        digits[:, [0, length + 1]] = integers(rng, int(length > 1), 10, (count, 2))
        digits[:, length] = PLUS
        return generated(digits, _sums(digits[:, :length], digits[:, length + 1 :]))


def _sums(left: Ids, right: Ids) -> Ids:
    """Add digit by digit from the right, with a carry; -1 stands in place of a leading zero."""
    sums = np.zeros((len(left), left.shape[1] + 1), np.int64)
    sums[:, 1:] = left + right
    for place in range(left.shape[1], 0, -1):
        sums[:, place - 1] += sums[:, place] // 10
        sums[:, place] %= 10
    sums[sums[:, 0] == 0, 0] = -1
    return sums
