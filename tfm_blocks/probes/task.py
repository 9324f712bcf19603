"""The interface of probe tasks, the presets of their sizes, their examples, and random numbers.

The random numbers are the same on every machine and in every process: draws use only `Generator.random`, which is 53
bits of PCG64 in every version of NumPy.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count as count_up
from itertools import islice
from typing import Any, ClassVar, Literal, dataclass_transform, get_args, get_origin, get_type_hints

import numpy as np
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray

from tfm_blocks.errors import ConfigError, Problem, TfmError, config_error, place_of

BLOCK = 1000  # examples per random stream; any block can be generated without the blocks before it
LONGEST = 10_000  # tokens; a block of such strings must fit into memory
LARGEST = 1_000_000  # symbols of an alphabet
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


def random_stream(seed: int, *names: str | int) -> Generator:
    """Return the generator for a seed and names such as the split, the length and the block of examples."""
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    key = tuple(np.frombuffer(digest, "<u4").tolist())
    return Generator(PCG64(SeedSequence(seed, spawn_key=key)))


def integers(rng: Generator, low: int, high: int, shape: tuple[int, ...]) -> Ids:
    """Draw integers uniformly from low, …, high - 1."""
    return low + (rng.random(shape) * (high - low)).astype(np.int64)


def distinct(rng: Generator, low: int, high: int, count: int, each: int) -> Ids:
    """Draw `count` rows of `each` different integers from low, …, high - 1, in random order.

    Floyd's algorithm (Bentley and Floyd 1987), for all rows at once, draws each set with equal probability.
    """
    rows = np.empty((count, each), np.int64)
    for column, last in enumerate(range(high - low - each, high - low)):
        drawn = integers(rng, 0, last + 1, (count,))
        repeats = (rows[:, :column] == drawn[:, None]).any(axis=1)
        rows[:, column] = np.where(repeats, last, drawn)
    return low + np.take_along_axis(rows, order(rng, (count, each)), axis=1)


def order(rng: Generator, shape: tuple[int, int]) -> Ids:
    """Draw a random permutation of the columns for each row."""
    return np.argsort(rng.random(shape), axis=1, kind="stable")


@dataclass(frozen=True)
class Preset:
    """A size of a task: numbers of examples, lengths, and settings that differ from the defaults.

    The length of a training or validation example is drawn uniformly from the lengths between `train_lengths`, both
    included, that fit the task. `test` is the number of examples for each of `test_lengths`. A task without lengths has
    neither. If a paper draws new examples for each step, the preset has 2,000,000 training examples, which repeat.
    """

    train: int
    val: int
    test: int
    train_lengths: tuple[int, int] | None = None
    test_lengths: tuple[int, ...] = ()
    settings: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class ProbeTask(ABC):
    """A probe task. Each subclass is a frozen dataclass, whose fields are its settings; their defaults are the paper's.

    Subclasses document their settings and refuse invalid ones with a ConfigError whose address is `data.SETTING`.
    """

    source: ClassVar[str]  # the paper and its section or table
    presets: ClassVar[Mapping[str, Preset]]  # lite, which fits two CPU cores, and paper, which a plug-in may leave out
    shows_answers: ClassVar[bool] = False  # the question repeats each answer one position later: causal models only
    least: ClassVar[Mapping[str, int]] = {}  # the smallest value of a setting; the largest is a million

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        """Raise ConfigError for a setting that is not one of its literals, is below its minimum, or above a million."""
        for name, kind in get_type_hints(type(self)).items():
            known = get_args(kind) if get_origin(kind) is Literal else ()
            if known and (value := getattr(self, name)) not in known:
                choices = " or ".join(known) if len(known) == 2 else f"one of {', '.join(known)}"
                rule = f"must be {choices}, but is {value}"
                raise setting_error(name, rule, f"write data.{name}={getattr(type(self), name)}")
        require_at_least(self, **self.least)

    @property
    @abstractmethod
    def alphabet(self) -> tuple[str, ...]:
        """The printable name of each token id."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """The token accuracy of uniform guesses among the symbols that an answer can contain."""

    def misfit(self, length: int) -> str:
        """Return the rule that the length breaks, such as 'must be even', or '' if it fits."""
        return "" if length >= 1 else "must be at least 1"

    def check_validation(self, count: int) -> None:
        """Raise ConfigError if the task has fewer than `count` validation examples. Most tasks have no limit."""
        return

    def solve(self, question: Sequence[str]) -> Sequence[str] | None:
        """Return the answer to a question, computed independently of `examples`; None: it is not tested.

        `tfm probes --test` compares it with generated answers.
        """
        return None

    @abstractmethod
    def examples(self, seed: int, split: str, lengths: Sequence[int], count: int) -> Iterator[Example]:
        """Generate the first `count` examples of the split train, val or test, each of one of the lengths.

        The arguments alone determine them, on every machine. A task without lengths ignores `lengths`, and generates
        fewer examples if it has fewer.
        """


class SampledTask(ProbeTask):
    """A task with an unlimited number of random examples.

    Each split has separate random streams. Splits may still share questions if a task has few, such as the eight bit
    strings of length 3.
    """

    @abstractmethod
    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        """Draw `count` examples of a length that fits."""

    def examples(self, seed: int, split: str, lengths: Sequence[int], count: int) -> Iterator[Example]:
        """Generate examples whose lengths are drawn uniformly from `lengths`."""
        blocks = (self._block(seed, split, lengths, block) for block in count_up())
        return islice((example for block in blocks for example in block), count)

    def _block(self, seed: int, split: str, lengths: Sequence[int], block: int) -> list[Example]:
        drawn = integers(random_stream(seed, split, "lengths", block), 0, len(lengths), (BLOCK,))
        examples: list[Example | None] = [None] * BLOCK
        for number, length in enumerate(lengths):
            rows = np.flatnonzero(drawn == number).tolist()
            batch = self.batch(random_stream(seed, split, length, block), length, len(rows))
            for row, example in zip(rows, batch, strict=True):
                examples[row] = example
        return [example for example in examples if example is not None]


class NumberTask(SampledTask):
    """A task over strings of numbers from 0 to `numbers` - 1, which are tokens. The first of `marks` is the blank.

    One token of the answer is expected at each blank that follows the string.
    """

    marks: ClassVar[tuple[str, ...]] = ("_",)  # the other tokens

    @property
    @abstractmethod
    def numbers(self) -> int:
        """The number of different numbers."""

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*map(str, range(self.numbers)), *self.marks)

    @property
    def chance(self) -> float:
        return 1 / self.numbers

    def answers(self, strings: Ids) -> Ids:
        """Return the answer to each row of uniform numbers."""
        return strings

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        strings = integers(rng, 0, self.numbers, (count, length))
        return at_blanks(strings, self.answers(strings), blank=self.numbers)


@contextmanager
def running_task(cls: type[ProbeTask]) -> Iterator[None]:
    """Convert an exception of the code of a plug-in's task to ConfigError."""
    try:
        yield
    except (TfmError, OSError):
        raise
    except Exception as error:
        module = cls.__module__
        rule = f"{cls.__qualname__} of the plug-in {module} fails: {type(error).__name__}: {error}"
        help = f"tfm probes --test {module} tests its tasks"
        raise ConfigError(Problem("data.task", rule, place_of(error, module), help=help)) from error


