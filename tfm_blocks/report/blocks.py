"""The registry for readers: facts of blocks, the page docs/blocks.md, and `tfm blocks` on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import yaml

from tfm_blocks.errors import config_error
from tfm_blocks.network.contract.case import HOSTS, guess
from tfm_blocks.registry.blocks import REGISTRY, BlockInfo
from tfm_blocks.registry.signature import Argument
from tfm_blocks.report.probes import split_fields
from tfm_blocks.report.screen import print_table, screen
from tfm_blocks.report.show import COMPLEXITY, shortened
from tfm_blocks.report.table import Table, markdown, texts

FIELDS = ("Also known as", "Use", "Cost", "Example")  # lines of the last paragraph of a docstring
FROM_MODEL = ("d_model", "d_ff", "heads", "vocab")  # arguments that `model.args` sets in most models
PAGE = """\
# The blocks

This page lists every block that a model file can name, by category. `tfm blocks --markdown` makes it from the registry.
`tfm blocks NAME` prints one block. [language.md](language.md#inputs-and-axes) explains the axes.

Attention, recurrences, convolutions and feed-forward networks are branches: [add & norm](language.md#add--norm)
surrounds them. Blocks of a category, such as `norm`, are used as arguments of other blocks or in `args`.
In examples, `node` is a name of yours, and `args` below `model` give the width, the heads and the vocabulary.
Costs are multiply-adds of matrix products; elementwise operations do not count. d is the width."""
TITLES = {
    "attention": "Attention",
    "sequence": "Recurrences and convolutions",
    "position-wise": "Feed-forward networks and experts",
    "node": "Embeddings, maps and other nodes",
}
ARGUMENT = ("argument", "type", "default")
FIGURES = {  # of blocks: the model in tests/models whose two layers docs/generate.py draws, and the caption
    "mamba": ("mamba", "Mamba in the place of self-attention"),
    "rg_lru": ("griffin", "The recurrent layers of Griffin"),
    "rwkv7": ("rwkv7_values", "RWKV-7, whose later layers mix their values with the values of the first"),
    "read_streams": ("hyper_connections", "Hyper-connections: each branch reads all streams and writes to all"),
    "shared_attention": ("value_residual", "Values of each layer, mixed with the values of the first"),
}
FEWEST = 3  # equal arguments for which a reference replaces the rows


def description(info: BlockInfo) -> str:
    """Return the docstring without its fields."""
    return split_fields(info.description, FIELDS)[0]


def fields(info: BlockInfo) -> Mapping[str, str]:
    """Return the fields of the docstring, such as the other names of the block."""
    return split_fields(info.description, FIELDS)[1]


def facts(info: BlockInfo) -> Iterator[tuple[str, str]]:
    """Yield the other facts of a block, each with its label."""
    if info.category or info.branch:
        yield "kind", f"category {info.category}" if info.category else "branch"
    if info.signature.loss:
        yield "second output", "a loss"
    if info.tieable:
        yield "can be tied", f"its parameter {info.tieable}"
    yield from ((name.lower(), text) for name, text in fields(info).items() if name != "Example")
    if cost := COMPLEXITY.get(info.name):
        layer, sequential, path = map(shortened, cost)
        yield "cost of n positions", f"{layer} multiply-adds, {sequential} sequential operations, longest path {path}"
    elif info.shipped and "Cost" not in fields(info):
        yield "cost", "no matrix products"
    yield "source", info.source


def example(info: BlockInfo) -> str:
    """Return a node or an argument of a model file that uses the block."""
    values = _values(info)
    node = {"block": info.name, **values}
    value = node if values else info.name
    if info.category == "norm":
        return _flow({"args": {"norm": value}})
    if info.category == "join":
        return _flow({"join": value, "parallel": {"a": {"block": "attention"}, "b": {"block": "ffn"}}})
    if info.category in HOSTS:
        host = REGISTRY.blocks[HOSTS[info.category]]
        return _flow({"node": {"block": host.name, **_values(host), info.category: value}})
    first, *others = info.signature.ports
    first_port = {"in": ["NODE", "OTHER"]} if first.many and "in" not in values else {}
    ports = {port.name: "src" if port.ids else "NODE" for port in others if not port.optional}
    return _flow({"node": {**node, **first_port, **ports}})


def _values(info: BlockInfo) -> dict[str, object]:
    """Return values for the required arguments that models do not set in `args`: the docstring's, or else guesses."""
    required = [
        argument for argument in info.arguments.values() if argument.required and argument.name not in FROM_MODEL
    ]
    written: dict[str, object] = yaml.safe_load(f"{{{fields(info).get('Example', '')}}}")
    return {argument.name: guess(info, argument) for argument in required} | written


def _flow(mapping: object) -> str:
    text = yaml.safe_dump(mapping, default_flow_style=True, sort_keys=False, width=1000).strip()
    return text.removeprefix("{").removesuffix("}")


def blocks_page(blocks: Iterable[BlockInfo]) -> str:
    """Return the page: a table of all blocks, then the blocks of each section."""
    ordered = sorted(blocks, key=lambda info: info.name)
    names = [*TITLES, *sorted({info.category for info in ordered if info.category})]
    sections = {name: [info for info in ordered if _section(info) == name] for name in names}
    rows = [
        [_title(name), f"[{info.name}](#{info.name})", fields(info).get("Also known as", "").rstrip(".")]
        for name, members in sections.items()
        for info in members
    ]
    parts = [PAGE, markdown(Table("", texts("category", "block", "also known as"), rows))]
    for name, members in sections.items():
        parts += [f"## {_title(name)}", *map(_entry, members)] if members else []
    return "\n\n".join(parts) + "\n"


def _section(info: BlockInfo) -> str:
    if info.category:
        return info.category
    if not info.branch:
        return "node"
    if hasattr(info.cls, "weights"):
        return "attention"
    return "sequence" if info.mixes_positions else "position-wise"


def _title(name: str) -> str:
    return TITLES.get(name, f"Category {name}")


def _entry(info: BlockInfo) -> str:
    base = _base(info)
    rules = [f"- rule: {rule}: {text}" for rule, text in info.where.items() if not base or rule not in base.where]
    lines = [*(f"- {label}: {text}" for label, text in facts(info)), *rules]
    model, caption = FIGURES.get(info.name, ("", ""))
    parts = [
        f"### {info.name}",
        f"`{info.signature.text}`",
        description(info),
        f"![{caption}](figures/{model}.svg)" if model else "",
        f"    {example(info)}",
        "\n".join(lines),
    ]
    return "\n\n".join(part for part in (*parts, *_arguments(info, base)) if part)


def _base(info: BlockInfo) -> BlockInfo | None:
    """Return a registered base class, or an earlier block of the module, with at least FEWEST equal arguments."""
    blocks = {entry.cls: entry for entry in REGISTRY.blocks.values()}
    bases = [blocks[cls] for cls in info.cls.__mro__[1:] if cls in blocks]
    peers = [entry for entry in blocks.values() if entry.cls.__module__ == info.cls.__module__]
    bases += peers[: peers.index(info)]
    return next((base for base in bases if len(_shared(info, base)) >= FEWEST), None)


def _shared(info: BlockInfo, base: BlockInfo | None) -> list[str]:
    return [name for name, one in info.arguments.items() if base and base.arguments.get(name) == one]


def _arguments(info: BlockInfo, base: BlockInfo | None) -> Iterator[str]:
    inherited = _shared(info, base)
    if base:
        names = ", ".join(f"`{name}`" for name in inherited)
        yield f"It has these arguments of [{base.name}](#{base.name}): {names}."
    rows = _argument_rows(argument for argument in info.arguments.values() if argument.name not in inherited)
    if rows:
        yield markdown(Table("", texts(*ARGUMENT), rows))


def _argument_rows(arguments: Iterable[Argument]) -> list[list[str]]:
    """Return the name, the type and the default of each argument; of a category, the type lists its blocks."""
    rows = []
    for argument in arguments:
        members = REGISTRY.members(argument.kind.category) if argument.kind.category else []
        kind = f"{argument.kind}: {' | '.join(members)}" if members else str(argument.kind)
        default = argument.default
        text = str(default).lower() if isinstance(default, bool) else "null" if default is None else str(default)
        rows.append([argument.name, kind, "required" if argument.required else text])
    return rows


def show_blocks() -> None:
    """Print one line for each block."""
    rows = [[name, info.signature.text, info.source] for name, info in sorted(REGISTRY.blocks.items())]
    print_table(Table("", texts("block", "signature", "source"), rows))


def show_block(name: str) -> None:
    """Print the declaration of one block. Raises ConfigError for an unknown name."""
    info = REGISTRY.blocks.get(name)
    if info is None:
        raise config_error("block", f"no block is called {name!r}", REGISTRY.suggest(name, REGISTRY.blocks))
    console = screen()
    console.print(f"{name}   {info.signature.text}\n\n{description(info)}\n")
    console.print(f"example: {example(info)}", soft_wrap=True)
    for label, text in (*facts(info), *(("rule", f"{rule}: {sentence}") for rule, sentence in info.where.items())):
        console.print(f"{label}: {text}")
    if info.arguments:
        print_table(Table("", texts(*ARGUMENT), _argument_rows(info.arguments.values())))
