"""DeepNorm's constants, computed from the numbers of encoder and decoder layers.

Source: Wang et al. 2022, "DeepNet: Scaling Transformers to 1,000 Layers", table of section 4.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tfm_blocks.language.spec import Node


class Constants(NamedTuple):
    """alpha multiplies the residual, beta the initial weights of the branches."""

    alpha: float
    beta: float


def set_depths(nodes: Sequence[Node], stacks: Mapping[str, int]) -> tuple[Node, ...]:
    """Set the constants of the nodes that use the preset `deepnorm`."""
    decoding = {node.stack for node in nodes if node.sees != "nothing"}
    decoder = sum(count for address, count in stacks.items() if address in decoding)
    encoder = sum(stacks.values()) - decoder
    return tuple(
        _set_constants(node, deepnorm_constants(encoder, decoder, decoding=_is_decoding(node, decoding)))
        if node.deep
        else node
        for node in nodes
    )


def _is_decoding(node: Node, stacks: Collection[str]) -> bool:
    """Return True if the node is in the decoder; outside of all stacks, it is if it reads the target."""
    return node.stack in stacks if node.stack else node.sees != "nothing"


def deepnorm_constants(encoder: int, decoder: int, *, decoding: bool) -> Constants:
    """Compute the constants of the encoder or the decoder from the numbers of layers of both."""
    if not encoder or not decoder:
        depth = max(encoder, decoder, 1)
        return Constants((2 * depth) ** 0.25, (8 * depth) ** -0.25)
    if decoding:
        return Constants((3 * decoder) ** 0.25, (12 * decoder) ** -0.25)
    return Constants(0.81 * (encoder**4 * decoder) ** (1 / 16), 0.87 * (encoder**4 * decoder) ** (-1 / 16))


def _set_constants(node: Node, constants: Constants) -> Node:
    post = tuple(replace(step, value=constants.alpha) if step.kind == "add" else step for step in node.post)
    return replace(node, post=post, shrink=constants.beta)
