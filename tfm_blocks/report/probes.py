"""`tfm probes`: the probe tasks, their settings and examples."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from itertools import count

from tfm_blocks.errors import config_error, shown, suggest
from tfm_blocks.probes.catalogue import TASKS
from tfm_blocks.probes.task import Example, Preset, ProbeTask
from tfm_blocks.report.screen import print_table, screen
from tfm_blocks.report.table import Table, texts


def split_fields(text: str, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """Return the text without its fields, and the fields of these names with their texts on one line each."""
    body, _, last = text.rpartition("\n\n")
    if not last.startswith(tuple(f"{name}: " for name in names)):
        return text, {}
    fields: dict[str, str] = {}
    for line in last.splitlines():
        name, colon, rest = line.partition(": ")
        if colon and name in names:
            fields[name] = rest
        else:
            fields[next(reversed(fields))] += f" {line}"
    return body, fields


EXAMPLES = 3
SHORT = 8  # tokens of an example, if the task can be that short


def show_probes() -> None:
    """Print a row for each task."""
    summaries = {name: " ".join(_split(task)[0].partition("\n\n")[0].split()) for name, task in TASKS.items()}
    rows = [[name, summaries[name], task.source] for name, task in TASKS.items()]
    print_table(Table("probe tasks", texts("task", "question", "source"), rows))


def show_probe(name: str) -> None:
    """Print a task: its explanation, settings, sizes and examples. Raises ConfigError for an unknown name."""
    if name not in TASKS:
        raise config_error("probes", f"no task is called {shown(name)}", suggest(name, TASKS))
    console, cls = screen(), TASKS[name]
    task = cls(**cls.presets["lite"].settings)
    examples = _examples(task, cls.presets["lite"])
    explanation, meanings = _split(cls)
    console.print(f"{name}   {cls.source}\n\n{explanation}\n\n{_answer_rule(task, examples[0])}\n")
    if meanings:
        settings = [[key, *_values(cls, key), text] for key, text in meanings.items()]
        print_table(Table("settings", texts("setting", *cls.presets, "meaning"), settings))
    print_table(Table("numbers of examples", texts("", *cls.presets), list(_sizes(list(cls.presets.values())))))
    console.print()
    for example in examples:
        question, answer = ([task.alphabet[token] for token in tokens] for tokens in (example.question, example.answer))
        if example.positions is None:
            console.print(f"{' '.join(question)} → {' '.join(answer)}", soft_wrap=True)
            continue
        label = dict(zip(example.positions, answer, strict=True))
        below = [label.get(place, "·") for place in range(len(question))]
        widths = [max(map(len, column)) for column in zip(question, below, strict=True)]
        for words in (question, below):
            line = " ".join(word.ljust(width) for word, width in zip(words, widths, strict=True))
            console.print(line.rstrip(), soft_wrap=True)
    console.print()


def _split(task: type[ProbeTask]) -> tuple[str, dict[str, str]]:
    """Return the docstring of a task without the meanings of its settings, and the meanings."""
    return split_fields(inspect.getdoc(task) or "", [field.name for field in fields(task)])


def _values(task: type[ProbeTask], setting: str) -> Iterator[str]:
    for preset in task.presets.values():
        yield str(preset.settings.get(setting, getattr(task, setting)))


def _sizes(presets: Sequence[Preset]) -> Iterator[tuple[str, ...]]:
    yield "training", *(f"{preset.train:,}" for preset in presets)
    yield "validation", *(f"{preset.val:,}" for preset in presets)
    yield "test, of each length", *(f"{preset.test:,}" for preset in presets)
    if any(preset.train_lengths for preset in presets):
        yield "training lengths", *("–".join(map(str, sorted({*(preset.train_lengths or ())}))) for preset in presets)
        yield "test lengths", *(", ".join(map(str, preset.test_lengths)) for preset in presets)


def _examples(task: ProbeTask, preset: Preset) -> list[Example]:
    """Draw examples of a short length; a task that needs more than `SHORT` tokens gets one and a half times as many."""
    if not preset.train_lengths:
        return list(task.examples(1, "train", (), EXAMPLES))
    shortest = _first_fit(task, SHORT)
    length = _first_fit(task, shortest if shortest <= SHORT + 1 else shortest * 3 // 2)
    return list(task.examples(1, "train", [length], EXAMPLES))


def _first_fit(task: ProbeTask, least: int) -> int:
    return next(length for length in count(least) if not task.misfit(length))


def _answer_rule(task: ProbeTask, example: Example) -> str:
    if example.positions is None:
        return "The answer is generated after the question, token by token."
    shows = " The question shows it one position later, so the task suits only causal models." * task.shows_answers
    return f"The model predicts the answer at positions of the question.{shows}"
