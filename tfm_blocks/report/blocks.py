"""`tfm blocks`: the registry as people read it, on the screen and as docs/blocks.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.registry.blocks import REGISTRY, Argument, BlockInfo
from tfm_blocks.report.screen import screen
from tfm_blocks.report.table import Cell, Sheet, print_sheet

PAGE = """\
# The blocks

Every block that a model file can name, as `tfm blocks --markdown` writes it from the registry; `tfm blocks NAME` shows
one on the screen. [language.md](language.md) says how to read the axes."""


def show_blocks() -> None:
    """Prints one line a block."""
    table = Table("block", "signature", "source", box=None)
    for name in sorted(REGISTRY.blocks):
        info = REGISTRY.blocks[name]
        table.add_row(name, info.signature.text, info.description if info.alias_of else info.source)
    screen().print(table)


def show_block(name: str) -> None:
    """Prints all that is known of one block. Raises ConfigError for an unknown name."""
    info = REGISTRY.blocks.get(name)
    if info is None:
        raise ConfigError(
            Problem("block", f"no block is called {name!r}", help=REGISTRY.suggest(name, REGISTRY.blocks))
        )
    console = screen()
    console.print(f"{name}   {info.signature.text}\n")
    console.print(info.description)
    console.print()
    for label, text in _facts(info):
        console.print(f"{label}: {text}")
    rows = [[Cell(one.name), Cell(_type(one)), Cell(_default(one))] for one in info.arguments.values()]
    if rows:
        print_sheet(console, Sheet("", ["argument", "type", "default"], rows, 3))


def markdown(blocks: Iterable[BlockInfo]) -> str:
    """A page with a heading for each block, sorted by name, under a table of all of them."""
    found = sorted(blocks, key=lambda info: info.name)
    rows = [f"| [{info.name}](#{info.name}) | `{info.signature.text}` | {_kind(info)} |" for info in found]
    table = "\n".join(["| block | axes | kind |", "|---|---|---|", *rows])
    return "\n\n".join([PAGE, table, *map(_section, found)]) + "\n"


def _section(info: BlockInfo) -> str:
    facts = "\n".join(f"- {label}: {text}" for label, text in _facts(info))
    parts = [f"## {info.name}", f"`{info.signature.text}`", info.description, facts]
    if info.arguments:
        rows = [f"| {one.name} | {_cell(_type(one))} | {_default(one)} |" for one in info.arguments.values()]
        parts.append("\n".join(["| argument | type | default |", "|---|---|---|", *rows]))
    return "\n\n".join(part for part in parts if part)


def _facts(info: BlockInfo) -> Iterator[tuple[str, str]]:
    """What is known of a block beside its formula and arguments, each with its label."""
    if _kind(info):
        yield "kind", _kind(info)
    if info.alias_of:
        return
    if info.signature.loss:
        yield "second output", "a loss"
    if info.tieable:
        yield "can be tied", f"its parameter {info.tieable}"
    for rule, sentence in info.where.items():
        yield "rule", f"{rule}: {sentence}"
    yield "source", info.source


def _kind(info: BlockInfo) -> str:
    """An alias, the category whose value it can be, or that add & norm stands around it."""
    if info.alias_of:
        return f"alias of {info.alias_of}"
    return f"category {info.category}" if info.category else "branch" if info.branch else ""


def _type(argument: Argument) -> str:
    """The type; of a category, which blocks it has."""
    members = REGISTRY.members(argument.kind.category) if argument.kind.category else []
    return f"{argument.kind}: {' | '.join(members)}" if members else str(argument.kind)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(argument: Argument) -> str:
    if argument.required:
        return "required"
    return "null" if argument.default is None else str(argument.default)
