"""Tasks that repeat or reorder the symbols of a string, or track a state: of an automaton, a stack or a group."""

from __future__ import annotations

from functools import cache
from itertools import combinations, permutations
from typing import ClassVar, Literal

import numpy as np
from numpy.random import Generator

from tfm_blocks.probes.task import (
    CHOMSKY,
    GENERATED_ANSWERS,
    Example,
    Ids,
    NumberTask,
    Preset,
    SampledTask,
    at_blanks,
    at_positions,
    distinct,
    generated,
    integers,
    mad,
    tracking,
)

POP, END, BLANK = 2, 5, 6


class SelectiveCopying(NumberTask):
    """Repeat tokens that are scattered among blanks, in order, one at each blank after the copy token.

    vocab: tokens; the last two are the blank and the copy token.
    tokens: number of tokens to copy.
    """

    source = "Poli et al. 2024 (MAD)"
    presets = mad(256, 64, tokens=8)
    least: ClassVar = {"vocab": 4, "tokens": 1}
    marks = ("_", "copy")
    vocab: int = 16
    tokens: int = 16

    @property
    def numbers(self) -> int:
        return self.vocab - 2

    def misfit(self, length: int) -> str:
        least = 2 * self.tokens + 1
        return f"must be at least {least}, to hold {self.tokens} tokens twice" if length < least else ""

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        before, blank = length - self.tokens - 1, self.numbers
        places = np.sort(distinct(rng, 0, before, count, self.tokens), axis=1)
        tokens = integers(rng, 0, blank, (count, self.tokens))
        strings = np.full((count, before + 1), blank)
        strings[:, -1] = blank + 1
        np.put_along_axis(strings, places, tokens, axis=1)
        return at_blanks(strings, tokens, blank)


class Compression(NumberTask):
    """Repeat a string of random tokens in order, beginning at the compression token after it.

    In the paper a separate decoder reads only the state at the first compression token. A decoder-only model reads
    its own state instead: a recurrent state must hold the whole string, but attention can reread the string.

    vocab: tokens; the last is the compression token. Lengths include the first compression token.
    """

    source = "Poli et al. 2024 (MAD)"
    presets = mad(32, 16)
    least: ClassVar = {"vocab": 3}
    marks = ("=",)
    vocab: int = 16

    @property
    def numbers(self) -> int:
        return self.vocab - 1

    def misfit(self, length: int) -> str:
        return "must be at least 2, for a token and the compression token" if length < 2 else ""

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        return super().batch(rng, length - 1, count)


class StringTask(NumberTask):
    """A string of uniform symbols, and its answer at the blanks after it."""

    source = "Delétang et al. 2023"
    presets = CHOMSKY
    least: ClassVar = {"symbols": 2}
    symbols: int = 2

    @property
    def numbers(self) -> int:
        return self.symbols


class GeneratedStringTask(StringTask):
    """A string of uniform symbols, after which the answer is generated."""

    source = "after Kazemnejad et al. 2023"
    presets = GENERATED_ANSWERS
    marks = ()
    symbols: int = 26

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        strings = integers(rng, 0, self.symbols, (count, length))
        return generated(strings, self.answers(strings))


class ReverseString(StringTask):
    """Write the string backwards, at the blanks after it. A stack can do this; a finite automaton cannot.

    symbols: number of different symbols.
    """

    def answers(self, strings: Ids) -> Ids:
        return strings[:, ::-1]


class OddsFirst(StringTask):
    """List the first, third, fifth, … symbols of the string, then the second, fourth, …, at the blanks after it.

    symbols: number of different symbols.
    """

    def answers(self, strings: Ids) -> Ids:
        return np.concatenate([strings[:, 0::2], strings[:, 1::2]], axis=1)


class BucketSort(StringTask):
    """Sort the symbols of the string in ascending order, at the blanks after it. Counting the symbols is enough.

    symbols: number of different symbols.
    """

    symbols: int = 5

    def answers(self, strings: Ids) -> Ids:
        return np.sort(strings, axis=1)


class Copy(GeneratedStringTask):
    """The answer repeats the string. It is generated token by token.

    symbols: number of different symbols.
    """


class Reverse(GeneratedStringTask, ReverseString):
    """The answer is the string backwards. It is generated token by token; reverse_string answers at positions.

    symbols: number of different symbols.
    """


class Sort(GeneratedStringTask, BucketSort):
    """The answer lists the numbers of the question in ascending order. It is generated; each number is one token.

    symbols: number of different numbers.
    """

    symbols: int = 100


class BitTask(NumberTask):
    """A string of uniform bits, and one bit as the answer."""

    source = "Delétang et al. 2023"
    presets = CHOMSKY
    marks: ClassVar[tuple[str, ...]] = ("=",)
    numbers = 2


class Parity(BitTask):
    """The answer, at the token after the bits, is 1 if the number of ones is odd, else 0.

    Each 1 flips the state, which a linear recurrence with positive eigenvalues and finite precision cannot track.
    """

    source = "Delétang et al. 2023; sizes of Grazzi et al. 2024"
    presets = tracking(40, 64, 128, 256)

    def answers(self, strings: Ids) -> Ids:
        odd: Ids = strings.sum(axis=1, keepdims=True) % 2
        return odd


