"""Multi-head attention, the base class of the attention blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from tfm_blocks.blocks.layers.dot_product import (
    AttentionMask,
    BiasesScores,
    ComparesPairs,
    RotatesHeads,
    ScoreNormalizer,
    Span,
    Widths,
    bias_between,
    distance,
    few_queries,
    merge_heads,
    one_hot_values,
    renormalised,
    rotate_heads,
    sequence_mask,
    split_widths,
    to_heads,
    weighed_attention,
)
from tfm_blocks.blocks.layers.linear import Linear, PartlyBiased, fill_ones
from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.values import Gate, Norm, Part, Position, Rate, Scores, Selection

QKNormKind = Literal["head", "head_gains", "joint", "post_position", "queries"]
SOFTMAX = Part("softmax")
POSITIONS = (RotatesHeads, BiasesScores, ComparesPairs)  # what a position does in attention
Bias = Literal[True, False, "qkv", "out", "except_keys"]
Heads = tuple[Tensor, Tensor, Tensor, AttentionMask]


def make_part(part: Part, *sizes: int, heads: int, maps: int = 1, kinds: tuple[type, ...] = (), **defaults: Any) -> Any:
    """Construct a part of an attention with `heads` attention maps, of which each head has `maps`.

    `defaults` replace arguments that are None. Raises ValueError if another number of heads is written, or the part is
    none of `kinds`.
    """
    written = part.arguments.get("heads", heads)
    if written not in (heads, heads // maps):
        own = heads // maps
        raise ValueError(f"{part.block} has heads: {written}, but its attention has {own}: leave its heads out")
    known = REGISTRY.blocks[part.block].arguments
    defaults = {name: value for name, value in defaults.items() if part.arguments.get(name) is None}
    values = {**part.arguments, **defaults, "heads": heads}
    arguments = {name: value for name, value in values.items() if name in known or name in part.arguments}
    return REGISTRY.make(replace(part, arguments=arguments), *sizes, kinds=kinds)


def stacked(inputs: int, maps: tuple[int, ...], bias: Bias, keys: int, **options: Any) -> Linear:
    """Return the stacked maps of keys, at the place `keys`, and of queries or values."""
    if bias == "except_keys":
        return PartlyBiased(inputs, maps, keys, **options)
    return Linear(inputs, sum(maps), parts=maps, bias=bias in (True, "qkv"), **options)


class DotProduct(nn.Module, ABC):
    """Attention to the queries, keys, values and mask that `prepare` computes from the inputs of `forward`."""

    scores: ScoreNormalizer
    dropout: float

    @abstractmethod
    def prepare(self, *inputs: Any, **masks: Any) -> Heads:
        """Return q_BHTK, k_BGSK, v_BGSK and their mask."""

    def weights(self, *inputs: Any, **masks: Any) -> Tensor:
        """Return the attention weights w_BHTS; each row sums to 1, or to 0 if all weights are 0.

        The weight of an attention sink is dropped and the row renormalised.
        """
        q_BHTK, k_BGSK, _, mask = self.prepare(*inputs, **masks)
        w_BHTS = self.attention_weights(q_BHTK, k_BGSK, mask)
        return w_BHTS if self.scores.sums_to_one else renormalised(w_BHTS)

    def attention_weights(self, q_BHTK: Tensor, k_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        """Return the weights w_BHTS that `attend` applies, computed by attending to one-hot values."""
        return self.attend(q_BHTK, k_BGSK, one_hot_values(k_BGSK), masks)

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        """Compute the attention output y_BHTK."""
        dropout = self.dropout if self.training else 0.0
        return weighed_attention(q_BHTK, k_BGSK, v_BGSK, masks, self.scores, dropout=dropout)


class MultiHead(DotProduct):
    """Self-attention, or cross-attention if the width `E` of the other sequence is given.

    Self-attention has one projection `qkv`; cross-attention has two, `q` and `kv`. In decoding, a step attends to the
    last `window` positions, `dilation` apart; `window` None means all. Subclasses override `attend` or
    `attention_weights`, and pass their keyword-only arguments to this constructor.
    """

    weight_roles: ClassVar = {"q_gain": "gain", "k_gain": "gain"}

    window: int | None = None
    dilation = 1
    maps = 1  # attention maps of a head, with separate queries and keys
    score_terms = 1  # products of queries and keys that a score adds
    needs_distances = False  # `attend` reads `mask.distance_TS`

    def __init__(
        self,
        D: int,
        E: int | None,
        widths: Widths,
        mask: Literal["causal"] | None = None,
        position: Position | None = None,
        *,
        scores: Scores = SOFTMAX,
        selection: Selection | None = None,
        qk_norm: Norm | None = None,
        qk_norm_kind: QKNormKind = "head",
        v_norm: Norm | None = None,
        gate: Gate | None = None,
        out_norm: Norm | None = None,
        clip_qkv: float | None = None,
        bias: Bias = True,
        attention_dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        if (mask or selection) and E is not None:
            reads = "mask: causal orders the positions" if mask else "selection compares the positions"
            raise ValueError(f"{reads} of one sequence, but kv is another: leave one of them out")
        if widths.heads % widths.kv_heads:
            raise ValueError(f"kv_heads must divide heads, but heads = {widths.heads}, kv_heads = {widths.kv_heads}")
        self.widths, self.causal = widths, mask == "causal"
        self.dropout, self.clip_qkv = attention_dropout, clip_qkv
        self._make_projections(D, E, bias)
        make, merged = partial(make_part, heads=widths.heads, maps=self.maps), widths.heads * widths.value
        self.out = Linear(merged, D, bias=bias not in (False, "qkv"), depth_scaled=(0,))
        self._make_norms(qk_norm, qk_norm_kind)
        self.v_norm: nn.Module | None = REGISTRY.make(v_norm, widths.value)
        self.gate = make(gate, D, merged, bias=bias not in (False, "out")) if gate else None
        self.out_norm: nn.Module | None = REGISTRY.make(out_norm, merged)
        self.position: Any = make(position, widths.key, kinds=POSITIONS) if position else None
        self.scores = make(scores, self.score_terms * widths.key)
        self.selection = make(selection, widths.key) if selection else None
        self.rotates, self.compares = isinstance(self.position, RotatesHeads), isinstance(self.position, ComparesPairs)
        self.biases = isinstance(self.position, BiasesScores) and not self.compares
        self.needs_distances = self.needs_distances or self.compares or selection is not None

    def _make_projections(self, D: int, E: int | None, bias: Bias) -> None:
        """Construct the maps to queries, keys and values."""
        maps, heads = self.widths.maps, (self.widths.heads, self.widths.kv_heads, self.widths.kv_heads)
        if E is None:
            self.qkv = stacked(D, maps, bias, 1, depth_scaled=(2,), heads=heads)
        else:
            self.q = Linear(D, maps[0], bias=bias not in (False, "out"), heads=heads[:1])
            self.kv = stacked(E, maps[1:], bias, 0, depth_scaled=(1,), heads=heads[1:])

    def _make_norms(self, qk_norm: Part | None, kind: QKNormKind) -> None:
        """Construct the norms of queries, and of keys unless `kind` is `queries`; `head_gains` has gains."""
        if qk_norm is None and kind != "head":
            raise ValueError(f"qk_norm_kind is {kind}, but there is no norm: write qk_norm: rmsnorm, or leave it out")
        self.qk_norm_kind = kind
        self.q_norm, self.q_gain = self._make_norm(qk_norm, kind, self.widths.heads)
        self.k_norm, self.k_gain = self._make_norm(None if kind == "queries" else qk_norm, kind, self.widths.kv_heads)

    def _make_norm(self, norm: Part | None, kind: QKNormKind, heads: int) -> tuple[Any, nn.Parameter | None]:
        K = self.widths.key
        gain_HK = nn.Parameter(torch.empty(heads, K)) if kind == "head_gains" else None
        return REGISTRY.make(norm, heads * K if kind == "joint" else K), gain_HK

    initialise = fill_ones  # the gains

    def forward(
        self,
        x_BTD: Tensor,
        kv_BSE: Tensor | None = None,
        score_bias_HTS: Tensor | None = None,
        *,
        keep_BT: Tensor,
        keep_BS: Tensor | None = None,
        right_padded_T: bool = True,
    ) -> Tensor:
        masks: dict[str, Any] = {"keep_BT": keep_BT, "keep_BS": keep_BS, "right_padded_T": right_padded_T}
        return self.finish(self.attend(*self.prepare(x_BTD, kv_BSE, score_bias_HTS, **masks)), x_BTD)

    def prepare(
        self, x_BTD: Tensor, kv_BSE: Tensor | None = None, score_bias_HTS: Tensor | None = None, **masks: Any
    ) -> Heads:
        span_T = Span(0, x_BTD.shape[1])
        if kv_BSE is None:
            heads, keep = self.self_heads(x_BTD, span_T), masks["keep_BT"]
        else:
            heads, keep = (self.own_queries(x_BTD, span_T), *self._keys_and_values(kv_BSE)), masks["keep_BS"]
        mask = sequence_mask(keep, causal=self.causal, right_padded=masks.get("right_padded_T", True))
        return self.with_pairs(*heads, self.with_positions(span_T, Span(0, heads[1].shape[2]), score_bias_HTS, mask))

    def with_pairs(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Heads:
        """Add the biases of pairs of queries and keys to the mask, and restrict it to the keys of `selection`."""
        if self.compares:
            assert masks.distance_TS is not None
            masks = masks.plus(self.pair_bias(q_BHTK, k_BGSK, masks.distance_TS))
        if self.selection is not None:
            masks = masks._replace(mask=self.selection.select(q_BHTK, k_BGSK, masks), causal=False)
        return q_BHTK, k_BGSK, v_BGSK, masks

    def pair_bias(self, q_BHTK: Tensor, k_BGSK: Tensor, distance_TS: Tensor) -> Tensor:
        """Return the bias of each pair of a query and a key: bias_BHTS."""
        bias_BHTS: Tensor = self.position.of_pairs(q_BHTK, k_BGSK, distance_TS) * self.scores.beta
        return bias_BHTS

    def clamped(self, y_BND: Tensor) -> Tensor:
        """Clamp queries, keys or values to `clip_qkv`."""
        return y_BND if self.clip_qkv is None else y_BND.clamp(-self.clip_qkv, self.clip_qkv)

    def queries(self, q_BHTK: Tensor, span_T: Span) -> Tensor:
        """Normalise the queries and encode their positions; a span of one position applies to all queries."""
        return self._normalise_and_rotate(q_BHTK, self.q_norm, self.q_gain, span_T, keys=False)

    def keys(self, k_BGSK: Tensor, span_S: Span) -> Tensor:
        """Normalise the keys and encode their positions."""
        return self._normalise_and_rotate(k_BGSK, self.k_norm, self.k_gain, span_S, keys=True)

    def values(self, v_BGSK: Tensor) -> Tensor:
        """Normalise the values of each head."""
        return v_BGSK if self.v_norm is None else self.v_norm(v_BGSK)

    def _normalise_and_rotate(
        self, x_BHNK: Tensor, norm: nn.Module | None, gain_HK: Tensor | None, span_N: Span, *, keys: bool
    ) -> Tensor:
        norm_last = self.qk_norm_kind == "post_position"
        x_BHNK = x_BHNK if norm_last else self._normalise(x_BHNK, norm, gain_HK)
        if self.rotates:
            x_BHNK = rotate_heads(self.position, x_BHNK, span_N, keys=keys)
        return self._normalise(x_BHNK, norm, gain_HK) if norm_last else x_BHNK

    def _normalise(self, x_BHNK: Tensor, norm: nn.Module | None, gain_HK: Tensor | None) -> Tensor:
        """Normalise each head, or all heads of a position together if the kind is `joint`; then apply the gains."""
        if norm is None:
            return x_BHNK
        if self.qk_norm_kind == "joint":
            return to_heads(norm(merge_heads(x_BHNK)), x_BHNK.shape[1])
        y_BHNK: Tensor = norm(x_BHNK)
        return y_BHNK if gain_HK is None else y_BHNK * gain_HK[:, None]

    def finish(self, y_BHTK: Tensor, x_BTD: Tensor) -> Tensor:
        """Merge the outputs of the heads, apply the gate and the norm, and project to the width of the model."""
        y_BTX = merge_heads(y_BHTK) if self.gate is None else self.gate(x_BTD, merge_heads(y_BHTK))
        out_BTD: Tensor = self.out(y_BTX if self.out_norm is None else self.out_norm(y_BTX))
        return out_BTD

    def self_heads(self, x_BND: Tensor, span_N: Span) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of a sequence."""
        w = self.widths
        heads, head_widths = (w.heads, w.kv_heads, w.kv_heads), (w.key, w.key, w.value)
        q_BHNK, k_BHNK, v_BHNK = split_widths(self.clamped(self.qkv(x_BND)), heads, head_widths)
        return self.queries(q_BHNK, span_N), self.keys(k_BHNK, span_N), self.values(v_BHNK)

    def own_queries(self, x_BTD: Tensor, span_T: Span) -> Tensor:
        """Return the queries of a sequence whose keys and values come from elsewhere."""
        return self.queries(to_heads(self.clamped(self.q(x_BTD)), self.widths.heads), span_T)

    def _keys_and_values(self, kv_BSE: Tensor) -> tuple[Tensor, Tensor]:
        w = self.widths
        k_BGSK, v_BGSK = split_widths(self.clamped(self.kv(kv_BSE)), (w.kv_heads, w.kv_heads), (w.key, w.value))
        return self.keys(k_BGSK, Span(0, kv_BSE.shape[1])), self.values(v_BGSK)

    def with_positions(
        self, span_T: Span, span_S: Span, score_bias_HTS: Tensor | None, masks: AttentionMask
    ) -> AttentionMask:
        """Return the mask with the biases and distances that depend on positions, if they are needed."""
        device = self.out.weight.device
        distance_TS = distance(span_T.on(device), span_S.on(device)) if self.needs_distances else None
        masks = masks._replace(bias=score_bias_HTS, distance_TS=distance_TS)
        return masks.plus(bias_between(self.position, span_T, span_S, device)) if self.biases else masks

    def start(self, kv_BSE: Tensor | None = None, *, keep_BS: Tensor | None = None, room: CacheShape) -> State:
        """Allocate caches for keys and values of the target, or compute the fixed ones of `kv_BSE`."""
        if kv_BSE is None:
            return State(caches=self.caches(room))
        assert keep_BS is not None
        k_BGSK, v_BGSK = self._keys_and_values(kv_BSE)
        return State(fixed={"k_BGSK": k_BGSK.contiguous(), "v_BGSK": v_BGSK.contiguous(), "keep_BS": keep_BS})

    def caches(self, room: CacheShape) -> dict[str, Tensor]:
        """Allocate the caches for keys and values of the target."""
        w = self.widths
        return {"k": room.cache(w.kv_heads, w.key), "v": room.cache(w.kv_heads, w.value)}

    def prefill(self, x_BPD: Tensor, state: State, score_bias_HTS: Tensor | None = None) -> tuple[Tensor, State]:
        span_P = Span(0, x_BPD.shape[1])
        if state.fixed:
            q_BHPK, k_BGSK, v_BGSK, masks = self._fixed(x_BPD, span_P, state, score_bias_HTS)
        else:
            q_BHPK, k_BGSK, v_BGSK = self.self_heads(x_BPD, span_P)
            state.fill(k=k_BGSK, v=v_BGSK)
            masks = self.with_positions(span_P, span_P, score_bias_HTS, AttentionMask(causal=True))
        return self.finish(self.attend(*self.with_pairs(q_BHPK, k_BGSK, v_BGSK, masks)), x_BPD), state

    def _fixed(self, x_BTD: Tensor, span_T: Span, state: State, score_bias_HTS: Tensor | None) -> Heads:
        """Return the queries of the target, and the keys, values and mask that `start` computed from `kv_BSE`."""
        k_BGSK, v_BGSK, keep_BS = (state.fixed[name] for name in ("k_BGSK", "v_BGSK", "keep_BS"))
        masks = AttentionMask(keep_BS[:, None, None])
        masks = self.with_positions(span_T, Span(0, k_BGSK.shape[2]), score_bias_HTS, masks)
        return self.own_queries(x_BTD, span_T), k_BGSK, v_BGSK, masks

    def step(self, x_R1D: Tensor, state: State, score_bias_HTS: Tensor | None = None) -> tuple[Tensor, State]:
        """Process the next position of each hypothesis. The M hypotheses of a sentence become M queries: x_BMD."""
        x_BMD, current = state.fold_beams(x_R1D), Span(state.position, 1)
        if state.fixed:
            q_BHMK, k_BGSK, v_BGSK, masks = self._fixed(x_BMD, current, state, score_bias_HTS)
        else:
            q_BHMK, k_BGMK, v_BGMK = self.self_heads(x_BMD, current)
            k_BGSK, v_BGSK, masks = self.append(x_BMD, k_BGMK, v_BGMK, state, score_bias_HTS)
        y_BHMK = self.attend_few(*self.with_pairs(q_BHMK, k_BGSK, v_BGSK, masks))
        return self.finish(y_BHMK, x_BMD).view_as(x_R1D), state

    def band(self, position: int) -> tuple[int | None, int]:
        """Return the number of cached positions that a step attends to, None for all, and the distance between them."""
        return self.window, self.dilation

    def append(
        self, x_BMD: Tensor, k_BGMK: Tensor, v_BGMK: Tensor, state: State, score_bias_HTS: Tensor | None = None
    ) -> tuple[Tensor, Tensor, AttentionMask]:
        """Append the keys and values of the current position, which has the vectors x_BMD, to the caches.

        Return all cached ones, and the mask of the position over the cached positions of all hypotheses.
        """
        band = self.band(state.position)
        k_BGSK, v_BGSK = state.append("k", k_BGMK, *band), state.append("v", v_BGMK, *band)
        masks = AttentionMask(state.beam_mask(*band))
        if score_bias_HTS is None and not self.biases and not self.needs_distances:
            return k_BGSK, v_BGSK, masks
        past = state.past(*band)
        span_S = Span(past.start, (past.stop - past.start - 1) // past.step + 1, past.step)
        masks = self.with_positions(Span(state.position, 1), span_S, score_bias_HTS, masks)
        per_position = (masks.bias, masks.distance_TS)
        bias, distance_1S = (x if x is None else x.repeat_interleave(state.hypotheses, -1) for x in per_position)
        return k_BGSK, v_BGSK, masks._replace(bias=bias, distance_TS=distance_1S)

    def attend_few(self, q_BHMK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        """Compute `attend` for one step, with a kernel for few queries if neither a bias nor a subclass prevents it."""
        if not self.scores.fused or masks.bias is not None or type(self).attend is not DotProduct.attend:
            return self.attend(q_BHMK, k_BGSK, v_BGSK, masks)
        return few_queries(q_BHMK, k_BGSK, v_BGSK, masks.mask, self.scores.beta)
