"""Examples of a task as words, for solvers that know nothing of token ids."""

from typing import NamedTuple


class Printed(NamedTuple):
    question: list[str]
    answer: list[str]
    positions: tuple[int, ...] | None

    @property
    def string(self):
        """Return the question without its trailing blanks, which stand for the answer."""
        return self.question[: self.positions[0]]


def printed(task, lengths=(), count=300, seed=1, split="train"):
    words = task.alphabet
    return [
        Printed([words[token] for token in one.question], [words[token] for token in one.answer], one.positions)
        for one in task.examples(seed, split, lengths, count)
    ]
