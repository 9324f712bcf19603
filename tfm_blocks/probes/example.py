"""Examples: a question, its answer, and the positions where the answer is expected."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]  # token ids; in answers, -1 means that nothing is expected


@dataclass(frozen=True)
class Example:
    """A question, its answer, and where each answer token is expected."""

    question: tuple[int, ...]  # token ids, which index the task's alphabet
    answer: tuple[int, ...]
    positions: tuple[int, ...] | None  # question index at which each answer token is expected; None: generated after it


def at_positions(questions: Ids, labels: Ids) -> list[Example]:
    """Return an example for each row; `labels` has the shape of `questions`, and -1 where nothing is expected."""
    rows, columns = np.nonzero(labels >= 0)
    answers, positions = labels[rows, columns].tolist(), columns.tolist()
    bounds = [0, *np.cumsum((labels >= 0).sum(axis=1)).tolist()]
    return [
        Example(tuple(question), tuple(answers[begin:end]), tuple(positions[begin:end]))
        for question, begin, end in zip(questions.tolist(), bounds, bounds[1:], strict=False)
    ]


def at_blanks(strings: Ids, answers: Ids, blank: int) -> list[Example]:
    """Append a blank to the strings for each column of `answers`, whose tokens are expected at the blanks."""
    questions = np.concatenate([strings, np.full_like(answers, blank)], axis=1)
    return at_positions(questions, np.concatenate([np.full_like(strings, -1), answers], axis=1))


def generated(strings: Ids, answers: Ids) -> list[Example]:
    """Return examples whose answer is generated after the question; -1 in `answers` is skipped."""
    return [
        Example(tuple(question), tuple(token for token in answer if token >= 0), None)
        for question, answer in zip(strings.tolist(), answers.tolist(), strict=True)
    ]
