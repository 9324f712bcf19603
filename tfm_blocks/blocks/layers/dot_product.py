"""Dot-product attention, shared by all attention blocks, and the interfaces of positions inside attention."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.state import Positional, State


class Widths(NamedTuple):
    """The numbers of query heads and key-value heads, and the widths per head of queries and keys, and of values."""

    heads: int
    kv_heads: int
    key: int
    value: int

    @property
    def maps(self) -> tuple[int, int, int]:
        """Return the total widths of queries, keys and values of a position."""
        return self.heads * self.key, self.kv_heads * self.key, self.kv_heads * self.value


def widths(
    D: int, heads: int, kv_heads: int | None = None, d_head: int | None = None, d_value: int | None = None
) -> Widths:
    """Return the widths; by default there are as many key-value heads as heads, all of width D / heads."""
    width = D // heads if d_head is None else d_head
    return Widths(heads, heads if kv_heads is None else kv_heads, width, width if d_value is None else d_value)


def split_heads(x_BTD: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    """Split `parts` tensors that are concatenated along the width into heads: x_BT(D·parts) -> x_BHTK."""
    B, T, width = x_BTD.shape
    return x_BTD.view(B, T, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4).unbind(0)


def to_heads(x_BTD: Tensor, heads: int) -> Tensor:
    """Split the width into heads, the inverse of `merge_heads`: x_BT(H·K) -> x_BHTK."""
    return torch.unflatten(x_BTD, 2, (heads, -1)).transpose(1, 2)


def split_widths(x_BTD: Tensor, heads: tuple[int, ...], width: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Split tensors that are concatenated along the width, each with its number and width of heads: x_BTD -> x_BHTK."""
    if len(set(heads)) == len(set(width)) == 1:
        return split_heads(x_BTD, heads[0], len(heads))
    sizes = [count * size for count, size in zip(heads, width, strict=True)]
    return tuple(to_heads(*pair) for pair in zip(torch.split(x_BTD, sizes, 2), heads, strict=True))


def merge_heads(x_BHTK: Tensor) -> Tensor:
    """Concatenate the heads: x_BHTK -> x_BT(H·K)."""
    return x_BHTK.transpose(1, 2).flatten(2)


