"""Commands on the sizes of models: coordinates and solve."""

from __future__ import annotations

import math
import re
import shlex
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli import options
from tfm_blocks.cli.models import add_model, compose_requested_model
from tfm_blocks.errors import config_error, print_line, print_warnings, printable, shown

if TYPE_CHECKING:
    from tfm_blocks.language.spec import Spec
    from tfm_blocks.sweep.solve import Budget

VOCAB = 256  # ids that the batch draws from, unless the command line sets vocab
EXAMPLE = "write two or more, such as d_model=64,128,256"
SEVERAL = re.compile(r"[^=]+=\d+(,\d+)+")
BUDGET_OPTIONS = {
    "parameters": "number of parameters",
    "multiply_adds": "multiply-adds of a sentence of 32 tokens per input",
    "decode_state": "floats that decoding keeps for a sentence of 32 tokens per input",
}


def add_commands(commands: options.Commands) -> None:
    """Add the parsers of `tfm coordinates` and `tfm solve`."""
    what = "measure how the outputs of a model's nodes grow with its width: KNOB=SMALL,…,LARGE"
    command = add_model(commands, "coordinates", _coordinates, what, "MODEL")
    add = command.add
    add("--steps", "training steps of each model (5)", type=options.count, default=5, metavar="N")
    add("--seeds", "seeds of each width (3)", type=options.count, default=3, metavar="N")
    add("--batch", "sequences of the batch (8)", type=options.count, default=8, metavar="N")
    add("--length", "tokens of a sequence (32)", type=options.count, default=32, metavar="N")
    add("--rate", "learning rate at the base (0.004)", type=_rate, default=0.004, metavar="X")
    what = "muon trains the matrices; AdamW the other weights (adamw)"
    add("--optimizer", what, choices=["adamw", "muon"], default="adamw")
    add("-o", "also draw a figure: .svg, .pdf or .png", **options.OUTPUT)
    command.add_shared("--json")
    what = "find the values of knobs at which a model has the size or cost of another model"
    command = options.add_command(commands, "solve", _solve, "match the size or cost of another model", what)
    command.add("model", "a name under conf/model/, or a path to a YAML file", metavar="MODEL")
    what = "knobs to solve for, such as d_ff; several are scaled together. KEY=VALUE sets another key, as in tfm show"
    command.add("overrides", what, nargs="+", metavar="KNOB|KEY=VALUE")
    command.add("--like", "reference model, and its overrides", nargs="+", metavar=("MODEL", "KEY=VALUE"))
    budgets = command.add_mutually_exclusive_group(required=True)
    for name, what in BUDGET_OPTIONS.items():
        help = f"match the {what}; a number such as 65M replaces --like"
        budgets.add_argument(options.flag_of(name), nargs="?", const=0, type=_number, metavar="N", help=help)
    what = "largest difference from the budget, in percent (0.5 for parameters, else 1)"
    command.add("--within", what, type=_percent, metavar="PERCENT")
    command.add_flag("--json", "print JSON instead of text")
    command.add_shared(*options.MODEL_OPTIONS)


def _coordinates(arguments: Namespace) -> int:
    """Print the table. Return 1 if a node's output grows or vanishes. Raises ConfigError."""
    from tfm_blocks.report.coordinates import (
        FIRST_STEP,
        coordinate_records,
        draw_coordinates,
        node_sizes,
        show_coordinates,
    )
    from tfm_blocks.report.screen import print_json
    from tfm_blocks.training.coordinates import Training, logit_nodes

    options.expect_figure(arguments.path)
    if arguments.steps < FIRST_STEP:
        rule = f"must be at least {FIRST_STEP}, from which the slopes count, but is {arguments.steps}"
        raise config_error("--steps", rule, "write --steps 5")
    knob, specs = _specs(arguments)
    training = Training(arguments.steps, arguments.batch, arguments.length, arguments.rate, arguments.optimizer)
    measured = {
        width: [training.measure(spec, seed) for seed in range(1, arguments.seeds + 1)] for width, spec in specs.items()
    }
    spec = next(iter(specs.values()))
    nodes = list(node_sizes(measured, logit_nodes(spec)))
    title = f"{arguments.model}, {spec.parametrisation}"
    if arguments.json:
        print_json({"model": arguments.model, "knob": knob, "nodes": coordinate_records(nodes)})
    else:
        show_coordinates(nodes, title, knob)
    if arguments.path:
        draw_coordinates(nodes, printable(title), knob, arguments.path)
    return 0 if all(node.passes for node in nodes) else 1


