"""Check the `where` rules of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tfm_blocks.errors import Problem, shown
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node
from tfm_blocks.language.tree import MODEL
from tfm_blocks.registry.blocks import BlockInfo, Registry
from tfm_blocks.registry.expression import Number, evaluate, names_in, split_rule
from tfm_blocks.registry.signature import is_letter
from tfm_blocks.registry.values import Part

RuleValues = Mapping[str, Any]


def find_broken_rules(node: Node, info: BlockInfo, values: RuleValues, sources: Sources) -> Iterator[Problem]:
    """Yield a problem for each rule of the block that its axes and arguments break; rules without numbers hold."""
    for written, sentence in info.where.items():
        rule, *exception = split_rule(written)
        if any(values.get(name) is not None for name in exception):
            continue
        numbers = all(isinstance(values.get(name), int | float) for name in names_in(rule))
        if numbers and not _holds(rule, values):
            yield _problem(node, info, rule, sentence, values, sources)


def find_broken_part_rules(node: Node, registry: Registry, sources: Sources) -> Iterator[Problem]:
    """Yield the same for the blocks within the node: values of a category, and the norms of its add & norm."""
    for value in node.arguments.values():
        if isinstance(value, Part):
            yield from find_broken_rules(node, registry.blocks[value.block], value.arguments, sources)
    for step in (*node.pre, *node.post):
        if step.block:
            info = registry.blocks[step.block]
            width = {info.signature.ports[0].axes[-1]: step.width}
            yield from find_broken_rules(node, info, {**width, **step.arguments}, sources)


def _problem(node: Node, info: BlockInfo, rule: str, sentence: str, values: RuleValues, sources: Sources) -> Problem:
    names = names_in(rule)
    listed = [
        f"{name} = {shown(values[name])}" + (f" (the width of {node.entry})" if is_letter(name) else "")
        for name in names
    ]
    blame, help = None, f"choose values that satisfy {rule}"
    for name in names:
        if name in info.arguments:
            path = (*node.path, name)
            blame = path if path in sources.written or path in sources.overrides else (*MODEL, "args", name)
            fits = [value for value in range(1, 1025) if _holds(rule, {**values, name: value})]
            if fits and info.arguments[name].kind.name == "int":
                help = f"{name} can be {', '.join(map(str, fits[:8]))}{', …' if len(fits) > 8 else ''}"
    return sources.problem(node.path, f"{sentence} ({rule}), but {', '.join(listed)}", blame=blame, help=help)


def _holds(rule: str, values: RuleValues) -> bool:
    def lookup(name: str) -> Number:
        value: Number = values[name]
        return value

    try:
        return bool(evaluate(rule, lookup))
    except ValueError:
        return False
