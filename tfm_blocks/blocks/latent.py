"""Multi-head latent attention."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.dot_product import (
    AttentionMask,
    RotatesHeads,
    Span,
    among_largest,
    causal_mask,
    dot_product_weights,
    few_queries,
    merge_heads,
    renormalised,
    rotate_heads,
    sequence_mask,
    to_heads,
)
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.multi_head import SOFTMAX, DotProduct, Heads, make_part
from tfm_blocks.blocks.layers.state import CacheShape, State, mean_of_kept
from tfm_blocks.blocks.norm import LayerNorm, RMSNorm
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Part, Position, Rate, Scores

ROTARY = Part("rotary", {"layout": "pairs"})
INDEX_ROTARY = Part("rotary")

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
    p of width `d_turned` that all heads share and that encodes the position, unless that is `none`, as in Kimi Linear.
    A value is a projection of c to width `d_value`. Queries are projected from x. The output is softmax(β q k^T) v, by
    default with β = 1/√(d_head + d_turned). Decoding caches c and p; it applies U to queries and outputs instead of all
    keys and values. The norm is RMSNorm with `eps`. The projections have no biases.

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
        self.up = Linear(d_latent, heads * (d_head + d_value), bias=False, heads=(heads,))
        self.out = Linear(heads * d_value, D, bias=False, depth_scaled=(0,))
        self.position = make_rotation("position", position, d_turned)
        self.scores = make_part(scores, d_head + d_turned, heads=heads)

    def shrink(self, factor: float) -> None:
        """Multiply the initial maps of values by the factor of deepnorm; `out` shrinks itself."""
        torch.unflatten(self.up.weight, 0, (self.heads, -1))[:, self.sizes[0] :].mul_(factor)

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Tensor:
        return self._finish(self.attend(*self.prepare(x_BTD, keep_BT=keep_BT, right_padded_T=right_padded_T)))

    def prepare(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Heads:
        q_BHTK, c_B1TL, p_B1TR = self._project(x_BTD, self.compress(x_BTD), Span(0, x_BTD.shape[1]))
        masks = sequence_mask(keep_BT, causal=self.causal, right_padded=right_padded_T)
        return q_BHTK, *self._keys_and_values(c_B1TL, p_B1TR), masks

    def compress(self, x_BTD: Tensor) -> Tensor:
        """Return the vectors from which queries are projected: r_BTQ."""
        return x_BTD

    def _project(self, x_BTD: Tensor, r_BTQ: Tensor, span_T: Span) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries q_BHTK, latent vectors c_B1TL, and the shared part of the keys p_B1TR."""
        d_head, d_turned, _ = self.sizes
        q_BHTX = to_heads(self.q(r_BTQ), self.heads)
        plain, rotary = torch.split(q_BHTX, [d_head, d_turned], 3)
        q_BHTK = torch.cat((plain, rotate_heads(self.position, rotary, span_T)), 3)
        c_BTL, p_BTR = torch.split(self.down(x_BTD), self.down.parts, 2)
        p_B1TR = rotate_heads(self.position, p_BTR[:, None], span_T, keys=True)
        return q_BHTK, self.up.rounded_input(self.norm(c_BTL))[:, None], p_B1TR

    def _keys_and_values(self, c_B1TL: Tensor, p_B1TR: Tensor) -> tuple[Tensor, Tensor]:
        d_head, _, d_value = self.sizes
        kv_BHTX = to_heads(self.up(c_B1TL[:, 0]), self.heads)
        k_BHTK, v_BHTV = torch.split(kv_BHTX, [d_head, d_value], 3)
        return torch.cat((k_BHTK, p_B1TR.expand(-1, self.heads, -1, -1)), 3), v_BHTV

    def _finish(self, y_BHTV: Tensor) -> Tensor:
        out_BTD: Tensor = self.out(merge_heads(y_BHTV))
        return out_BTD

    def start(self, *, room: CacheShape) -> State:
        latent, rotary = self.down.parts
        return State(caches={"c": room.cache(1, latent), "p": room.cache(1, rotary)})

    def prefill(self, x_BPD: Tensor, state: State) -> tuple[Tensor, State]:
        q_BHPK, c_B1PL, p_B1PR = self._project(x_BPD, self.compress(x_BPD), Span(0, x_BPD.shape[1]))
        state.fill(c=c_B1PL, p=p_B1PR)
        masks = AttentionMask(causal=True)
        return self._finish(self.attend(q_BHPK, *self._keys_and_values(c_B1PL, p_B1PR), masks)), state

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        """Read the next target position, without expanding the cached latent vectors."""
        d_head, d_turned, d_value = self.sizes
        x_BMD = state.fold_beams(x_R1D)
        r_BMQ = self.compress(x_BMD)
        q_BHMK, c_B1ML, p_B1MR = self._project(x_BMD, r_BMQ, Span(state.position, 1))
        mask = self.step_mask(x_BMD, r_BMQ, state)
        c_B1NL, p_B1NR = state.append("c", c_B1ML), state.append("p", p_B1MR)
        up_HXL = torch.unflatten(self.up.merged_weight(), 0, (self.heads, -1)).to(q_BHMK.dtype)
        keys_HKL, values_HVL = torch.split(up_HXL, [d_head, d_value], 1)
        plain_BHMK, rotary_BHMR = torch.split(q_BHMK, [d_head, d_turned], 3)
        q_BHMX = torch.cat((plain_BHMK @ keys_HKL, rotary_BHMR), 3)
        k_B1NX = torch.cat((c_B1NL, p_B1NR), 3)
        if self.scores.fused:
            y_BHML = few_queries(q_BHMX, k_B1NX, c_B1NL, mask, self.scores.beta)
        else:
            y_BHML = self.attend(q_BHMX, k_B1NX, c_B1NL, AttentionMask(mask))
        return self._finish(y_BHML @ values_HVL.mT).view_as(x_R1D), state

    def step_mask(self, x_BMD: Tensor, r_BMQ: Tensor, state: State) -> Tensor | None:
        """Return the mask of a step over the cached positions of all hypotheses; None if there is nothing to mask."""
        return state.beam_mask()


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
        self.q = Linear(d_query, self.q.out_features, bias=False, heads=self.q.heads)

    def compress(self, x_BTD: Tensor) -> Tensor:
        r_BTQ: Tensor = self.q_norm(self.q_down(x_BTD))
        return r_BTQ


