"""DeepNorm's constants, computed from the numbers of encoder and decoder layers.

Source: Wang et al. 2022, "DeepNet: Scaling Transformers to 1,000 Layers", table of section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    scaled = []
    for node in nodes:
        if node.deep:
            # outside of all stacks, a node is in the decoder if it reads the target
            is_decoder = node.stack in decoding if node.stack else node.sees != "nothing"
            constants = deepnorm_constants(encoder, decoder, decoding=is_decoder)
            post = tuple(replace(step, value=constants.alpha) if step.kind == "add" else step for step in node.post)
            node = replace(node, post=post, shrink=constants.beta)
        scaled.append(node)
    return tuple(scaled)


def deepnorm_constants(encoder: int, decoder: int, *, decoding: bool) -> Constants:
    """Compute the constants of the encoder or the decoder from the numbers of layers of both."""
    if not encoder or not decoder:
        depth = max(encoder, decoder, 1)
        return Constants((2 * depth) ** 0.25, (8 * depth) ** -0.25)
    if decoding:
        return Constants((3 * decoder) ** 0.25, (12 * decoder) ** -0.25)
    return Constants(0.81 * (encoder**4 * decoder) ** (1 / 16), 0.87 * (encoder**4 * decoder) ** (-1 / 16))
