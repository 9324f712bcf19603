"""Self-attention by segments, each with a memory of the positions before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfm_blocks.blocks.attention import WHERE as ATTENTION
from tfm_blocks.blocks.layers.banded import segment_attention
from tfm_blocks.blocks.layers.dot_product import Span
from tfm_blocks.blocks.restricted import WindowAttention
from tfm_blocks.registry.blocks import block


@block(
    "segment_attention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where={**ATTENTION, "segment >= 1": "a segment has a position", "memory >= 0": "a memory of 0 has no positions"},
    source="Dai et al. 2019 (Transformer-XL), section 3.2, segment-level recurrence",
)
class SegmentAttention(WindowAttention):
    """Self-attention within segments, and to the `memory` positions before each: x_BTD -> x_BTD.

    The sequence is cut into segments of `segment` positions. A query attends to its own segment, with `mask: causal`
    only up to its own position, and to the last `memory` positions before the segment. The gradient does not flow
    through the keys and values of this memory into earlier segments. A norm before the block counts as part of its
    input. With each layer, a stack reads at least `memory` positions further back.

    A sequence of several segments computes what Transformer-XL computes for consecutive segments with reused states;
    there is no memory between sequences. Decoding caches the keys and values of all positions, of which it reads
    the segment and the memory. `position` takes the same blocks as in `attention`, such as
    `relative_sinusoidal` of the same paper. Parameters and other arguments, except `selection` and `forget_gate`, are
    the same as in `attention`.

    Also known as: Transformer-XL, segment-level recurrence; chunked attention, block-local attention (`memory: 0`).
    Use: long sequences, trained as consecutive segments.
    Cost: in training, keys and values are projected twice.
    Example: segment: 64, memory: 64
    """

    def __init__(self, D: int, *, segment: int, memory: int, **options: Any) -> None:
        super().__init__(D, **options)
        self.segment, self.memory = segment, memory

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:  # type: ignore[override]
        span_T = Span(0, x_BTD.shape[1])
        heads = self.self_heads(x_BTD, span_T)
        _, *earlier = self.self_heads(x_BTD.detach(), span_T) if torch.is_grad_enabled() else heads
        return self.finish(self.attend_near(*heads, keep_BT, earlier), x_BTD)

    def attend_near(
        self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, keep_BT: Tensor, earlier: list[Tensor] | None = None
    ) -> Tensor:
        """Attend by segments; `earlier` has the keys and values that later segments read, by default k and v."""
        options = {"segment": self.segment, "memory": self.memory, **self.options}
        return segment_attention(q_BHTK, k_BGTK, v_BGTK, keep_BT, earlier or [k_BGTK, v_BGTK], **options)

    def band(self, position: int) -> tuple[int, int]:
        return self.memory + position % self.segment + 1, 1
