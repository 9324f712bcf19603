"""`tfm blocks`: the registry on the terminal."""

from __future__ import annotations

from rich.table import Table

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.report.block_facts import default_of, description, example, facts, type_of
from tfm_blocks.report.screen import screen
from tfm_blocks.report.table import Cell, Sheet, print_sheet


def show_blocks() -> None:
    """Print one line for each block."""
    table = Table("block", "signature", "source", box=None)
    for name in sorted(REGISTRY.blocks):
        info = REGISTRY.blocks[name]
        table.add_row(name, info.signature.text, info.source)
    screen().print(table)


def show_block(name: str) -> None:
    """Print the declaration of one block. Raises ConfigError for an unknown name."""
    info = REGISTRY.blocks.get(name)
    if info is None:
        raise ConfigError(
            Problem("block", f"no block is called {name!r}", help=REGISTRY.suggest(name, REGISTRY.blocks))
        )
    console = screen()
    console.print(f"{name}   {info.signature.text}\n")
    console.print(description(info))
    console.print()
    console.print(f"example: {example(info)}", soft_wrap=True)
    for label, text in facts(info):
        console.print(f"{label}: {text}")
    for rule, sentence in info.where.items():
        console.print(f"rule: {rule}: {sentence}")
    rows = [[Cell(one.name), Cell(type_of(one)), Cell(default_of(one))] for one in info.arguments.values()]
    if rows:
        print_sheet(console, Sheet("", ["argument", "type", "default"], rows, 3))
