"""The command `tfm diff`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli import options
from tfm_blocks.cli.models import add_lengths, read_model_or_run, requested_lengths
from tfm_blocks.errors import ConfigError, Problem, printable, shown

if TYPE_CHECKING:
    from tfm_blocks.language.spec import Spec
    from tfm_blocks.report.model_difference import ModelDifference


def add_commands(commands: options.Commands) -> None:
    """Add the parser of `tfm diff`."""
    what = "show how two models differ, what that costs, and which weights of the first load into the second"
    command = options.add_command(commands, "diff", _diff, "show how two models differ", what)
    what = "two models or run folders, each followed by its overrides: base heads=8 base heads=4"
    command.add_argument("words", nargs="+", metavar="MODEL|RUN", help=what)
    options.add_file(command, "draw both models with their changes marked: .svg, .pdf, .png or .tex")
    options.add_model_options(command)
    add_lengths(command)
    options.add_json(command)


def _diff(arguments: argparse.Namespace) -> None:
    from tfm_blocks.report.model_difference import compare_models, model_difference_record, show_model_difference
    from tfm_blocks.report.screen import print_json

    models = split_models(arguments.words, (2,))
    (a, *_), (b, *_) = (read_model_or_run(name, overrides, arguments) for name, overrides in models)
    first, second = (" ".join([name, *overrides]) for name, overrides in models)
    difference = compare_models((first, second), a, b, requested_lengths(arguments, [*a.inputs, *b.inputs]))
    if arguments.path:
        _draw(arguments.path, a, b, difference)
    if arguments.json:
        print_json(model_difference_record(difference))
    else:
        show_model_difference(difference, a, b)


def _draw(path: Path, a: Spec, b: Spec, difference: ModelDifference) -> None:
    from tfm_blocks.figures.figure import Style, write_figure
    from tfm_blocks.report.model_difference import difference_picture

    first, second = map(printable, difference.names)
    picture = difference_picture(a, b, replace(difference, names=(first, second)))
    write_figure(path, picture, Style(title=f"{first} → {second}"))


def split_models(words: Sequence[str], counts: Collection[int]) -> list[tuple[str, list[str]]]:
    """Return each model with the overrides after it. Raises ConfigError unless the number of models is in `counts`."""
    from tfm_blocks.compose.command_line import keep_last

    models: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" in word and models and not word.startswith("model=") and not Path(word).exists():
            models[-1][1].append(word)
        else:
            models.append((word.removeprefix("model="), []))
    models = [(model, keep_last(overrides)) for model, overrides in models]
    if len(models) not in counts:
        rule = f"needs {' or '.join(map(str, counts))} models, but has {len(models)}: {shown(' '.join(words))}"
        help = "write each model with its overrides after it, such as base heads=8 base heads=4"
        raise ConfigError(Problem("command line", rule, help=help))
    return models