def repeat_kv(x_BGSK: Tensor, heads: int) -> Tensor:
    """Repeat each of G key-value heads for consecutive query heads: x_BGSK -> x_BHSK."""
    groups = x_BGSK.shape[1]
    return x_BGSK if groups == heads else x_BGSK.repeat_interleave(heads // groups, 1)


def rotate_adjacent(x_BHNK: Tensor, cos_NI: Tensor, sin_NI: Tensor) -> Tensor:
    """Rotate elements 2i and 2i+1 of the last axis by angle i, for as many i as there are angles: x_BHNK -> x_BHNK."""
    width = 2 * cos_NI.shape[-1]
    pairs, rest = torch.split(x_BHNK, [width, x_BHNK.shape[-1] - width], -1)
    a, b = torch.unflatten(pairs, -1, (-1, 2)).unbind(-1)
    rotated = torch.stack((a * cos_NI - b * sin_NI, b * cos_NI + a * sin_NI), -1).flatten(-2)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


def one_hot_values(k_BHSK: Tensor) -> Tensor:
    """Return one-hot values v_BHSS, with which attention outputs its weights."""
    B, H, S, _ = k_BHSK.shape
    return torch.eye(S, dtype=k_BHSK.dtype, device=k_BHSK.device).expand(B, H, S, S)


def renormalised(w_BHTS: Tensor) -> Tensor:
    """Divide the weights of each query by their sum; a row of zeros remains."""
    return w_BHTS / w_BHTS.sum(-1, keepdim=True).clamp(min=torch.finfo(w_BHTS.dtype).tiny)


class ScoreNormalizer(nn.Module):
    """softmax(β s) of the products s along the last axis; β defaults to 1/√D, where D is the width of the keys.

    `fused`: torch's own kernel computes all of it. `sums_to_one`: the weights of a row sum to 1.
    """

    fused = True
    sums_to_one = True

    def __init__(self, D: int, *, beta: float | None = None) -> None:
        super().__init__()
        self.width = D
        self.beta = 1 / math.sqrt(D) if beta is None else beta

    def match_base(self, base: ScoreNormalizer) -> None:
        """Scale products of trained queries and keys, which grow like D, by 1/D instead of 1/√D."""
        if base.width != self.width:
            self.beta = base.beta * base.width / self.width

    def transform(self, scores_BHTS: Tensor) -> Tensor:
        """Transform β s before biases and masks are added."""
        return scores_BHTS

    def normalize(self, scores_BHTS: Tensor) -> Tensor:
        """Return the weights w_BHTS."""
        return torch.softmax(scores_BHTS, -1)


class AttentionMask(NamedTuple):
    """The mask of an attention, and the bias that is added to its scores.

    `mask` broadcasts to BHTS: true = may attend. `causal` stands for the causal mask. `bias` broadcasts to BHTS.
    `distance_TS` is the distance from each query to each key, positive if the key follows.
    """

    mask: Tensor | None = None
    causal: bool = False
    bias: Tensor | None = None
    distance_TS: Tensor | None = None

    @property
    def visible(self) -> Tensor:
        """Return `mask`, or, if it is None, the mask that `causal` and `distance_TS` give."""
        if self.mask is not None:
            return self.mask
        assert self.distance_TS is not None
        return self.distance_TS <= 0 if self.causal else torch.ones_like(self.distance_TS, dtype=torch.bool)

    @property
    def learned(self) -> bool:
        """Return True if the bias needs a gradient, for which torch has no fast kernel on the CPU."""
        return self.bias is not None and self.bias.requires_grad

    def masked_bias(self, q_BHTK: Tensor, k_BHSK: Tensor) -> Tensor | None:
        """Return the bias, with the lowest float at masked keys; None if there is neither bias nor mask.

        The lowest float, instead of -inf, keeps a sequence of only padding finite. It is representable in the dtypes of
        the bias and of the queries, because some kernels cast the result to the dtype of the queries.
        """
        mask = self.mask
        if self.causal:
            T, S = q_BHTK.shape[2], k_BHSK.shape[2]
            mask = torch.ones(T, S, dtype=torch.bool, device=q_BHTK.device).tril()
        if mask is None:
            return self.bias
        bias = q_BHTK.new_zeros(()) if self.bias is None else self.bias
        lowest = max(torch.finfo(dtype).min for dtype in (bias.dtype, q_BHTK.dtype))
        return torch.where(mask, bias, lowest)

    def plus(self, bias: Tensor) -> AttentionMask:
        """Return the mask with a further bias of the scores."""
        return self._replace(bias=bias if self.bias is None else self.bias + bias)


def causal_mask(keep_BT: Tensor) -> Tensor:
    """Return mask_B1TT: each position attends to itself and to earlier positions that are not padding."""
    N = keep_BT.shape[1]
    past_TT = torch.ones(N, N, dtype=torch.bool, device=keep_BT.device).tril()
    itself_TT = torch.eye(N, dtype=torch.bool, device=keep_BT.device)
    return ((keep_BT[:, None, :] & past_TT) | itself_TT)[:, None]


def sequence_mask(keep_BS: Tensor, *, causal: bool, right_padded: bool) -> AttentionMask:
    """Return the mask of padding and, if `causal`, of later positions, which already excludes right padding."""
    if not causal:
        return AttentionMask(keep_BS[:, None, None, :])
    return AttentionMask(causal=True) if right_padded else AttentionMask(causal_mask(keep_BS))


def dot_product_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    beta: float | None = None,
) -> Tensor:
    """Compute softmax(β q k^T) v: q_BHTK, k_BGSK, v_BGSK -> y_BHTK; G divides H.

    `mask` broadcasts to BHTS: boolean (true = may attend) or added to the scores. β defaults to 1/√K. On the CPU,
    bfloat16 is upcast to float32, which is faster for sentences (tests/benchmarks/attention_precision.py), and torch's
    kernel reads grouped keys and values without a copy (docs/notebook/experiments.md#grouped-queries).
    Source: Vaswani et al. 2017, section 3.2.1.
    """
    heads, on_cpu = q_BHTK.shape[1], q_BHTK.device.type == "cpu"
    reads_groups = on_cpu and k_BGSK.shape[1] != heads and not torch.compiler.is_exporting()
    grouped: dict[str, Any] = {"enable_gqa": True} if reads_groups else {}
    if not grouped:
        k_BGSK, v_BGSK = repeat_kv(k_BGSK, heads), repeat_kv(v_BGSK, heads)
    if on_cpu and q_BHTK.dtype == torch.bfloat16:
        with torch.autocast("cpu", enabled=False):
            upcast = (q_BHTK.float(), k_BGSK.float(), v_BGSK.float())
            added = mask.float() if mask is not None and mask.is_floating_point() else mask
            y_BHTK = F.scaled_dot_product_attention(*upcast, added, dropout, causal, scale=beta, **grouped)
            return y_BHTK.to(q_BHTK.dtype)
    return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, mask, dropout, causal, scale=beta, **grouped)


