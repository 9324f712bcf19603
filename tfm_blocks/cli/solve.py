"""The command `tfm solve`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli.models import compose_requested_model
from tfm_blocks.cli.options import add_model_options
from tfm_blocks.errors import ConfigError, Problem, shown

if TYPE_CHECKING:
    from tfm_blocks.cli.options import Commands
    from tfm_blocks.sweep.solve import Budget, Solution

OPTIONS = {
    "parameters": "number of parameters",
    "multiply_adds": "multiply-adds of a sentence of 32 tokens per input",
    "decode_state": "floats that decoding keeps for a sentence of 32 tokens per input",
}


def add_commands(commands: Commands) -> None:
    """Add the parser of `tfm solve`."""
    what = "find the values of knobs at which a model has the size or cost of another model"
    command = commands.add_parser("solve", help="match the size or cost of another model", description=what)
    command.add_argument("model", metavar="MODEL", help="a name under conf/model/, or a path to a YAML file")
    what = "knobs to solve for, such as d_ff; several are scaled together. KEY=VALUE sets another key, as in tfm show"
    command.add_argument("overrides", nargs="+", metavar="KNOB|KEY=VALUE", help=what)
    what = "reference model, and its overrides"
    command.add_argument("--like", nargs="+", metavar=("MODEL", "KEY=VALUE"), help=what)
    budgets = command.add_mutually_exclusive_group(required=True)
    for name, what in OPTIONS.items():
        option = f"--{name.replace('_', '-')}"
        help = f"match the {what}; a number such as 65M replaces --like"
        budgets.add_argument(option, nargs="?", const=0, type=_number, metavar="N", help=help)
    what = "largest difference from the budget, in percent (0.5 for parameters, else 1)"
    command.add_argument("--within", type=float, metavar="PERCENT", help=what)
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_model_options(command)
    command.set_defaults(run=_solve)


def _number(text: str) -> int:
    """Parse a number above 0 such as 65M or 65,000,000, as an argparse type. Raises ArgumentTypeError."""
    from tfm_blocks.config.settings import read_amount

    number = read_amount(text)
    if not number:
        raise argparse.ArgumentTypeError(f"must be a number above 0 such as 65M or 65000000, but is {shown(text)}")
    return number


def _solve(arguments: argparse.Namespace) -> None:
    from tfm_blocks.sweep.solve import BUDGETS, solve

    name, number = next((name, vars(arguments)[name]) for name in OPTIONS if vars(arguments)[name] is not None)
    budget = BUDGETS[name]
    knobs = list(dict.fromkeys(word for word in arguments.overrides if "=" not in word))
    overrides = [word for word in arguments.overrides if "=" in word]
    if not knobs:
        raise ConfigError(Problem("KNOB", "there is no knob to solve for", help="tfm solve MODEL d_ff --like base …"))
    if number and arguments.like:
        rule = f"cannot be combined with the number {number:,}"
        raise ConfigError(Problem("--like", rule, help="leave one of them out"))
    composed = compose_requested_model(arguments.model, overrides, arguments, learn=True)
    requested = number or _cost_of_reference(arguments, overrides, budget)
    within = budget.within if arguments.within is None else arguments.within / 100
    solution = solve(composed, knobs, budget, requested, within)
    command = _command(arguments, overrides, solution)
    if arguments.json:
        from tfm_blocks.report.screen import print_json

        sizes = {"requested": solution.requested, "reached": solution.reached}
        print_json({"values": dict(solution.values), "unit": budget.unit, **sizes, "command": command})
    else:
        _print(solution, budget, command)


def _cost_of_reference(arguments: argparse.Namespace, overrides: list[str], budget: Budget) -> int:
    """Return the cost of the model of --like, which has the same data and experiment. Raises ConfigError."""
    from tfm_blocks.compose.command_line import keep_last
    from tfm_blocks.compose.model import sets_run
    from tfm_blocks.sweep.solve import measure_cost

    if not arguments.like:
        rule = f"the budget needs a reference model or a number of {budget.unit}"
        raise ConfigError(Problem("--like", rule, help="add --like base, or a number such as --parameters 65M"))
    model, *changes = arguments.like
    shared = [text for text in overrides if sets_run([text])]
    replaced = {text.partition("=")[0] for text in changes}
    kept = [text for text in shared if text.partition("=")[0] not in replaced]
    reference = compose_requested_model(model, [*kept, *keep_last(changes)], arguments, learn=True)
    return measure_cost(reference, budget)


def _command(arguments: argparse.Namespace, overrides: list[str], solution: Solution) -> str:
    """Return the command line that trains the model with the values, or shows a model file at a path."""
    values = [f"{knob}={value}" for knob, value in solution.values.items()]
    folder = ["--config-dir", str(arguments.config_dir)] if arguments.config_dir else []
    if Path(arguments.model).suffix:
        return shlex.join(["tfm", "show", *folder, arguments.model, *overrides, *values])
    return shlex.join(["tfm", "train", *folder, f"model={arguments.model}", *overrides, *values])


def _print(solution: Solution, budget: Budget, command: str) -> None:
    from tfm_blocks.report.screen import screen

    console = screen()
    for knob, value in solution.values.items():
        console.print(f"{knob}={value}")
    console.print(f"{solution.requested:,} {budget.unit} requested, {solution.reached:,} reached", end="")
    console.print(f" ({solution.difference:+.2%})")
    console.print(command, soft_wrap=True)