def _specs(arguments: Namespace) -> tuple[str, dict[int, Spec]]:
    """Return the first knob with several values, and the model of each of its values. Raises ConfigError."""
    several = {key: values for key, values in map(_values, arguments.overrides) if len(values) > 1}
    if not several:
        raise config_error("KEY=VALUE", "no knob has several values", EXAMPLE)
    knob, widths = next(iter(several.items()))
    for key, values in several.items():
        if len(values) != len(widths) or len(set(values)) != len(values):
            rule = f"must have {len(widths)} different values, as many as {knob}, but has {','.join(map(str, values))}"
            raise config_error(key, rule, "the values of several knobs are taken together, in order")
    plain = [text for text in arguments.overrides if text.partition("=")[0] not in several]
    specs = {}
    for place, width in enumerate(widths):
        own = [*plain, *(f"{key}={values[place]}" for key, values in several.items())]
        first = {key: values[0] for key, values in several.items() if "." not in key}
        specs[width] = _spec(arguments, own, [f"model.base.{key}={value}" for key, value in first.items()])
    print_warnings(next(iter(specs.values())).warnings)
    return knob, specs


def _values(text: str) -> tuple[str, list[int]]:
    key, _, value = text.partition("=")
    return key, [int(part) for part in value.split(",")] if SEVERAL.fullmatch(text) else []


def _spec(arguments: Namespace, overrides: Sequence[str], base: Sequence[str]) -> Spec:
    """Return a checked model, with a small vocabulary, and with the smallest widths as its base if it has none."""
    from tfm_blocks.network.build import check_model

    composed = compose_requested_model(arguments.model, list(overrides), arguments)
    more = []
    if "vocab" in composed.raw and not any(text.startswith("vocab=") for text in overrides):
        more.append(f"vocab={VOCAB}")
    if composed.model.get("parametrisation") not in (None, "standard") and composed.model.get("base") is None:
        more += base
    if more:
        composed = compose_requested_model(arguments.model, [*overrides, *more], arguments)
    return check_model(composed.model, composed.sources)


def _rate(text: str) -> float:
    try:
        if 0 < (rate := float(text)) < 1:
            return rate
    except ValueError:
        pass
    raise ArgumentTypeError(f"must be a learning rate above 0 and below 1, but is {shown(text)}")


def _percent(text: str) -> float:
    try:
        if 0 <= (percent := float(text)) < math.inf:
            return percent
    except ValueError:
        pass
    raise ArgumentTypeError(f"must be a percentage of at least 0, but is {shown(text)}")


def _number(text: str) -> int:
    """Parse a number above 0 such as 65M or 65,000,000, as an argparse type. Raises ArgumentTypeError."""
    from tfm_blocks.config.settings import read_amount

    number = read_amount(text)
    if not number:
        raise ArgumentTypeError(f"must be a number above 0 such as 65M or 65000000, but is {shown(text)}")
    return number


def _solve(arguments: Namespace) -> None:
    from tfm_blocks.report.screen import print_json
    from tfm_blocks.sweep.solve import BUDGETS, solve

    name, number = next((name, vars(arguments)[name]) for name in BUDGET_OPTIONS if vars(arguments)[name] is not None)
    budget = BUDGETS[name]
    knobs = list(dict.fromkeys(word for word in arguments.overrides if "=" not in word))
    overrides = [word for word in arguments.overrides if "=" in word]
    if not knobs:
        raise config_error("KNOB", "there is no knob to solve for", "tfm solve MODEL d_ff --like base …")
    if number and arguments.like:
        raise config_error("--like", f"cannot be combined with the number {number:,}", "leave one of them out")
    composed = compose_requested_model(arguments.model, overrides, arguments, learn=True)
    requested = number or _cost_of_reference(arguments, overrides, budget)
    within = budget.within if arguments.within is None else arguments.within / 100
    solution = solve(composed, knobs, budget, requested, within)
    values = [f"{knob}={value}" for knob, value in solution.values.items()]
    folder = options.config_dir_words(arguments)
    words = ["show", *folder, *(f"--plugins={module}" for module in arguments.plugins), arguments.model]
    if not Path(arguments.model).suffix:  # a model file at a path cannot be trained
        words = ["train", *folder, f"model={arguments.model}", *options.plugin_words(arguments)]
    command = shlex.join(["tfm", *words, *overrides, *values])
    if arguments.json:
        sizes = {"requested": solution.requested, "reached": solution.reached}
        print_json({"values": dict(solution.values), "unit": budget.unit, **sizes, "command": command})
        return
    for line in values:
        print_line(line)
    print_line(
        f"{solution.requested:,} {budget.unit} requested, {solution.reached:,} reached ({solution.difference:+.2%})"
    )
    print_line(command)


def _cost_of_reference(arguments: Namespace, overrides: list[str], budget: Budget) -> int:
    """Return the cost of the model of --like, which has the same data and experiment. Raises ConfigError."""
    from tfm_blocks.compose.command_line import keep_last
    from tfm_blocks.compose.model import sets_run
    from tfm_blocks.sweep.solve import measure_cost

    if not arguments.like:
        rule = f"the budget needs a reference model or a number of {budget.unit}"
        raise config_error("--like", rule, "add --like base, or a number such as --parameters 65M")
    model, *changes = arguments.like
    shared = [text for text in overrides if sets_run([text])]
    replaced = {text.partition("=")[0] for text in changes}
    kept = [text for text in shared if text.partition("=")[0] not in replaced]
    return measure_cost(compose_requested_model(model, [*kept, *keep_last(changes)], arguments, learn=True), budget)
