"""Multi-head latent attention."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tfm_blocks.blocks.layers.dot_product import (
    AttentionMask,
    RotatesHeads,
    Span,
    few_queries,
    merge_heads,
    sequence_mask,
)
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.multi_head import SOFTMAX, DotProduct, Heads, make_part
from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.blocks.norm import RMSNorm
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Part, Position, Rate, Scores

ROTARY = Part("rotary", {"layout": "pairs"})

WHERE = {
    "heads >= 1": "there is at least one head",
    "d_latent >= 1": "the latent vector has a width",
    "d_head >= 1": "a head has a width",
    "d_turned >= 2": "some numbers of a head carry the position",
    "d_value >= 1": "values have a width",
    "eps > 0": "a mean of squares may be 0",
}


@block(
    "latent_attention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where=WHERE,
    source="DeepSeek-AI 2024 (DeepSeek-V2), section 2.1",
)
class LatentAttention(DotProduct):
    """Attention whose keys and values are projected from a latent vector of each position: x_BTD -> x_BTD.

    The latent vector c = norm(W x) has width `d_latent`. A head's key is [U c; p]: a part of width `d_head`, and a part
    p of width `d_turned` that all heads share and that encodes the position. A value is a projection of c to width
    `d_value`. Queries are projected from x. The output is softmax(β q k^T) v, by default with
    β = 1/√(d_head + d_turned). Decoding caches c and p; it applies U to queries and outputs instead of all keys and
    values. The norm is RMSNorm with `eps`. The projections have no biases.

    Also known as: MLA, multi-head latent attention.
    Use: small caches: decoding keeps one latent vector for each position.
    Example: d_latent: 128, d_head: 64, d_turned: 32, d_value: 64
    """

    def __init__(
        self,
        D: int,
        *,
        heads: int,
        d_latent: int,
        d_head: int,
        d_turned: int,
        d_value: int,
        mask: Literal["causal"] | None = None,
        position: Position = ROTARY,
        scores: Scores = SOFTMAX,
        eps: float = 1e-6,
        attention_dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.sizes = heads, (d_head, d_turned, d_value)
        self.causal = mask == "causal"
        self.dropout = attention_dropout
        self.q = Linear(D, heads * (d_head + d_turned), bias=False, heads=(heads,))
        self.down = Linear(D, d_latent + d_turned, parts=(d_latent, d_turned), bias=False)
        self.norm = RMSNorm(d_latent, eps=eps)
        self.up = Linear(d_latent, heads * (d_head + d_value), bias=False, depth_scaled=(0,), heads=(heads,))
        self.out = Linear(heads * d_value, D, bias=False, depth_scaled=(0,))
        self.position: Any = REGISTRY.make(position, d_turned)
        if not isinstance(self.position, RotatesHeads):
            raise ValueError(f"position must rotate queries and keys, as rotary does, but is {position}")
        self.rotates_keys = hasattr(self.position, "rotate_keys")
        self.scores = make_part(scores, d_head + d_turned, heads=heads)

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Tensor:
        return self._finish(self.attend(*self.prepare(x_BTD, keep_BT=keep_BT, right_padded_T=right_padded_T)))

    def prepare(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Heads:
        q_BHTK, c_B1TL, p_B1TR = self._project(x_BTD, Span(0, x_BTD.shape[1]))
        masks = sequence_mask(keep_BT, causal=self.causal, right_padded=right_padded_T)
        return q_BHTK, *self._keys_and_values(c_B1TL, p_B1TR), masks

    def _project(self, x_BTD: Tensor, span_T: Span) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries q_BHTK, latent vectors c_B1TL, and the shared part of the keys p_B1TR."""
        d_head, d_turned, _ = self.sizes
        positions_T = span_T.on(x_BTD.device)
        q_BHTX = torch.unflatten(self.queries(x_BTD), 2, (self.heads, -1)).transpose(1, 2)
        plain, rotary = torch.split(q_BHTX, [d_head, d_turned], 3)
        q_BHTK = torch.cat((plain, self.position.rotate(rotary, positions_T)), 3)
        c_BTL, p_BTR = torch.split(self.down(x_BTD), self.down.parts, 2)
        p_B1TR = p_BTR[:, None]
        if self.rotates_keys:
            p_B1TR = self.position.rotate_keys(p_B1TR, positions_T)
        else:
            p_B1TR = self.position.rotate(p_B1TR, positions_T)
        return q_BHTK, self.norm(c_BTL)[:, None], p_B1TR

    def queries(self, x_BTD: Tensor) -> Tensor:
        q_BTX: Tensor = self.q(x_BTD)
        return q_BTX

    def _keys_and_values(self, c_B1TL: Tensor, p_B1TR: Tensor) -> tuple[Tensor, Tensor]:
        d_head, _, d_value = self.sizes
        kv_BHTX = torch.unflatten(self.up(c_B1TL[:, 0]), 2, (self.heads, -1)).transpose(1, 2)
        k_BHTK, v_BHTV = torch.split(kv_BHTX, [d_head, d_value], 3)
        return torch.cat((k_BHTK, p_B1TR.expand(-1, self.heads, -1, -1)), 3), v_BHTV

    def _finish(self, y_BHTV: Tensor) -> Tensor:
        out_BTD: Tensor = self.out(merge_heads(y_BHTV))
        return out_BTD

    def start(self, *, room: CacheShape) -> State:
        latent, rotary = self.down.parts
        return State(caches={"c": room.cache(1, latent), "p": room.cache(1, rotary)})

    def prefill(self, x_BPD: Tensor, state: State) -> tuple[Tensor, State]:
        q_BHPK, c_B1PL, p_B1PR = self._project(x_BPD, Span(0, x_BPD.shape[1]))
        state.fill(c=c_B1PL, p=p_B1PR)
        masks = AttentionMask(causal=True)
        return self._finish(self.attend(q_BHPK, *self._keys_and_values(c_B1PL, p_B1PR), masks)), state

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        """Read the next target position, without expanding the cached latent vectors."""
        d_head, d_turned, d_value = self.sizes
        q_BHMK, c_B1ML, p_B1MR = self._project(state.fold_beams(x_R1D), Span(state.position, 1))
        c_B1NL, p_B1NR = state.append("c", c_B1ML), state.append("p", p_B1MR)
        up_HXL = torch.unflatten(self.up.merged_weight(), 0, (self.heads, -1)).to(q_BHMK.dtype)
        keys_HKL, values_HVL = torch.split(up_HXL, [d_head, d_value], 1)
        plain_BHMK, rotary_BHMR = torch.split(q_BHMK, [d_head, d_turned], 3)
        q_BHMX = torch.cat((plain_BHMK @ keys_HKL, rotary_BHMR), 3)
        k_BHNX = torch.cat((c_B1NL, p_B1NR), 3).expand(-1, self.heads, -1, -1)
        c_BHNL = c_B1NL.expand(-1, self.heads, -1, -1)
        if self.scores.fused:
            y_BHML = few_queries(q_BHMX, k_BHNX, c_BHNL, state.beam_mask(), self.scores.beta)
        else:
            y_BHML = self.attend(q_BHMX, k_BHNX, c_BHNL, AttentionMask(state.beam_mask()))
        return self._finish(y_BHML @ values_HVL.mT).view_as(x_R1D), state


@block(
    "latent_query_attention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where={**WHERE, "d_query >= 1": "the latent vector of queries has a width"},
    source="DeepSeek-AI 2024 (DeepSeek-V2), section 2.1",
)
class LatentQueryAttention(LatentAttention):
    """`latent_attention` whose queries are also projected from a latent vector: x_BTD -> x_BTD.

    That vector is norm(W x), of width `d_query`.

    Also known as: MLA with compressed queries.
    Use: weights of DeepSeek-V2 and V3.
    Example: d_latent: 128, d_query: 192, d_head: 64, d_turned: 32, d_value: 64
    """

    def __init__(self, D: int, *, d_query: int, eps: float = 1e-6, **options: Any) -> None:
        super().__init__(D, eps=eps, **options)
        self.q_down, self.q_norm = Linear(D, d_query, bias=False), RMSNorm(d_query, eps=eps)
        self.q = Linear(d_query, self.q.out_features, bias=False)

    def queries(self, x_BTD: Tensor) -> Tensor:
        return super().queries(self.q_norm(self.q_down(x_BTD)))
