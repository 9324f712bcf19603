"""Run the passes of the checker. Each pass reports all its problems; the next pass runs only if there are none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tfm_blocks.errors import expect_none
from tfm_blocks.language.chain import Replacement
from tfm_blocks.language.expand import Expander
from tfm_blocks.language.parametrisation import parametrise
from tfm_blocks.language.read import Reader
from tfm_blocks.language.shapes import ShapeInference
from tfm_blocks.language.sources import Pass, Sources
from tfm_blocks.language.spec import TARGET, Axis, Input, Node, Spec
from tfm_blocks.language.tree import MODEL
from tfm_blocks.registry.blocks import Registry


def check(model: Mapping[str, Any], registry: Registry, sources: Sources | None = None) -> Spec:
    """Check a resolved mapping {inputs, args, add_norm, graph, …}. Raises ConfigError with all problems of a pass."""
    sources = sources or Sources()
    replacement = Replacement(registry, sources)
    if sources.files:
        model = replacement.clean(model, MODEL)
    reader = Reader(registry, sources)
    tree = reader.read_model(model)
    expect_none(reader.problems)
    expander = Expander(registry, sources)
    expander.expand_model(tree)
    expect_none(expander.problems)
    inputs = _assign_masks(tree.inputs)
    inference = ShapeInference(registry, sources, inputs)
    shaped = inference.infer(expander.nodes.values())
    inference.check_layers(expander.layers)
    expect_none(inference.problems)
    visibility = Visibility(registry, sources, inputs)
    nodes = visibility.infer(shaped)
    expect_none(visibility.problems)
    scaled = set_depths(nodes, expander.stacks)
    warnings, notes = tuple(expander.warnings), tuple(replacement.notes)
    spec = Spec(inputs, scaled, model, visibility.count_head(nodes), warnings, notes, entries=expander.entries)
    return parametrise(spec, lambda mapping: check(mapping, registry), sources)


def _assign_masks(inputs: Sequence[Input]) -> tuple[Input, ...]:
    """Attach to each sequence axis the input that defines its padding.

    This is the first input of token ids with that axis, otherwise the first input with it.
    """
    decides: dict[str, str] = {}
    for tensor in sorted(inputs, key=lambda tensor: not tensor.tokens):
        for axis in tensor.sequences:
            decides.setdefault(axis.name, tensor.name)
    return tuple(
        replace(
            tensor,
            shape=tuple(
                Axis(axis.name, (decides[axis.name],)) if isinstance(axis, Axis) and axis in tensor.sequences else axis
                for axis in tensor.shape
            ),
        )
        for tensor in inputs
    )


_ORDER = {"nothing": 0, "past": 1, "all": 2}


class Visibility(Pass):
    """Infer which part of the target each node sees, and collect `problems`."""

    def __init__(self, registry: Registry, sources: Sources, inputs: Sequence[Input]) -> None:
        super().__init__(registry, sources)
        self.target = next((tensor for tensor in inputs if tensor.name == TARGET), None)
        self.inputs = inputs

    def infer(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """Return the nodes with `sees` set. If there is a target, the sink must be position-wise and causal."""
        seen = {TARGET: "past"}
        checked = tuple(replace(node, sees=self.sight(node, seen)) for node in nodes)
        if self.target:
            self._check_target(self.target, checked)
        return checked

    def count_head(self, nodes: Sequence[Node]) -> int:
        """Count the nodes at the end that treat each position separately and read only the node before.

        Stochastic depth drops a branch for a whole sequence, which the head does not know.
        """
        count = 0
        for node in reversed(nodes):
            steps = {step.kind for step in (*node.pre, *node.post)}
            separable = self._positionwise(node) and node.residual == node.entry and "droppath" not in steps
            if not separable or (count and nodes[-count].read != (node.address,)):
                break
            count += 1
        for index in range(len(nodes) - count, len(nodes) - 1):
            readers = [node.address for node in nodes if nodes[index].address in node.dependencies]
            if len(set(readers)) > 1:
                return len(nodes) - 1 - index
        return count

    def _positionwise(self, node: Node) -> bool:
        info = self.registry.blocks[node.block] if node.block else None
        return info is not None and info.alone and len(node.read) == 1 and not node.stack

    def _check_target(self, target: Input, nodes: Sequence[Node]) -> None:
        if not target.tokens:
            rule = f"{TARGET} is predicted token by token, so it must hold token ids"
            self.report((*MODEL, "inputs", TARGET), rule, f"write {TARGET}: B T")
            return
        axis = target.shape[1]
        for tensor in self.inputs:
            if tensor.name != TARGET and axis in tensor.shape:
                rule = f"uses the axis of {TARGET}, whose tokens are predicted"
                self.report((*MODEL, "inputs", tensor.name), rule, "give it a separate axis")
        changed = [
            node.path
            for node in nodes
            if any(isinstance(size, Axis) and size.parts and TARGET in size.inputs for size in node.shape)
        ]
        if changed:
            rule = f"changes the positions of {TARGET}, which is decoded token by token"
            self.report(changed[0], rule, "let the target attend to other positions: {block: attention, kv: …}")
        sink = nodes[-1]
        rule = f"the last node must treat each position of {TARGET} separately, without add & norm"
        if not self._positionwise(sink) or axis not in sink.shape:
            self.report(sink.path, rule, "end the graph with an unembed")
        elif sink.pre or sink.post:
            self.report(sink.path, rule, f"write add_norm: none at {sink.address}, or leave the key out")
        if sink.sees == "all":
            leaking = {sink.address}
            for node in reversed(nodes):
                if node.address in leaking:
                    leaking.update(node.dependencies)
            culprit = next(node for node in nodes if node.sees == "all" and node.address in leaking)  # the first one
            rule = "an output position sees later target tokens, so the model would copy instead of predict"
            maskable = culprit.block and "mask" in self.registry.blocks[culprit.block].arguments
            help = f"{culprit.block} has no mask: remove it, or choose a block with mask: causal"
            self.report(culprit.path, rule, "write mask: causal on it" if maskable else help)

    def sight(self, node: Node, seen: dict[str, str]) -> Any:
        """Return what a node sees of the inputs in `seen`, and add it there."""
        info = self.registry.blocks[node.block] if node.block else None
        widest = seen.get(node.residual, "nothing") if any(step.kind == "add" for step in node.post) else "nothing"
        for port, addresses in node.reads.items():
            sight = info.sight(port, node.reads, node.arguments) if info else "itself"
            for address in addresses:
                visible = "nothing" if sight == "nothing" else seen.get(address, "nothing")
                reached = "all" if visible != "nothing" and sight == "all" else visible
                widest = max(widest, reached, key=_ORDER.__getitem__)
        seen[node.address] = widest
        return widest


def sight_of(spec: Spec, input: str, registry: Registry) -> str:
    """Return which positions of an input an output position sees: "all" if it sees later ones, "past" or "nothing"."""
    seen = {input: "past"}
    visibility = Visibility(registry, Sources(), spec.inputs)
    sights: list[str] = [visibility.sight(node, seen) for node in spec.nodes]
    return sights[-1]


def set_depths(nodes: Sequence[Node], stacks: Mapping[str, int]) -> tuple[Node, ...]:
    """Set the constants of the nodes that use the preset `deepnorm`.

    DeepNet has one encoder and one decoder. The layers of several encoders, parallel ones included, are summed, because
    the decoder receives the updates of all of them. The layers of several decoders are summed, too.
    """
    decoding = {node.stack for node in nodes if node.sees != "nothing"}
    decoder = sum(count for address, count in stacks.items() if address in decoding)
    encoder = sum(stacks.values()) - decoder
    scaled = []
    for node in nodes:
        if node.deep:
            # outside of all stacks, a node is in the decoder if it reads the target
            is_decoder = node.stack in decoding if node.stack else node.sees != "nothing"
            alpha, beta = deepnorm_constants(encoder, decoder, decoding=is_decoder)
            post = tuple(replace(step, value=alpha) if step.kind == "add" else step for step in node.post)
            node = replace(node, post=post, shrink=beta)
        scaled.append(node)
    return tuple(scaled)


def deepnorm_constants(encoder: int, decoder: int, *, decoding: bool) -> tuple[float, float]:
    """Compute alpha, which multiplies the residual, and beta, which multiplies the initial weights of the branches.

    They depend on the numbers of encoder and decoder layers (Wang et al. 2022, "DeepNet: Scaling Transformers to 1,000
    Layers", table of section 4).
    """
    if not encoder or not decoder:
        depth = max(encoder, decoder, 1)
        return (2 * depth) ** 0.25, (8 * depth) ** -0.25
    if decoding:
        return (3 * decoder) ** 0.25, (12 * decoder) ** -0.25
    return 0.81 * (encoder**4 * decoder) ** (1 / 16), 0.87 * (encoder**4 * decoder) ** (-1 / 16)