class EvenPairs(BitTask):
    """The answer, at the token after the bits, is 1 if the number of adjacent pairs 01 and 10 is odd, else 0.

    It is 1 exactly if the first and the last bit differ.
    """

    def answers(self, strings: Ids) -> Ids:
        return strings[:, :1] ^ strings[:, -1:]


class CycleNavigation(NumberTask):
    """An agent starts at place 0 of a cycle and stays, or moves one place on or back. The answer is its last place.

    The final place is expected at a token after the moves.

    modulus: number of places in the cycle.
    """

    source = "Delétang et al. 2023"
    presets = CHOMSKY
    least: ClassVar = {"modulus": 2}
    marks = ("stay", "+1", "-1", "=")
    modulus: int = 5

    @property
    def numbers(self) -> int:
        return self.modulus

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        moves = integers(rng, 0, 3, (count, length))
        places = np.array([0, 1, -1])[moves].sum(axis=1, keepdims=True) % self.modulus
        return at_blanks(moves + self.modulus, places, blank=self.modulus + 3)


class MissingDuplicate(BitTask):
    """A string of bits occurs twice, and a question mark hides one bit. Predict this bit.

    The model predicts the hidden bit at a token after the strings.
    """

    marks = ("?", "=")

    def misfit(self, length: int) -> str:
        return "must be even and at least 2, for two equal strings" if length < 2 or length % 2 else ""

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        strings = np.tile(integers(rng, 0, 2, (count, length // 2)), 2)
        hidden = integers(rng, 0, length, (count, 1))
        answers = np.take_along_axis(strings, hidden, axis=1)
        np.put_along_axis(strings, hidden, 2, axis=1)
        return at_blanks(strings, answers, blank=3)


class StackManipulation(SampledTask):
    """Apply operations, which pop or push a bit, to a stack of bits, and list the final stack.

    The string lists the stack from the bottom to the top, then the operations. The final stack is expected
    from the top to the bottom, then `end`, at the blanks after them. There is a blank for each token of the string and
    one more, so their number does not reveal the size of the stack. Popping an empty stack does nothing. The number
    of bits is drawn uniformly from 1, …, length - 1.
    """

    source = "Delétang et al. 2023"
    presets = CHOMSKY
    alphabet = ("0", "1", "pop", "push0", "push1", "end", "_")
    chance = 1 / 3

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        sizes = integers(rng, 1, max(length, 2), (count, 1))
        bits, operations = integers(rng, 0, 2, (count, length)), integers(rng, POP, END, (count, length))
        strings = np.where(np.arange(length) < sizes, bits, operations)
        answers = np.full((count, length + 1), -1)
        for row, symbols in enumerate(strings.tolist()):
            stack: list[int] = []
            for symbol in symbols:  # a bit in the initial stack is pushed like any other
                if symbol != POP:
                    stack.append(symbol % 3)  # 0 and 1, or push0 = 3 and push1 = 4
                elif stack:
                    stack.pop()
            answers[row, : len(stack) + 1] = [*reversed(stack), END]
        return at_blanks(strings, answers, blank=BLANK)


class WordProblem(SampledTask):
    """Each token is a permutation. At each token, predict the product of the permutations up to it.

    The token 120 maps 0 to 1, 1 to 2 and 2 to 0. In a product the earlier permutation is applied first. S5 and A5 are
    not solvable: a fixed number of attention or linear recurrent layers cannot track them over any length.

    group: S3 and S5 are all permutations of three and five items, A5 the even permutations of five items.
    """

    source = "Merrill et al. 2024"
    presets: ClassVar = {
        "paper": Preset(1_000_000, 8192, 8192, (20, 20), (20,)),
        "lite": Preset(64_000, 1000, 1000, (3, 32), (16, 32, 64, 128), {"group": "S3"}),
    }
    group: Literal["S3", "A5", "S5"] = "S5"

    @property
    def alphabet(self) -> tuple[str, ...]:
        return group_table(self.group)[0]

    @property
    def chance(self) -> float:
        return 1 / len(self.alphabet)

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        _, products = group_table(self.group)
        words = integers(rng, 0, len(products), (count, length))
        labels = words.copy()
        for position in range(1, length):
            labels[:, position] = products[labels[:, position - 1], words[:, position]]
        return at_positions(words, labels)


@cache
def group_table(group: str) -> tuple[tuple[str, ...], Ids]:
    """Return the permutations of a group in lexicographic order, and the index of the product of each pair of them.

    The first of a pair is applied first.
    """
    members = list(permutations(range(int(group[1]))))
    if group[0] == "A":
        inversions = [sum(before > after for before, after in combinations(member, 2)) for member in members]
        members = [member for member, count in zip(members, inversions, strict=True) if not count % 2]
    number = {member: index for index, member in enumerate(members)}
    table = [[number[tuple(second[item] for item in first)] for second in members] for first in members]
    return tuple("".join(map(str, member)) for member in members), np.array(table)
