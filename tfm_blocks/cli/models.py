"""Commands on models: check, show, blocks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli.options import add_plugins

if TYPE_CHECKING:
    from tfm_blocks.cli.options import Commands
    from tfm_blocks.compose.resolve import Composed


def add_commands(commands: Commands) -> None:
    """The parsers of these commands."""
    for name, run, text in (
        ("check", _check, "check a model without allocating it"),
        ("show", _show, "the nodes of a model, with shapes and parameters"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("model", metavar="MODEL", help="a name under conf/model/, or a path to a YAML file")
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="heads=4, model.add_norm=pre")
        command.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder of yours with a model/ in it")
        add_plugins(command)
        command.set_defaults(run=run)
    blocks = commands.add_parser("blocks", help="the registered blocks", description="the registered blocks")
    blocks.add_argument("name", nargs="?", metavar="NAME", help="all about one block")
    add_plugins(blocks)
    blocks.set_defaults(run=_blocks)


def _check(arguments: argparse.Namespace) -> None:
    from tfm_blocks.network.build import check_model

    composed = _composed(arguments)
    spec = check_model(composed.model, composed.sources)
    print(f"{arguments.model}: fine, {len(spec.nodes)} nodes")


def _show(arguments: argparse.Namespace) -> None:
    from tfm_blocks.network.build import check_model
    from tfm_blocks.report.show import show_model

    composed = _composed(arguments)
    show_model(check_model(composed.model, composed.sources), arguments.model)


def _composed(arguments: argparse.Namespace) -> Composed:
    from tfm_blocks.compose.model import compose_model
    from tfm_blocks.registry.plugins import load_plugins

    composed = compose_model(arguments.model, arguments.overrides, arguments.config_dir)
    load_plugins(arguments.plugins)
    return composed


def _blocks(arguments: argparse.Namespace) -> None:
    import tfm_blocks.blocks  # noqa: F401  registers them
    from tfm_blocks.registry.plugins import load_plugins
    from tfm_blocks.report.blocks import show_block, show_blocks

    load_plugins(arguments.plugins)
    if arguments.name:
        show_block(arguments.name)
    else:
        show_blocks()
