"""The probe tasks by name, and the decorator that registers a task of a plug-in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import TypeVar

from tfm_blocks.probes.addition import Addition
from tfm_blocks.probes.arithmetic import Arithmetic, ArithmeticBrackets
from tfm_blocks.probes.bits import EvenPairs, Parity
from tfm_blocks.probes.copying import Compression, SelectiveCopying
from tfm_blocks.probes.cycle_navigation import CycleNavigation
from tfm_blocks.probes.fuzzy_recall import FuzzyRecall
from tfm_blocks.probes.memorisation import Memorisation
from tfm_blocks.probes.missing_duplicate import MissingDuplicate
from tfm_blocks.probes.mqar import Mqar
from tfm_blocks.probes.recall import InContextRecall, NoisyRecall
from tfm_blocks.probes.scan import Scan
from tfm_blocks.probes.stack_manipulation import StackManipulation
from tfm_blocks.probes.strings import BucketSort, Copy, OddsFirst, Reverse, ReverseString, Sort
from tfm_blocks.probes.task import Preset, ProbeTask
from tfm_blocks.probes.word_problem import WordProblem

TASKS: dict[str, type[ProbeTask]] = {
    "mqar": Mqar,
    "in_context_recall": InContextRecall,
    "fuzzy_recall": FuzzyRecall,
    "noisy_recall": NoisyRecall,
    "selective_copying": SelectiveCopying,
    "compression": Compression,
    "memorisation": Memorisation,
    "parity": Parity,
    "even_pairs": EvenPairs,
    "cycle_navigation": CycleNavigation,
    "arithmetic": Arithmetic,
    "arithmetic_brackets": ArithmeticBrackets,
    "word_problem": WordProblem,
    "reverse_string": ReverseString,
    "odds_first": OddsFirst,
    "bucket_sort": BucketSort,
    "missing_duplicate": MissingDuplicate,
    "stack_manipulation": StackManipulation,
    "scan": Scan,
    "copy": Copy,
    "reverse": Reverse,
    "sort": Sort,
    "addition": Addition,
}

Task = TypeVar("Task", bound=type[ProbeTask])


def task(name: str) -> Callable[[Task], Task]:
    """Register a frozen dataclass of ProbeTask as the task `name`, which `data.task` selects.

    If a module is imported again, its tasks replace the earlier ones. Raises TypeError at import for an incomplete
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
    if not is_dataclass(cls) or "__dataclass_params__" not in vars(cls):
        return "needs the decorator @dataclass(frozen=True) below @task"
    if missing := [field.name for field in fields(cls) if field.default is MISSING]:
        return f"needs a default for {', '.join(missing)}"
    presets = getattr(cls, "presets", {})
    if "lite" not in presets or not all(isinstance(preset, Preset) for preset in presets.values()):
        return 'needs presets, such as {"lite": Preset(…)}'
    lengths = [bool(preset.train_lengths) == bool(preset.test_lengths) for preset in presets.values()]
    if not all(lengths):
        return "has a preset with train_lengths or test_lengths alone: write both, or neither"
    return "" if getattr(cls, "source", "") and cls.__doc__ else "needs a docstring and a source"
