"""The registry as text: descriptions, facts and arguments of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import yaml

from tfm_blocks.network.contract.case import HOSTS, guess
from tfm_blocks.registry.blocks import REGISTRY, BlockInfo
from tfm_blocks.registry.class_parameters import Argument
from tfm_blocks.report.complexity import COMPLEXITY, shortened
from tfm_blocks.report.docstring import split_fields

FIELDS = ("Also known as", "Use", "Cost", "Example")  # lines of the last paragraph of a docstring
FROM_MODEL = ("d_model", "d_ff", "heads", "vocab")  # arguments that `model.args` sets in most models


def description(info: BlockInfo) -> str:
    """Return the docstring without its fields."""
    return split_fields(info.description, FIELDS)[0]


def fields(info: BlockInfo) -> Mapping[str, str]:
    """Return the fields of the docstring, such as the other names of the block."""
    return split_fields(info.description, FIELDS)[1]


def facts(info: BlockInfo) -> Iterator[tuple[str, str]]:
    """Yield the other facts of a block, each with its label."""
    if kind := kind_of_block(info):
        yield "kind", kind
    if info.signature.loss:
        yield "second output", "a loss"
    if info.tieable:
        yield "can be tied", f"its parameter {info.tieable}"
    yield from ((name.lower(), text) for name, text in fields(info).items() if name != "Example")
    if cost := COMPLEXITY.get(info.name):
        layer, sequential, path = map(shortened, (cost.layer, cost.sequential, cost.path))
        yield "cost of n positions", f"{layer} multiply-adds, {sequential} sequential operations, longest path {path}"
    yield "source", info.source


def kind_of_block(info: BlockInfo) -> str:
    """Return the category of a block, or that add & norm stands around it."""
    return f"category {info.category}" if info.category else "branch" if info.branch else ""


def type_of(argument: Argument) -> str:
    """Return the type; of a category, also its blocks."""
    members = REGISTRY.members(argument.kind.category) if argument.kind.category else []
    return f"{argument.kind}: {' | '.join(members)}" if members else str(argument.kind)


def default_of(argument: Argument) -> str:
    """Return the default as YAML, or that there is none."""
    if argument.required:
        return "required"
    return "null" if argument.default is None else str(argument.default)


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
    ports = {port.name: "NODE" for port in others if not port.optional}
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