def fitting_lengths(task: ProbeTask, low: int, high: int) -> tuple[int, ...]:
    """Return the lengths from low to high, both included, that fit the task. Raises ConfigError if none fits."""
    if high > LONGEST:
        raise setting_error("train_lengths", f"must be at most {LONGEST:,}, but is {high}", "use shorter strings")
    lengths = tuple(length for length in range(max(low, 1), high + 1) if not task.misfit(length))
    if not lengths:
        rule = f"no length from {low} to {high} fits the task: it {task.misfit(high)}"
        raise setting_error("train_lengths", rule, _nearest_fit(task, high))
    return lengths


def check_length(task: ProbeTask, address: str, length: int) -> None:
    """Raise ConfigError if the length does not fit the task."""
    if rule := f"must be at most {LONGEST:,}" if length > LONGEST else task.misfit(length):
        raise config_error(address, f"{rule}, but is {length}", _nearest_fit(task, length))


def _nearest_fit(task: ProbeTask, length: int) -> str:
    near = sorted(range(1, LONGEST + 1), key=lambda other: abs(other - length))
    fits = next((other for other in near if not task.misfit(other)), None)
    return f"the nearest length that fits is {fits}" if fits else "change the settings of the task"


def setting_error(setting: str, rule: str, help: str) -> ConfigError:
    """Return the error for a setting of a task whose value breaks the rule."""
    return config_error(f"data.{setting}", rule, help)


def require_at_least(task: ProbeTask, **least: int) -> None:
    """Raise ConfigError for the first of these settings whose value is below its minimum, or above a million."""
    for setting, minimum in least.items():
        value = getattr(task, setting)
        if value < minimum:
            rule = f"must be at least {minimum}, but is {value}"
            raise setting_error(setting, rule, f"write data.{setting}={minimum} or more")
        if value > LARGEST:
            rule = f"must be at most {LARGEST:,}, but is {value}"
            raise setting_error(setting, rule, f"write data.{setting}={LARGEST}")


CHOMSKY = {  # tasks of the Chomsky hierarchy, Delétang et al. 2023
    "paper": Preset(2_000_000, 512, 512, (1, 40), (60, 80, 100, 200, 300, 400, 500)),
    "lite": Preset(64_000, 1000, 1000, (1, 40), (40, 60, 80, 100)),
}
GENERATED_ANSWERS = {  # tasks whose answer is generated, after Kazemnejad et al. 2023
    "paper": Preset(100_000, 10_000, 10_000, (1, 20), tuple(range(1, 41))),
    "lite": Preset(50_000, 500, 500, (1, 20), (10, 20, 30, 40)),
}


def mad(length: int, lite_length: int, **lite_settings: int) -> dict[str, Preset]:
    """Return the sizes of a task of MAD, Poli et al. 2024."""
    lite = Preset(12_800, 640, 640, (lite_length, lite_length), (lite_length,), lite_settings)
    return {"paper": Preset(12_800, 1280, 1280, (length, length), (length,)), "lite": lite}


def tracking(*test_lengths: int) -> dict[str, Preset]:
    """Return the sizes of parity and arithmetic, Grazzi et al. 2024.

    The lite size also trains on shorter strings: with them an LSTM learns parity in a quarter of the steps.
    """
    return {
        "paper": Preset(2_000_000, 8192, 8192, (3, 40), test_lengths),
        "lite": Preset(64_000, 1000, 1000, (1, 40), test_lengths),
    }
