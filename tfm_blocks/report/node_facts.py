"""Everything that the page of a model says about a node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfm_blocks.language.outline import Outline, write_add_norm, write_references, write_steps, write_value
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node, Path, Spec, format_shape
from tfm_blocks.language.tree import ENTRY
from tfm_blocks.registry.blocks import REGISTRY, BlockInfo

Row = tuple[str, str, str]


@dataclass(frozen=True)
class NodeFacts:
    """The facts of a node, which alike layers share.

    `arguments` are rows of a name, a value and the place that set it. `reads` are rows of a port, a reference and a
    shape. `lines` are rows of a file, a line number and the lines that write the node there.
    """

    block: str
    path: str
    shape: str
    add_norm: str
    weights: str
    parameters: int
    multiply_adds: int
    arguments: tuple[Row, ...]
    reads: tuple[Row, ...]
    lines: tuple[Row, ...]


def facts_of(spec: Spec, sources: Sources, costs: Mapping[str, tuple[int, int]]) -> dict[str, NodeFacts]:
    """Return the facts of each node by address. `costs` are its parameters and multiply-adds."""
    outline = Outline(spec, REGISTRY)
    files = sources.by_file()
    shapes = {model_input.name: format_shape(model_input.shape) for model_input in spec.inputs}
    shapes |= {node.address: format_shape(node.shape) for node in spec.nodes}
    return {node.address: _facts(node, outline, sources, files, shapes, costs[node.address]) for node in spec.nodes}


def _facts(
    node: Node,
    outline: Outline,
    sources: Sources,
    files: Sequence[Sources],
    shapes: Mapping[str, str],
    costs: tuple[int, int],
) -> NodeFacts:
    info = REGISTRY.blocks[node.block] if node.block else None
    return NodeFacts(
        block=node.block or "",
        path=".".join(node.path),
        shape=shapes[node.address],
        add_norm=_add_norm(node, outline),
        weights=f"of {node.owner}" if node.shares else f"tied to {node.tie}" if node.tie else "",
        parameters=costs[0],
        multiply_adds=costs[1],
        arguments=tuple(_arguments(node, info, sources)) if info else (),
        reads=tuple(_reads(node, outline, shapes)),
        lines=tuple(
            (place.file, str(place.line), file.excerpt(node.path))
            for file in files
            if node.path in file.written
            for place in [file.written[node.path].place]
        ),
    )


def _add_norm(node: Node, outline: Outline) -> str:
    if node.address in outline.nodes:
        return write_add_norm(outline.nodes[node.address], REGISTRY)
    return " → ".join(write_steps(node.post, REGISTRY))


def _arguments(node: Node, info: BlockInfo, sources: Sources) -> Iterator[Row]:
    for name in info.arguments:
        yield name, write_value(node.arguments.get(name), REGISTRY), _origin(node.path, name, sources)


def _origin(path: Path, name: str, sources: Sources) -> str:
    """Return the command-line override, or the file and line, that set an argument of the node at `path`."""
    scopes = [(*path[:end], "args", name) for end in range(len(path), 0, -1)]
    for place in ((*path, name), *scopes):
        setting = _setting(place, sources)
        knob = sources.knob(place)
        if setting:
            return f"{setting}; {knob}: {_setting((knob,), sources)}" if knob else setting
    return "default of the block" if sources.files else ""


def _setting(path: Path, sources: Sources) -> str:
    """Return what sets a value, directly or as a part of a mapping on the command line; "" if nothing does."""
    above = (path[:end] for end in range(len(path), 0, -1))
    override = next((sources.overrides[prefix] for prefix in above if prefix in sources.overrides), "")
    if override or path not in sources.written:
        return override and f"command line: {override}"
    place = sources.written[path].place
    return f"{place.file}:{place.line}"


def _previous_layer(layer: str) -> str:
    """Return the reference to the layer before a layer; "" for the first layer and for other graphs."""
    stack, _, index = layer.rpartition(".")
    return f"{stack}.{int(index) - 1}" if index.isdigit() and int(index) else ""


def _reads(node: Node, outline: Outline, shapes: Mapping[str, str]) -> Iterator[Row]:
    written = outline.nodes[node.address].reads if node.address in outline.nodes else {}
    for port, addresses in node.reads.items():
        first = port == next(iter(node.reads))
        references = written.get("in" if first else port, addresses)
        layer = node.address.rpartition(".")[0]
        text = ENTRY if references == (_previous_layer(layer),) else write_references(references, node.address, outline)
        yield "in" if first else port, text, shapes[addresses[0]]