def weighed_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    masks: AttentionMask,
    scores: ScoreNormalizer,
    *,
    dropout: float = 0.0,
) -> Tensor:
    """Attend with weights that `scores` computes from the products: q_BHTK, k_BGSK, v_BGSK -> y_BHTK; G divides H."""
    if scores.fused and not (masks.learned and q_BHTK.device.type == "cpu"):
        mask, causal = masks.mask, masks.causal
        if masks.bias is not None:
            added = masks.masked_bias(q_BHTK, k_BGSK)
            assert added is not None
            mask, causal = added.to(q_BHTK.dtype), False
            mask = mask[None] if mask.ndim == 3 else mask
        return dot_product_attention(q_BHTK, k_BGSK, v_BGSK, mask, dropout=dropout, causal=causal, beta=scores.beta)
    heads = q_BHTK.shape[1]
    k_BHSK, v_BHSK = repeat_kv(k_BGSK, heads), repeat_kv(v_BGSK, heads)
    w_BHTS = dot_product_weights(q_BHTK, k_BHSK, masks, scores)
    return F.dropout(w_BHTS, dropout, training=dropout > 0).to(v_BHSK.dtype) @ v_BHSK


def dot_product_weights(q_BHTK: Tensor, k_BHSK: Tensor, masks: AttentionMask, scores: ScoreNormalizer) -> Tensor:
    """Return w_BHTS, the weight of each key for each query."""
    scores_BHTS = scores.transform(q_BHTK * scores.beta @ k_BHSK.mT)
    added = masks.masked_bias(q_BHTK, k_BHSK)
    return scores.normalize(scores_BHTS if added is None else scores_BHTS + added)


def among_largest(scores_BHTS: Tensor, k: int) -> Tensor:
    """Return a mask of the `k` largest scores of each query, and of scores that equal the k-th largest: mask_BHTS."""
    padded_BHTX = F.pad(scores_BHTS, (0, k), value=-math.inf)  # there may be fewer than k keys
    return scores_BHTS >= padded_BHTX.topk(k, -1).values[..., -1:]


