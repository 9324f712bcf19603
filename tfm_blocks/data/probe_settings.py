"""The settings of probe tasks."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property
from typing import Any, Literal, get_type_hints

from pydantic import ConfigDict, create_model, model_validator

from tfm_blocks.config.settings import Count, CountOrZero, Filled, Settings, read_settings
from tfm_blocks.errors import ConfigError, config_error, shown, suggest
from tfm_blocks.probes.catalogue import TASKS
from tfm_blocks.probes.task import Preset, ProbeTask, check_length, fitting_lengths, running_task

SPECIAL_TOKENS = 4  # pad, bos, eos and unk, which come before the alphabet of the task


class ProbeSettings(Settings):
    """Settings of a probe task. Other keys are settings of the task, such as data.pairs; null takes the preset's value.

    size: the preset, which sets every key that is null. lite: for two CPU cores; paper: as published.
    seed: selects the examples; it is independent of the seed of the run.
    train, val: numbers of examples; test: the number of examples of each test length.
    train_lengths: the shortest and the longest length in training and validation. test_lengths: all test lengths.
    batch: examples of an optimizer step. batch_tokens: maximum padded tokens of a micro-batch.
    first: number of examples to keep of each split; null: all. cache: as in PairSettings.
    """

    model_config = ConfigDict(extra="allow")

    kind: Literal["probe"]
    task: str
    size: Literal["lite", "paper"]
    seed: CountOrZero
    train: Count | None = None
    val: Count | None = None
    test: Count | None = None
    train_lengths: list[int] | None = None
    test_lengths: list[int] | None = None
    batch: Count
    batch_tokens: Count
    first: Count | None = None
    cache: Filled | None = None

    @model_validator(mode="after")
    def _is_a_valid_task(self) -> ProbeSettings:
        with running_task(self._kind):
            task = self.probe
            task.check_validation(self.counts["val"])
            for length in self.lengths["test"]:
                check_length(task, "data.test_lengths", length)
            _ = self.vocab, task.chance < 1  # they are numbers
        return self

    @cached_property
    def probe(self) -> ProbeTask:
        """Return the task with its settings. Raises ConfigError with all problems of their types and names."""
        task = self._kind
        written = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        hints = get_type_hints(task)
        kinds: dict[str, Any] = {field.name: (hints[field.name], field.default) for field in fields(task)}
        values = {**self._preset.settings, **written}
        try:
            settings = read_settings(create_model(task.__name__, __base__=Settings, **kinds), values)
        except ConfigError as error:
            problems = [replace(problem, address=f"data.{problem.address}") for problem in error.problems]
            raise ConfigError(problems) from None
        return task(**settings.model_dump())

    @property
    def vocab(self) -> int:
        """Return the size of the vocabulary."""
        return SPECIAL_TOKENS + len(self.probe.alphabet)

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of examples of each split, and for the test of each length."""
        preset = self._preset
        counts = {name: getattr(self, name) or getattr(preset, name) for name in ("train", "val", "test")}
        return {name: min(count, self.first or count) for name, count in counts.items()}

    @property
    def lengths(self) -> dict[str, tuple[int, ...]]:
        """Return the lengths of each split; none if the task has no lengths. Raises ConfigError."""
        preset = self._preset
        if not preset.train_lengths:
            for name in ("train_lengths", "test_lengths"):
                if getattr(self, name):
                    raise config_error(f"data.{name}", f"{self.task} has no lengths", "leave it out")
            return {"train": (), "val": (), "test": ()}
        train = tuple(self.train_lengths or preset.train_lengths)
        if len(train) != 2 or train[0] > train[1]:
            rule = f"must hold the shortest and the longest length, but is {list(train)}"
            raise config_error("data.train_lengths", rule, "write data.train_lengths=[3,40]")
        fitting = fitting_lengths(self.probe, *train)
        return {"train": fitting, "val": fitting, "test": tuple(self.test_lengths or preset.test_lengths)}

    @property
    def _kind(self) -> type[ProbeTask]:
        if self.task not in TASKS:
            rule = f"no task is called {shown(self.task)}"
            help = f"{suggest(self.task, TASKS)}; for your own task: plugins=[MODULE]"
            raise config_error("data.task", rule, help)
        return TASKS[self.task]

    @property
    def _preset(self) -> Preset:
        presets = self._kind.presets
        if self.size not in presets:
            rule = f"the task {self.task} has no size {self.size}"
            raise config_error("data.size", rule, f"write data.size={next(iter(presets))}")
        return presets[self.size]