def make_rotation(name: str, position: Position, width: int) -> Any:
    """Construct the position of this name. Raises ValueError if it does not rotate queries and keys."""
    rotation = REGISTRY.make(position, width)
    if not isinstance(rotation, RotatesHeads):
        raise ValueError(f"{name} must rotate queries and keys, as rotary does, but is {position}")
    return rotation


class Indexer(nn.Module):
    """Scores of keys for queries, Σ_h w_h ReLU(q_h · k) / √(H K), from heads of width K that share their keys.

    q is a projection of r_BTQ, and w and k are projections of x_BTD. k passes through LayerNorm.
    """

    def __init__(self, D: int, Q: int, *, heads: int, width: int, position: Position) -> None:
        super().__init__()
        self.q = Linear(Q, heads * width, bias=False, heads=(heads,))
        self.k, self.norm = Linear(D, width, bias=False), LayerNorm(width, eps=1e-6)
        self.weights = Linear(D, heads, bias=False)
        self.position = make_rotation("index_position", position, width)
        self.scale = 1 / math.sqrt(heads * width)

    def match_base(self, base: Indexer) -> None:
        """Scale products of trained weights, which grow like H K, by 1/(H K) instead of its root."""
        self.scale *= self.scale / base.scale

    def keys(self, x_BND: Tensor, span_N: Span) -> Tensor:
        """Return the keys of all heads: k_B1NK."""
        k_B1NK: Tensor = self.norm(self.k(x_BND))[:, None]
        return rotate_heads(self.position, k_B1NK, span_N, keys=True)

    def forward(self, x_BTD: Tensor, r_BTQ: Tensor, k_B1SK: Tensor, span_T: Span) -> Tensor:
        """Return the scores score_B1TS; a span of one position applies to all queries."""
        q_BHTK = torch.unflatten(self.q(r_BTQ), 2, (-1, k_B1SK.shape[3])).transpose(1, 2)
        q_BHTK = rotate_heads(self.position, q_BHTK, span_T)
        w_BTH1 = self.weights(x_BTD)[..., None] * self.scale
        score_B1TS: Tensor = (w_BTH1.transpose(1, 2) * F.relu(q_BHTK @ k_B1SK.mT)).sum(1, keepdim=True)
        return score_B1TS


