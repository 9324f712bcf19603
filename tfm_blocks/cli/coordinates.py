"""`tfm coordinates`: the size of every node's output at several widths or depths, during a few training steps."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfm_blocks.cli import options
from tfm_blocks.cli.models import add_model, compose_requested_model
from tfm_blocks.errors import ConfigError, Problem, print_warnings, printable, shown

if TYPE_CHECKING:
    from tfm_blocks.language.spec import Spec

VOCAB = 256  # ids that the batch draws from, unless the command line sets vocab
EXAMPLE = "write two or more, such as d_model=64,128,256"
SEVERAL = re.compile(r"[^=]+=\d+(,\d+)+")


def add_commands(commands: options.Commands) -> None:
    """Add the parser of this command."""
    what = "measure how the outputs of a model's nodes grow with its width: KNOB=SMALL,…,LARGE"
    command = add_model(commands, "coordinates", _coordinates, what, "MODEL")
    add = command.add_argument
    add("--steps", type=options.count, default=5, metavar="N", help="training steps of each model (5)")
    add("--seeds", type=options.count, default=3, metavar="N", help="seeds of each width (3)")
    add("--batch", type=options.count, default=8, metavar="N", help="sequences of the batch (8)")
    add("--length", type=options.count, default=32, metavar="N", help="tokens of a sequence (32)")
    add("--rate", type=_rate, default=0.004, metavar="X", help="learning rate at the base (0.004)")
    what = "muon trains the matrices; AdamW the other weights (adamw)"
    add("--optimizer", choices=["adamw", "muon"], default="adamw", help=what)
    options.add_file(command, "also draw a figure: .svg, .pdf or .png")
    options.add_json(command)


def _coordinates(arguments: argparse.Namespace) -> int:
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
        raise ConfigError(Problem("--steps", rule, help="write --steps 5"))
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


def _specs(arguments: argparse.Namespace) -> tuple[str, dict[int, Spec]]:
    """Return the first knob with several values, and the model of each of its values. Raises ConfigError."""
    several = {key: values for key, values in map(_values, arguments.overrides) if len(values) > 1}
    if not several:
        raise ConfigError(Problem("KEY=VALUE", "no knob has several values", help=EXAMPLE))
    knob, widths = next(iter(several.items()))
    for key, values in several.items():
        if len(values) != len(widths) or len(set(values)) != len(values):
            rule = f"must have {len(widths)} different values, as many as {knob}, but has {','.join(map(str, values))}"
            raise ConfigError(Problem(key, rule, help="the values of several knobs are taken together, in order"))
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


def _spec(arguments: argparse.Namespace, overrides: Sequence[str], base: Sequence[str]) -> Spec:
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
    raise argparse.ArgumentTypeError(f"must be a learning rate above 0 and below 1, but is {shown(text)}")
