"""Pass 4: check that no output position sees a later target token, and that the target can be decoded step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tfm_blocks.language.sources import Pass, Sources
from tfm_blocks.language.spec import TARGET, Axis, Input, Node
from tfm_blocks.language.tree import MODEL
from tfm_blocks.registry.blocks import Registry

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
        checked = tuple(self._node(node, seen) for node in nodes)
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
            readers = [node.address for node in nodes if nodes[index].address in (*node.read, node.residual)]
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
        for node in nodes:
            if any(isinstance(size, Axis) and size.joined and TARGET in size.inputs for size in node.shape):
                rule = f"concatenates {TARGET} with another sequence, which cannot be decoded token by token"
                self.report(node.path, rule, "let the target attend to it instead: {block: attention, kv: …}")
        sink = nodes[-1]
        rule = f"the last node must treat each position of {TARGET} separately, without add & norm"
        if not self._positionwise(sink) or axis not in sink.shape:
            self.report(sink.path, rule, "end the graph with an unembed")
        elif sink.pre or sink.post:
            self.report(sink.path, rule, f"write add_norm: none at {sink.address}, or leave the key out")
        culprit = next((node for node in nodes if node.sees == "all"), None)
        if sink.sees == "all" and culprit:
            rule = "an output position sees later target tokens, so the model would copy instead of predict"
            self.report(culprit.path, rule, "write mask: causal on it")

    def _node(self, node: Node, seen: dict[str, str]) -> Node:
        info = self.registry.blocks[node.block] if node.block else None
        widest = seen.get(node.residual, "nothing") if any(step.kind == "add" for step in node.post) else "nothing"
        for port, addresses in node.reads.items():
            sight = info.sight(port, node.reads, node.arguments) if info else "itself"
            for address in addresses:
                visible = seen.get(address, "nothing")
                reached = "all" if visible != "nothing" and sight == "all" else visible
                widest = max(widest, reached, key=_ORDER.__getitem__)
        seen[node.address] = widest
        return replace(node, sees=widest)  # type: ignore[arg-type]
