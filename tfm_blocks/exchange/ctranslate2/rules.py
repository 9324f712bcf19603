"""Read a graph as an encoder and a decoder of CTranslate2, by the rules of table.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from tfm_blocks.errors import Problem, RunError, shown
from tfm_blocks.language.pairing import pattern
from tfm_blocks.language.parametrisation import expect_standard
from tfm_blocks.language.spec import TARGET, Node, Spec, Step, names
from tfm_blocks.registry.values import Part

TRAINING_ONLY = ("dropout", "droppath")
Refusal = tuple[str, str]
"""The address of a node and the rule that it breaks."""


@dataclass(frozen=True)
class EngineSide:
    """The encoder or the decoder: its nodes in order, each with its kind."""

    name: str
    kinds: tuple[tuple[str | None, Node], ...]

    def node(self, kind: str) -> Node | None:
        """Return the first node of a kind."""
        return next((node for name, node in self.kinds if name == kind), None)

    @property
    def nodes(self) -> list[Node]:
        return [node for _, node in self.kinds]

    @property
    def layers(self) -> list[dict[str, Node]]:
        """Return the nodes of each layer by kind; self-attention has the kind `self`."""
        layers: list[dict[str, Node]] = []
        for kind, node in self.kinds:
            if kind in ("attention", "causal attention"):
                layers.append({"self": node})
            elif kind in ("cross-attention", "ffn"):
                layers[-1][kind] = node
        return layers


@cache
def table() -> Mapping[str, Any]:
    """Return the content of table.yaml."""
    return yaml.safe_load((files("tfm_blocks.exchange.ctranslate2") / "table.yaml").read_text("utf-8"))  # type: ignore[no-any-return]


def read_engine_graph(spec: Spec, where: str) -> list[EngineSide]:
    """Return the encoder, if there is one, and the decoder of a graph. Raises RunError that names unsupported nodes.

    A pass runs only if the passes before it refuse nothing.
    """
    expect_standard(spec, "CTranslate2")
    encoder = [node for node in spec.nodes if node.sees == "nothing"]
    decoder = [node for node in spec.nodes if node.sees != "nothing"]
    parts = {"encoder": encoder, "decoder": decoder} if encoder else {"decoder without encoder": decoder}
    sides = [EngineSide(name, tuple((_kind(node), node) for node in nodes)) for name, nodes in parts.items()]
    for run_pass in (_inputs, _blocks, _structure, _values):
        refusals = dict.fromkeys((pattern(address), rule) for address, rule in run_pass(spec, sides))
        if refusals:
            begin = "the export to CTranslate2"
            raise RunError([Problem(f"{where}: {address}", f"{begin} {rule}") for address, rule in refusals])
    return sides


def norms_of(node: Node) -> list[Part]:
    """Return the norms of a node: its block, or the norms in its add & norm."""
    steps = [Part(step.block, step.arguments) for step in (*node.pre, *node.post) if step.kind == "norm"]
    if node.block and node.block in table()["kinds"]["norm"]:
        return [Part(node.block, node.arguments)]
    return steps


def placement(kind: str | None, node: Node) -> str | None:
    """Return the name of the node's add & norm in the table, or None."""
    around = [_kinds(node.pre), _kinds(node.post)]
    options = table()["add_norm"].get(kind, {})
    return next((name for name, steps in options.items() if steps == around), None)


def _kind(node: Node) -> str | None:
    if node.block is None:
        return "last"
    if node.block == "attention":
        causal = node.arguments["mask"] == "causal"
        return "cross-attention" if "kv" in node.reads else "causal attention" if causal else "attention"
    return next((kind for kind, blocks in table()["kinds"].items() if node.block in blocks), None)


def _inputs(spec: Spec, sides: Sequence[EngineSide]) -> Iterator[Refusal]:
    if len(spec.sources) > 1 or TARGET not in names(spec.inputs):
        rule = f"needs the input tgt and at most one source, but the inputs are {', '.join(names(spec.inputs))}"
        yield "inputs", rule


def _blocks(spec: Spec, sides: Sequence[EngineSide]) -> Iterator[Refusal]:
    """Yield the nodes whose block or quantisation is not supported."""
    for side in sides:
        for kind, node in side.kinds:
            if kind is None:
                yield node.address, f"does not cover the block {node.block}"
            if node.quantized:
                yield node.address, "does not cover model.quantize"


