"""The probe tasks by name, the decorator that registers a task of a plug-in, and the rules that every task keeps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from itertools import islice, pairwise
from typing import TypeVar

from tfm_blocks.probes import arithmetic, recall, scan, strings
from tfm_blocks.probes.task import Example, Preset, ProbeTask, check_length, fitting_lengths

TESTED = 200  # examples of each split
TASKS: dict[str, type[ProbeTask]] = {
    "mqar": recall.Mqar,
    "in_context_recall": recall.InContextRecall,
    "fuzzy_recall": recall.FuzzyRecall,
    "noisy_recall": recall.NoisyRecall,
    "selective_copying": strings.SelectiveCopying,
    "compression": strings.Compression,
    "memorisation": recall.Memorisation,
    "parity": strings.Parity,
    "even_pairs": strings.EvenPairs,
    "cycle_navigation": strings.CycleNavigation,
    "arithmetic": arithmetic.Arithmetic,
    "arithmetic_brackets": arithmetic.ArithmeticBrackets,
    "word_problem": strings.WordProblem,
    "reverse_string": strings.ReverseString,
    "odds_first": strings.OddsFirst,
    "bucket_sort": strings.BucketSort,
    "missing_duplicate": strings.MissingDuplicate,
    "stack_manipulation": strings.StackManipulation,
    "scan": scan.Scan,
    "copy": strings.Copy,
    "reverse": strings.Reverse,
    "sort": strings.Sort,
    "addition": arithmetic.Addition,
}

Task = TypeVar("Task", bound=type[ProbeTask])


def task(name: str) -> Callable[[Task], Task]:
    """Register a subclass of ProbeTask as the task `name`, which `data.task` selects.

    If a module is reloaded, its tasks replace the earlier ones. Raises TypeError at import for an incomplete
    class, and if another class has the name.
    """

    def register(cls: Task) -> Task:
        taken = TASKS.get(name)
        if taken and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"task {name!r} is already registered by {taken.__module__}.{taken.__qualname__}")
        if rule := _incomplete(name, cls):
            raise TypeError(f"task {name!r}: {cls.__qualname__} {rule}")
        TASKS[name] = cls
        return cls

    return register


def _incomplete(name: str, cls: type[ProbeTask]) -> str:
    """Return what the class of a task lacks, or ''."""
    if not re.fullmatch(r"[a-z]\w*", name):
        return "needs a name of letters, digits and _, such as my_task"
    if missing := [field.name for field in fields(cls) if field.default is MISSING]:
        return f"needs a default for {', '.join(missing)}"
    presets = getattr(cls, "presets", {})
    if "lite" not in presets or not all(isinstance(preset, Preset) for preset in presets.values()):
        return 'needs presets, such as {"lite": Preset(…)}'
    lengths = [bool(preset.train_lengths) == bool(preset.test_lengths) for preset in presets.values()]
    if not all(lengths):
        return "has a preset with train_lengths or test_lengths alone: write both, or neither"
    return "" if getattr(cls, "source", "") and cls.__doc__ else "needs a docstring and a source"


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
