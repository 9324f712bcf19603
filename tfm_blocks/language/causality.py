"""Pass 4: no output position sees a later target token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tfm_blocks.errors import Problem
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node
from tfm_blocks.registry.blocks import Registry

TARGET = "tgt"
_ORDER = {"nothing": 0, "past": 1, "all": 2}


class Sight:
    """Gives nodes what they see of the target and collects `problems`."""

    def __init__(self, registry: Registry, sources: Sources) -> None:
        self.registry = registry
        self.sources = sources
        self.problems: list[Problem] = []

    def nodes(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """The nodes with `sees` filled in. The sink must be position-wise and see the past only."""
        seen = {TARGET: "past"}
        done = [self._node(node, seen) for node in nodes]
        sink = done[-1]
        if sink.block is None or not self.registry.blocks[sink.block].positionwise or sink.pre or sink.post:
            rule = "the last node must treat each position by itself, without add & norm"
            self._problem(sink, rule, "end the graph with an unembed")
        culprits = [node for node in done if node.sees == "all"]
        if sink.sees == "all":
            rule = "here an output position sees later target tokens, so that the model would copy instead of predict"
            self._problem(culprits[0], rule, "write mask: causal on it")
        return tuple(done)

    def _node(self, node: Node, seen: dict[str, str]) -> Node:
        info = self.registry.blocks[node.block] if node.block else None
        best = "nothing"
        for port, address in node.reads.items():
            of_input = seen.get(address, "nothing")
            sight = info.sight(port, node.reads, node.arguments) if info else "itself"
            reached = "all" if of_input != "nothing" and sight == "all" else of_input
            best = max(best, reached, key=_ORDER.__getitem__)
        seen[node.address] = best
        return replace(node, sees=best)  # type: ignore[arg-type]

    def _problem(self, node: Node, rule: str, help: str) -> None:
        self.problems.append(self.sources.problem(node.path, rule, help=help))