def _structure(spec: Spec, sides: Sequence[EngineSide]) -> Iterator[Refusal]:
    memory = sides[0].nodes[-1].address if sides[0].name == "encoder" else ""
    for side in sides:
        yield from _order(side)
        for before, node in zip([None, *side.nodes], side.nodes, strict=False):
            first, *others = node.reads.items()
            if before and (first[1] != (before.address,) or (node.post and node.residual != before.address)):
                yield node.address, f"connects a node only to the node before, which is {pattern(before.address)}"
            for port, addresses in others:
                if (port, addresses) != ("kv", (memory,)):
                    read = ", ".join(map(pattern, addresses))
                    yield node.address, f"connects kv to the end of the encoder and no other port, but {port} is {read}"


def _values(spec: Spec, sides: Sequence[EngineSide]) -> Iterator[Refusal]:
    """Yield the nodes with unsupported arguments or operations, and the nodes that must be equal but differ."""
    for side in sides:
        for kind, node in side.kinds:
            assert kind
            yield from ((node.address, rule) for rule in (*_arguments(kind, node), *_add_norm(kind, node)))
        position = side.node("position")
        rotary = any(layer["self"].arguments["position"] for layer in side.layers)
        if rotary and position and position.block != "none":
            yield position.address, f"needs the block none if attention is rotary, but it is {position.block}"
        yield from _alike(side)
    norms = [(one, norm.block, norm.arguments.get("eps")) for one in spec.nodes for norm in norms_of(one)]
    for one, block, eps in norms:
        if (block, eps) != norms[0][1:]:
            texts = f"{block} with eps {eps}, and {norms[0][1]} with eps {norms[0][2]} at {norms[0][0].address}"
            yield one.address, f"needs the same norm in the whole model, but it is {texts}"


def _order(side: EngineSide) -> Iterator[Refusal]:
    """Yield the first node that must not follow the node before it."""
    order = table()["order"][side.name]
    before: str | None = "start"
    for kind, node in (*side.kinds, ("end", side.nodes[-1])):
        if kind not in order[before]:
            place = "at the start" if before == "start" else f"after the {before}"
            needed = " or ".join(order[before])
            yield node.address, f"needs {needed} {place} of the {side.name}, but there is {kind}"
            return
        before = kind


def _alike(side: EngineSide) -> Iterator[Refusal]:
    """Yield the nodes with a value that differs from the first node's."""
    first: dict[str, tuple[Any, Node]] = {}
    for kind, node in side.kinds:
        values = {**node.arguments, "block": node.block, "add & norm": placement(kind, node)}
        for name, kinds in table()["alike"].items():
            if kind in kinds:
                value, other = first.setdefault(name, (values[name], node))
                if value != values[name]:
                    texts = f"{_text(values[name])}, and {_text(value)} at {other.address}"
                    yield node.address, f"needs the same {name} in all layers of a side, but it is {texts}"


def _arguments(kind: str, node: Node) -> Iterator[str]:
    """Yield the rules that the arguments of a node and of its norms break."""
    parts = [Part(node.block, node.arguments)] if node.block else []
    for part in (*parts, *norms_of(node)):
        yield from _part(part)
    if kind == "cross-attention":
        yield from _allowed(node.arguments, table()["cross"])


def _add_norm(kind: str, node: Node) -> Iterator[str]:
    """Yield the rules that the operations around a block break."""
    for step in (*node.pre, *node.post):
        if step.kind == "add" and (step.value != 1 or step.per_channel):
            yield f"adds the residual without a factor, but the factor is {step.value:.6g}"
    if placement(kind, node) is None:
        before, after = (" → ".join(_kinds(steps)) or "nothing" for steps in (node.pre, node.post))
        options = " or ".join(table()["add_norm"][kind])
        yield f"covers the add & norm {options}, but the node has {before} before its block and {after} after it"


def _part(part: Part) -> Iterator[str]:
    """Yield the rules that the arguments of a block break, at any depth."""
    rules = table()["blocks"].get(part.block)
    if rules is None:
        yield f"does not cover the block {part.block}"
        return
    yield from _allowed(part.arguments, rules.get("only", {}))
    for value in part.arguments.values():
        if isinstance(value, Part) and value.block in table()["blocks"]:
            yield from _part(value)


def _allowed(arguments: Mapping[str, Any], only: Mapping[str, Any]) -> Iterator[str]:
    for name, (values, reason) in only.items():
        value = arguments[name].block if isinstance(arguments[name], Part) else arguments[name]
        if value not in values:
            yield f"needs {name}: {' or '.join(map(_text, values))} ({reason}), but it is {_text(value)}"


def _kinds(steps: Iterable[Step]) -> list[str]:
    return [step.kind for step in steps if step.kind not in TRAINING_ONLY]


def _text(value: Any) -> str:
    if isinstance(value, Part):
        return value.block
    return "null" if value is None else value if isinstance(value, str) else shown(value)
