"""`tfm blocks`: the registry as people read it."""

from __future__ import annotations

import inspect

from rich.markup import escape
from rich.table import Table

from tfm_blocks.errors import ConfigError, Problem, suggest
from tfm_blocks.registry.blocks import REGISTRY, Argument
from tfm_blocks.report.screen import screen


def show_blocks() -> None:
    """Prints one line a block."""
    table = Table("block", "signature", "source", box=None)
    for name in sorted(REGISTRY.blocks):
        info = REGISTRY.blocks[name]
        table.add_row(name, escape(info.signature.text), escape(info.source))
    screen().print(table)


def show_block(name: str) -> None:
    """Prints all that is known of one block. Raises ConfigError for an unknown name."""
    info = REGISTRY.blocks.get(name)
    if info is None:
        raise ConfigError(Problem("block", f"no block is called {name!r}", help=suggest(name, REGISTRY.blocks)))
    console = screen()
    console.print(f"{name}   {info.signature.text}\n", markup=False)
    console.print(inspect.getdoc(info.cls) or "", markup=False)
    console.print(f"\nsource: {info.source}", markup=False)
    for rule, sentence in info.where.items():
        console.print(f"rule: {rule}: {sentence}", markup=False)
    table = Table("argument", "type", "default")
    for argument in info.arguments.values():
        table.add_row(argument.name, str(argument.kind), _default(argument))
    if info.arguments:
        console.print(table)


def _default(argument: Argument) -> str:
    if argument.required:
        return "required"
    return "null" if argument.default is None else str(argument.default)
