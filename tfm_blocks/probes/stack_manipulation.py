"""Operations on a stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfm_blocks.probes.example import Example, at_blanks
from tfm_blocks.probes.presets import CHOMSKY
from tfm_blocks.probes.streams import integers
from tfm_blocks.probes.task import SampledTask

POP, END, BLANK = 2, 5, 6


@dataclass(frozen=True)
class StackManipulation(SampledTask):
    """Apply operations, which pop or push a bit, to a stack of bits, and list the final stack.

    The string lists the stack from the bottom to the top, then the operations. The final stack is expected
    from the top to the bottom, then `end`, at the blanks after them. There is a blank for each token of the string and
    one more, so their number does not reveal the size of the stack. Popping an empty stack does nothing. The number
    of bits is drawn uniformly from 1, …, length - 1.
    """

    source: ClassVar = "Delétang et al. 2023"
    presets: ClassVar = CHOMSKY
    alphabet = ("0", "1", "pop", "push0", "push1", "end", "_")
    chance = 1 / 3

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        sizes = integers(rng, 1, max(length, 2), (count, 1))
        bits, operations = integers(rng, 0, 2, (count, length)), integers(rng, POP, END, (count, length))
        strings = np.where(np.arange(length) < sizes, bits, operations)
        answers = np.full((count, length + 1), -1)
        for row, symbols in enumerate(strings.tolist()):
            stack = _final_stack(symbols)
            answers[row, : len(stack) + 1] = [*reversed(stack), END]
        return at_blanks(strings, answers, blank=BLANK)


def _final_stack(symbols: list[int]) -> list[int]:
    """Return the stack, from the bottom to the top: a bit in the initial stack is pushed like any other."""
    stack: list[int] = []
    for symbol in symbols:
        if symbol != POP:
            stack.append(symbol % 3)  # 0 and 1, or push0 = 3 and push1 = 4
        elif stack:
            stack.pop()
    return stack