def few_queries(q_BHMK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None, beta: float) -> Tensor:
    """Compute `dot_product_attention` for a decoding step, without gradients; G divides H.

    A query whose mask allows no key, as in a source of padding alone, has a finite output. The query heads of a
    key-value head become its queries, so keys and values are not repeated. On the CPU, torch's fused kernel is slow for
    few queries with a mask, so two matrix products replace it:
    docs/notebook/experiments.md#small-products-and-masks-as-biases.
    """
    B, H, M, K = q_BHMK.shape
    G, S = k_BGSK.shape[1:3]
    q_BGQK = q_BHMK.reshape(B, G, H // G * M, K)
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(B, G, H // G * M, S)
    elif mask is not None and mask.shape[2] > 1:
        mask = mask.repeat(1, 1, H // G, 1)
    if q_BHMK.device.type != "cpu" or q_BHMK.dtype != torch.float32 or mask is None:
        y_BGQK = F.scaled_dot_product_attention(q_BGQK, k_BGSK, v_BGSK, mask, scale=beta)
        return y_BGQK.reshape(B, H, M, -1)
    q_XQK, k_XSK, v_XSK = q_BGQK.flatten(0, 1), k_BGSK.flatten(0, 1), v_BGSK.flatten(0, 1)
    bias_XQS = torch.where(mask, 0.0, torch.finfo(torch.float32).min).expand(B, G, q_XQK.shape[1], S).flatten(0, 1)
    scores_XQS = torch.baddbmm(bias_XQS, q_XQK, k_XSK.mT, alpha=beta)
    return torch.bmm(torch.softmax(scores_XQS, 2), v_XSK).view(B, H, M, -1)


class Span(NamedTuple):
    """`length` positions from `first` on, `stride` apart."""

    first: int
    length: int
    stride: int = 1

    def on(self, device: torch.device) -> Tensor:
        """Return the positions as a tensor: positions_N."""
        return torch.arange(self.first, self.first + self.length * self.stride, self.stride, device=device)


@runtime_checkable
class RotatesHeads(Protocol):
    """Encodes positions by rotating queries and keys; `rotate_keys`, if it is defined, rotates the keys instead."""

    def rotate(self, x_BHNK: Tensor, positions_N: Tensor) -> Tensor:
        """Rotate x_BHNK -> x_BHNK; a single position applies to all N."""


def rotate_heads(position: RotatesHeads, x_BHNK: Tensor, span_N: Span, *, keys: bool = False) -> Tensor:
    """Rotate queries, or keys by `rotate_keys` of the position if it has that.

    A span of one position applies to all N. Raises ValueError for positions beyond the `max_length` of the position.
    """
    most: int | None = getattr(position, "max_length", None)
    length = span_N.first + (span_N.length - 1) * span_N.stride + 1
    if most is not None and length > most:
        raise ValueError(f"the rotation has max_length = {most} positions, but the sequence has {length}")
    rotate = getattr(position, "rotate_keys", position.rotate) if keys else position.rotate
    rotated_BHNK: Tensor = rotate(x_BHNK, span_N.on(x_BHNK.device))
    return rotated_BHNK


@runtime_checkable
class BiasesScores(Protocol):
    """Adds to the scores of each head a bias that depends on the distance from query to key."""

    @abstractmethod
    def of_distance(self, distance_TS: Tensor) -> Tensor:
        """Return bias_HTS; a distance is negative if the key precedes the query."""


@runtime_checkable
class ComparesPairs(Protocol):
    """Adds to the scores a bias that depends on the query, the key and the distance from one to the other."""

    @abstractmethod
    def of_pairs(self, q_BHTK: Tensor, k_BGSK: Tensor, distance_TS: Tensor) -> Tensor:
        """Return bias_BHTS, which attention multiplies by β.

        Queries and keys are equally spaced, or one row of distances, between any places, applies to all queries.
        """


def distance(queries_T: Tensor, keys_S: Tensor) -> Tensor:
    """Return the distance from each query to each key, positive if the key follows: distance_TS."""
    return keys_S - queries_T[:, None]


def bias_between(biases: BiasesScores, queries: Span, keys: Span, device: torch.device) -> Tensor:
    """Return bias_HTS. For spans of stride 1, the usual case, each distance is looked up only once.

    torch.export looks up all pairs, because it would fix the length of `unfold`.
    """
    if queries.stride != 1 or keys.stride != 1 or torch.compiler.is_exporting():
        return biases.of_distance(distance(queries.on(device), keys.on(device)))
    farthest = Span(keys.first - queries.first - queries.length + 1, queries.length + keys.length - 1)
    bias_HL = biases.of_distance(farthest.on(device)[None])[:, 0]
    return bias_HL.unfold(1, keys.length, 1).flip(1)


class ScoreBias(Positional, BiasesScores):
    """A bias of the attention scores. As a node: x_BND -> bias_HNN for all pairs of positions; only N matters."""

    def forward(self, x_BND: Tensor) -> Tensor:
        all_N = Span(0, x_BND.shape[1])
        return bias_between(self, all_N, all_N, x_BND.device).to(x_BND.dtype)

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the bias from the current position to itself and each past position: bias_H1N."""
        past_N = Span(0, state.position + 1)
        return bias_between(self, Span(state.position, 1), past_N, x_R1D.device).to(x_R1D.dtype), state
