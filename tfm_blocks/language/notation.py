"""Texts of values, blocks, add & norm and references, close to what a model file says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tfm_blocks.language.outline import GraphNode, Outline, local_name
from tfm_blocks.language.spec import Step
from tfm_blocks.registry.blocks import Registry
from tfm_blocks.registry.values import Part


def write_value(value: Any, registry: Registry) -> str:
    """Write the value of an argument, such as `0.1`, `null` or `rotary(base=500000)`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Part):
        return write_part(value, registry)
    if isinstance(value, list):
        return f"[{', '.join(write_value(item, registry) for item in value)}]"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def write_part(part: Part, registry: Registry, hidden: Collection[str] = ()) -> str:
    """Write a block with the arguments that differ from their defaults, except for the `hidden` ones."""
    defaults = registry.blocks[part.block].arguments
    changed = [
        f"{name}={write_value(value, registry)}"
        for name, value in part.arguments.items()
        if name not in hidden and value != registry.complete(defaults[name].default)
    ]
    return f"{part.block}({', '.join(changed)})" if changed else part.block


def write_node(node: GraphNode, outline: Outline, hidden: Collection[str] = ()) -> str:
    """Write a node, such as `attention(heads=8)`, `6 layers of attn, ffn` or `sum of attn, ffn`."""
    graph = next(iter(outline.inner(node.address).values()), "")
    nodes = outline.graphs[graph] if graph else ()
    inner = ", ".join(local_name(address) for address in nodes if not outline.is_inline(address))
    if node.part is None:
        return f"{node.layers} layer{'s' * (node.layers > 1)} of {inner}"
    copies = f"{node.layers} × " if node.layers else ""
    part = write_part(node.part, outline.registry, hidden)
    return f"{part} of {copies}{inner}" if outline.joins_branches(node.address) else part


def write_add_norm(node: GraphNode, registry: Registry) -> str:
    """Write the operations around a block, which stands as `…`: `layernorm → … → dropout 0.1 → add`."""
    if not node.pre and not node.post:
        return "none"
    return " → ".join([*write_steps(node.pre, registry), "…", *write_steps(node.post, registry)])


def write_steps(steps: Sequence[Step], registry: Registry) -> list[str]:
    """Write each operation with its number, or with the arguments of its norm."""
    return [write_step(step, registry) for step in steps]


def write_step(step: Step, registry: Registry) -> str:
    """Write an operation of add & norm, such as `dropout 0.1`, `add` or `rmsnorm(eps=1e-06)`."""
    if step.kind == "norm":
        return write_part(Part(step.block, step.arguments), registry)
    if step.kind == "add" and step.value == 1:
        return "add"
    return f"{step.kind} {step.value:.12g}{' per channel' * step.per_channel}"


def write_references(references: Sequence[str], reader: str, outline: Outline) -> str:
    """Write what a port of the node `reader` reads; all layers of a stack are `encoder.*`."""
    stack = references[-1] if references else ""
    layers = outline.layer_graphs(stack)[:-1]
    if layers and list(references) == [*layers, stack]:
        return f"{stack}.*"
    return ", ".join(write_reference(reference, reader, outline) for reference in references) or "–"


def write_reference(reference: str, reader: str, outline: Outline) -> str:
    """Write a reference as the file of `reader` does: a node of the same graph by name, an inline node by its block."""
    inline = outline.nodes.get(reference)
    if inline and inline.part and outline.is_inline(reference):
        read = [write_references(addresses, reference, outline) for addresses in inline.reads.values()]
        return f"{write_part(inline.part, outline.registry)} of {', '.join(read)}"
    graph = reader.rpartition(".")[0]
    while graph and not reference.startswith(f"{graph}."):
        graph = graph.rpartition(".")[0]
    return reference.removeprefix(f"{graph}.")


def write_nodes(addresses: Sequence[str], layers: Mapping[str, int]) -> str:
    """Write alike nodes in one text: `encoder.*.attn` for all layers, `encoder.0-3.attn` for some.

    `layers` are the numbers of layers by the address of their stack.
    """
    columns = list(zip(*(address.split(".") for address in addresses), strict=True))
    count = 1
    parts: list[str] = []
    for column in columns:
        names = sorted(set(column), key=lambda name: (len(name), name))
        count *= len(names)
        outer = ".".join(addresses[0].split(".")[: len(parts)])
        parts.append(names[0] if len(names) == 1 else _write_layers([*map(int, names)], layers.get(outer, 0)))
    return ".".join(parts) if count == len(addresses) else ", ".join(addresses)


def _write_layers(numbers: Sequence[int], count: int) -> str:
    """Write layers as `*`, `0-3` or `0-3,5`."""
    if len(numbers) == count:
        return "*"
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges)
