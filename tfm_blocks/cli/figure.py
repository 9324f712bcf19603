"""The command tfm figure."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tfm_blocks.cli.models import add_model, checked_model, trained_model
from tfm_blocks.errors import ConfigError, print_warnings
from tfm_blocks.figures.draw import Fold
from tfm_blocks.figures.themes import THEMES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tfm_blocks.cli.options import Commands
    from tfm_blocks.figures.draw import Cost
    from tfm_blocks.language.spec import Spec
    from tfm_blocks.registry.blocks import Registry

LARGE = 1.5  # scale of a figure of one node or layer


def add_commands(commands: Commands) -> None:
    """Add the parser of this command."""
    text = "draw a model or a run like figure 1 of its paper"
    command = commands.add_parser("figure", help=text, description=text)
    add_model(command, run_too=True)
    help = "write the figure to this file: .svg, .pdf, .png or .tex (TikZ)"
    command.add_argument("-o", type=Path, dest="path", metavar="FILE", required=True, help=help)
    help = "draw every layer (none), alike layers once (layers), or each stack as one box (stacks)"
    command.add_argument("--fold", choices=get_args(Fold), default="layers", help=help)
    help = "draw only this node, layer or stack, such as encoder.0; larger"
    command.add_argument("--of", default="", metavar="ADDRESS", help=help)
    command.add_argument("--theme", choices=list(THEMES), default="paper", help="colours (paper)")
    command.add_argument("--shapes", action="store_true", help="write shapes on the arrows, such as B S 512")
    help = "write parameters and multiply-adds into the boxes, for one row of 32 tokens of each input"
    command.add_argument("--cost", action="store_true", help=help)
    command.set_defaults(run=_figure)


def _figure(arguments: argparse.Namespace) -> None:
    from tfm_blocks.figures.draw import Content
    from tfm_blocks.figures.figure import Style, expect_format, picture_of, write_figure

    expect_format(arguments.path)
    spec, registry = _spec(arguments)
    costs = _costs(spec) if arguments.cost else {}
    content = Content(arguments.fold, arguments.of, arguments.shapes, costs)
    title = f"{arguments.model} {' '.join(arguments.overrides)}".strip()
    style = Style(THEMES[arguments.theme], title, LARGE if arguments.of else 1.0)
    write_figure(arguments.path, picture_of(spec, registry, content), style)


def _spec(arguments: argparse.Namespace) -> tuple[Spec, Registry]:
    """Return the model, checked without torch if it has shipped blocks only and no cost is requested."""
    from tfm_blocks.registry.declarations import read_declarations

    declared = read_declarations()
    if not arguments.cost and not arguments.plugins:
        try:
            spec = _declared_spec(arguments, declared)
            print_warnings(spec.warnings)
            return spec, declared
        except ConfigError:  # blocks of an installed plug-in, or an error: the full check knows both better
            pass
    from tfm_blocks.registry.blocks import REGISTRY

    folder = Path(arguments.model)
    spec, _ = trained_model(arguments, folder) if folder.is_dir() else checked_model(arguments)
    return spec, REGISTRY


def _declared_spec(arguments: argparse.Namespace, registry: Registry) -> Spec:
    """Return the model, checked without the pass on meta tensors. Raises ConfigError."""
    from tfm_blocks.language.check import check

    folder = Path(arguments.model)
    if folder.is_dir() and not arguments.overrides:
        from tfm_blocks.runs.model_file import FORMAT, read_model_record

        record = read_model_record(folder, arguments.plugins)
        return check(record["model"] if record["format"] == FORMAT else {}, registry)
    from tfm_blocks.compose.model import compose_model

    composed = compose_model(arguments.model, arguments.overrides, arguments.config_dir)
    return check(composed.model, registry, composed.sources)


def _costs(spec: Spec) -> Mapping[str, Cost]:
    from tfm_blocks.figures.draw import Cost
    from tfm_blocks.report.show import node_costs

    return {address: Cost(*numbers) for address, numbers in node_costs(spec).items()}
