"""The rules that every probe task keeps, for `tfm probes --test`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from tfm_blocks.probes.example import Example
from tfm_blocks.probes.task import Preset, ProbeTask, check_length, fitting_lengths

TESTED = 200  # examples of each split


def broken_rules(cls: type[ProbeTask], preset: Preset) -> Iterator[str]:
    """Yield the rules that a task breaks at a size."""
    task = cls(**preset.settings)
    if len(set(task.alphabet)) < len(task.alphabet) or any(len(name.split()) != 1 for name in task.alphabet):
        yield "the names of the alphabet must differ and have no spaces"
    if not 0 <= task.chance <= 1:
        yield f"chance must be from 0 to 1, but is {task.chance}"
    lengths = fitting_lengths(task, *preset.train_lengths) if preset.train_lengths else ()
    for length in preset.test_lengths:
        check_length(task, "test_lengths", length)
    splits = {split: _draw(task, split, lengths) for split in ("train", "val", "test")}
    for length in preset.test_lengths:
        splits[f"test of length {length}"] = _draw(task, "test", [length])
    for split, examples in splits.items():
        if rule := next(filter(None, (_wrong_example(task, example) for example in examples)), ""):
            yield f"{split}: {rule}"
    if splits["train"] != _draw(task, "train", lengths) or splits["train"][:9] != _draw(task, "train", lengths, 9):
        yield "the seed, the split and the lengths must determine the examples, and `count` only their number"
    for one, other in pairwise(("train", "val", "test")):
        if _draw(task, one, lengths[-1:]) == _draw(task, other, lengths[-1:]):
            yield f"{one} and {other} have equal examples: draw all random numbers from `rng`"


def _draw(task: ProbeTask, split: str, lengths: Sequence[int], count: int = TESTED) -> list[Example]:
    return list(islice(task.examples(1, split, lengths, count), count))


def _wrong_example(task: ProbeTask, example: Example) -> str:
    """Return the rule that an example breaks, or ''."""
    size, places = len(task.alphabet), example.positions
    if not example.question or not example.answer:
        return "a question or an answer is empty"
    if wrong := [token for token in (*example.question, *example.answer) if not 0 <= token < size]:
        return f"the token {wrong[0]} is not in the alphabet, whose ids are 0 to {size - 1}"
    if places is not None and (
        len(places) != len(example.answer) or any(not 0 <= place < len(example.question) for place in places)
    ):
        return "each token of an answer needs a position of the question"
    question, answer = ([task.alphabet[token] for token in tokens] for tokens in (example.question, example.answer))
    solution = task.solve(question)
    if solution is not None and list(solution) != answer:
        return f"the answer to {' '.join(question)} is {' '.join(answer)}, but solve returns {' '.join(solution)}"
    return ""
