"""The command tfm figure."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tfm_blocks.cli import options
from tfm_blocks.cli.models import add_model, read_model_or_run
from tfm_blocks.errors import ConfigError, print_warnings, printable
from tfm_blocks.figures.drawing import THEMES, Fold

if TYPE_CHECKING:
    from tfm_blocks.language.spec import Spec
    from tfm_blocks.registry.blocks import Registry

LARGE = 1.5  # scale of a figure of one node or layer


def add_commands(commands: options.Commands) -> None:
    """Add the parser of this command."""
    what = "draw a model or a run like figure 1 of Attention Is All You Need"
    command = add_model(commands, "figure", _figure, what, "MODEL|RUN")
    options.add_file(command, "write the figure to this file: .svg, .pdf, .png or .tex (TikZ)", required=True)
    add = command.add_argument
    what = "draw every layer (none), identical layers once (layers), or each stack as one box (stacks)"
    add("--fold", choices=get_args(Fold), default="layers", help=what)
    add("--of", default="", metavar="ADDRESS", help="draw only this node, layer or stack, such as encoder.0, enlarged")
    add("--theme", choices=list(THEMES), default="paper", help="colours (paper)")
    add("--shapes", action="store_true", help="write shapes on the arrows, such as B S 512")
    what = "write parameters and multiply-adds into the boxes, for one sentence of 32 tokens per input"
    add("--cost", action="store_true", help=what)


def _figure(arguments: argparse.Namespace) -> None:
    from tfm_blocks.figures.draw import Content
    from tfm_blocks.figures.figure import Style, expect_format, picture_of, write_figure

    expect_format(arguments.path)
    spec, registry = _spec(arguments)
    costs: dict[str, tuple[int, int]] = {}
    if arguments.cost:
        from tfm_blocks.language.sources import Sources
        from tfm_blocks.report.show import measure

        rows = measure(spec, Sources(), {}).rows
        costs = {row.node.address: (row.parameters, row.multiply_adds) for row in rows}
    content = Content(arguments.fold, arguments.of, arguments.shapes, costs)
    title = printable(" ".join([arguments.model, *arguments.overrides]))
    style = Style(THEMES[arguments.theme], title, LARGE if arguments.of else 1.0)
    write_figure(arguments.path, picture_of(spec, registry, content), style)


def _spec(arguments: argparse.Namespace) -> tuple[Spec, Registry]:
    """Return the model, checked without torch if it has shipped blocks, no adapters and no requested cost."""
    from tfm_blocks.registry.declarations import read_declarations

    declared = read_declarations()
    if not arguments.cost and not arguments.plugins:
        try:
            spec = _declared_spec(arguments, declared)
            if not spec.mapping.get("adapt"):  # which maps have adapters is known from the modules
                print_warnings(spec.warnings)
                return spec, declared
        except ConfigError:  # blocks of an installed plug-in, or an error: the full check knows both better
            pass
    from tfm_blocks.registry.blocks import REGISTRY

    spec, *_ = read_model_or_run(arguments.model, arguments.overrides, arguments)
    return spec, REGISTRY


def _declared_spec(arguments: argparse.Namespace, registry: Registry) -> Spec:
    """Return the model, checked without the pass on meta tensors. Raises ConfigError."""
    from tfm_blocks.language.check import check

    folder = Path(arguments.model)
    if folder.is_dir() and not arguments.overrides:
        from tfm_blocks.runs.records import read_saved_model

        return check(read_saved_model(folder).model, registry)
    from tfm_blocks.compose.model import compose_model

    composed = compose_model(arguments.model, arguments.overrides, arguments.config_dir)
    return check(composed.model, registry, composed.sources)
