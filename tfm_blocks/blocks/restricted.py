"""Restricted self-attention."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from tfm_blocks.blocks.attention import merge_heads, one_hot_values, split_heads
from tfm_blocks.blocks.banded import banded_attention
from tfm_blocks.blocks.dot_product import past_attention
from tfm_blocks.blocks.linear import Linear
from tfm_blocks.blocks.state import Room, State
from tfm_blocks.registry.blocks import block


@block(
    "restricted_attention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where={
        "heads >= 1": "there is at least one head",
        "D % heads == 0": "the width must split evenly into heads",
        "r >= 1": "a position sees at least itself",
    },
    source="Vaswani et al. 2017, section 4",
)
class RestrictedAttention(nn.Module):
    """Self-attention in which each position sees `r` neighbours, itself included: x_BTD -> x_BTD, cost O(n·r·d).

    Half of them lie on either side, r // 2 before and (r - 1) // 2 after; with `mask: causal` all r - 1 lie before. Its
    parameters are those of `attention`, so that weights can be taken over.
    """

    def __init__(
        self, D: int, *, heads: int, r: int, mask: Literal["causal"] | None = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads = heads
        self.r = r
        self.causal = mask == "causal"
        self.dropout = attention_dropout
        self.qkv = Linear(D, 3 * D, parts=3)
        self.out = Linear(D, D)

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = split_heads(self.qkv(x_BTD), self.heads, 3)
        out_BTD: Tensor = self.out(merge_heads(self._attend(q_BHTK, k_BHTK, v_BHTK, keep_BT)))
        return out_BTD

    def weights(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        """How much each head of each position looks at what: w_BHTT, 0 outside the band; a row adds up to 1."""
        q_BHTK, k_BHTK, _ = split_heads(self.qkv(x_BTD), self.heads, 3)
        return self._attend(q_BHTK, k_BHTK, one_hot_values(k_BHTK), keep_BT)

    def _attend(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, keep_BT: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return banded_attention(q_BHTK, k_BHTK, v_BHTK, keep_BT, r=self.r, causal=self.causal, dropout=dropout)

    def start(self, *, room: Room) -> State:
        """Room for keys and values of the target."""
        return State(caches={name: room.cache(self.heads, self.out.in_features // self.heads) for name in "kv"})

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        """One more target position, which sees the last r: x_R1D -> x_R1D."""
        q_k_v_BHMK = split_heads(self.qkv(state.abreast(x_R1D)), self.heads, 3)
        y_BHMK = past_attention(*q_k_v_BHMK, state=state, most=self.r)
        return self.out(merge_heads(y_BHMK)).view_as(x_R1D), state
