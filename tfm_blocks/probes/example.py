"""Examples: a question, its answer, and the positions where the answer is due."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Example:
    """A question, its answer, and where each answer token is due."""

    question: tuple[int, ...]  # token ids, which index the task's alphabet
    answer: tuple[int, ...]
    positions: tuple[int, ...] | None  # question index at which each answer token is due; None: generated after it


def at_positions(questions: Ids, answers: Ids, positions: Ids) -> list[Example]:
    """Return an example for each row of the three arrays; a row of `positions` is ascending."""
    rows = zip(questions.tolist(), answers.tolist(), positions.tolist(), strict=True)
    return [Example(tuple(question), tuple(answer), tuple(where)) for question, answer, where in rows]


def at_blanks(strings: Ids, answers: Ids, blank: int) -> list[Example]:
    """Append one blank for each answer token to the strings; the answer is due at the blanks."""
    (count, length), due = strings.shape, answers.shape[1]
    questions = np.concatenate([strings, np.full((count, due), blank)], axis=1)
    return at_positions(questions, answers, np.tile(np.arange(length, length + due), (count, 1)))


def generated(strings: Ids, answers: Ids) -> list[Example]:
    """Return examples whose answer is generated after the question."""
    rows = zip(strings.tolist(), answers.tolist(), strict=True)
    return [Example(tuple(question), tuple(answer), None) for question, answer in rows]