@block(
    "sparse_latent_attention",
    "x: B T D -> B T D, loss",
    branch=True,
    sees={"x": "mask"},
    where={
        **WHERE,
        "d_query >= 1": "the latent vector of queries has a width",
        "top_k >= 1": "a query attends to at least one key",
        "index_heads >= 1": "at least one head chooses keys",
        "d_index >= 2": "some numbers of a head that chooses keys carry the position",
        "align >= 0": "the loss lets the indexer follow the attention weights",
    },
    source="DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.1, equations 1, 2 and 4",
)
class SparseLatentAttention(LatentQueryAttention):
    """`latent_query_attention` to the `top_k` keys of each query that an indexer chooses: x_BTD -> x_BTD, loss.

    The indexer scores a key as Σ_h w_h ReLU(q_h · k) / √(H K), for H = `index_heads` heads of width K = `d_index` that
    share their keys. Its queries are projected from the latent vector of queries, w and k from x; k passes through
    LayerNorm, and `index_position` acts on q and k. Keys whose score equals the `top_k`-th largest are kept too; among
    scores that differ only by rounding, the choice of training and decoding may differ.

    The choice has no gradient. The indexer learns from the loss, `align` times the KL divergence from the mean
    attention weights over heads to the softmax of its scores over the chosen keys, as a mean over the positions of a
    sequence without its padding. The rest of the model does not depend on this loss. Training computes all scores, so
    it is not faster than dense attention.

    Also known as: DSA, DeepSeek sparse attention, lightning indexer.
    Use: weights of DeepSeek-V3.2.
    Example: top_k: 64, index_heads: 4, d_index: 32, d_latent: 128, d_query: 192, d_head: 64, d_turned: 32, d_value: 64
    """

    def __init__(
        self,
        D: int,
        *,
        top_k: int,
        index_heads: int,
        d_index: int,
        d_query: int,
        index_position: Position = INDEX_ROTARY,
        align: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(D, d_query=d_query, **options)
        self.top_k, self.align = top_k, align
        self.indexer = Indexer(D, d_query, heads=index_heads, width=d_index, position=index_position)

    def forward(  # type: ignore[override]
        self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True
    ) -> tuple[Tensor, Tensor]:
        (q_BHTK, k_BHSK, v_BHSK, masks), index_B1TS = self._select(x_BTD, self._mask(keep_BT))
        w_BHTS = dot_product_weights(q_BHTK, k_BHSK, masks, self.scores)
        y_BHTV = F.dropout(w_BHTS, self.dropout, self.training).to(v_BHSK.dtype) @ v_BHSK
        assert masks.mask is not None
        divergence_BT = _divergence(w_BHTS.detach(), index_B1TS, masks.mask)
        return self._finish(y_BHTV), self.align * mean_of_kept(divergence_BT, keep_BT)

    def prepare(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Heads:
        return self._select(x_BTD, self._mask(keep_BT))[0]

    def _mask(self, keep_BT: Tensor) -> Tensor:
        return causal_mask(keep_BT) if self.causal else keep_BT[:, None, None]

    def _select(self, x_BTD: Tensor, mask: Tensor, state: State | None = None) -> tuple[Heads, Tensor]:
        """Return queries, keys, values and the mask of the chosen keys, and the scores of the indexer: index_B1TS."""
        span_T, r_BTQ = Span(0, x_BTD.shape[1]), self.compress(x_BTD)
        q_BHTK, c_B1TL, p_B1TR = self._project(x_BTD, r_BTQ, span_T)
        i_B1SK = self.indexer.keys(x_BTD.detach(), span_T)
        if state is not None:
            state.fill(c=c_B1TL, p=p_B1TR, i=i_B1SK)
        index_B1TS = self.indexer(x_BTD.detach(), r_BTQ.detach(), i_B1SK, span_T)
        masks = AttentionMask(self._chosen(index_B1TS, mask))
        return (q_BHTK, *self._keys_and_values(c_B1TL, p_B1TR), masks), index_B1TS

    def _chosen(self, index_B1TS: Tensor, mask: Tensor) -> Tensor:
        return mask & among_largest(index_B1TS.masked_fill(~mask, -math.inf), self.top_k)

    def start(self, *, room: CacheShape) -> State:
        state = super().start(room=room)
        state.caches["i"] = room.cache(1, self.indexer.k.out_features)
        return state

    def prefill(self, x_BPD: Tensor, state: State) -> tuple[Tensor, State]:
        causal_PP = torch.ones(x_BPD.shape[1], x_BPD.shape[1], dtype=torch.bool, device=x_BPD.device).tril()
        heads, _ = self._select(x_BPD, causal_PP, state)
        return self._finish(self.attend(*heads)), state

    def step_mask(self, x_BMD: Tensor, r_BMQ: Tensor, state: State) -> Tensor:
        current = Span(state.position, 1)
        i_B1NK = state.append("i", self.indexer.keys(x_BMD, current))
        index_B1MN = self.indexer(x_BMD, r_BMQ, i_B1NK, current)
        mask = state.beam_mask()
        return self._chosen(index_B1MN, torch.ones_like(index_B1MN, dtype=torch.bool) if mask is None else mask)


def _divergence(w_BHTS: Tensor, index_B1TS: Tensor, mask: Tensor) -> Tensor:
    """Return KL(p ‖ softmax(index)) over the keys of the mask, for p the mean of w over heads: divergence_BT."""
    p_BTS = renormalised(w_BHTS.float().mean(1))
    lowest = torch.finfo(torch.float32).min / 2
    log_q_BTS = torch.log_softmax(index_B1TS[:, 0].float().masked_fill(~mask[:, 0], lowest), 2)
    return F.kl_div(log_q_BTS, p_BTS, reduction="none").sum(2)
