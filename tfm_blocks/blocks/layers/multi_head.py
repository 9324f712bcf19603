"""Multi-head attention, the base class of the attention blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor, nn

from tfm_blocks.blocks.layers.dot_product import (
    AttentionMask,
    BiasesScores,
    RotatesHeads,
    ScoreNormalizer,
    Span,
    Widths,
    bias_between,
    distance,
    few_queries,
    merge_heads,
    one_hot_values,
    sequence_mask,
    split_heads,
    split_widths,
    weighed_attention,
)
from tfm_blocks.blocks.layers.linear import Linear, PartlyBiased
from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.values import Gate, Norm, Part, Position, Rate, Scores, Selection

QKNormKind = Literal["head", "head_gains", "joint", "post_position", "queries"]


def normalise(x_BHNK: Tensor, norm: nn.Module, gain_HK: Tensor | None, kind: QKNormKind) -> Tensor:
    """Normalise queries or keys: x_BHNK -> x_BHNK.

    `joint` normalises the vectors of all heads together; the other kinds normalise each head separately. `gain_HK` are
    the gains of `head_gains`.
    """
    if kind == "joint":
        return torch.unflatten(norm(merge_heads(x_BHNK)), 2, (x_BHNK.shape[1], -1)).transpose(1, 2)
    y_BHNK: Tensor = norm(x_BHNK)
    return y_BHNK if gain_HK is None else y_BHNK * gain_HK[:, None]


SOFTMAX = Part("softmax")
Bias = Literal[True, False, "qkv", "out", "except_keys"]
Heads = tuple[Tensor, Tensor, Tensor, AttentionMask]


def make_part(part: Part, *sizes: int, **shared: Any) -> Any:
    """Construct a part of attention. Arguments of the part that are named in `shared` get those values."""
    arguments = REGISTRY.blocks[part.block].arguments
    known = {name: value for name, value in shared.items() if name in arguments}
    return REGISTRY.make(replace(part, arguments={**part.arguments, **known}), *sizes)


def _stacked(inputs: int, maps: tuple[int, ...], bias: Bias, keys: int, heads: tuple[int, ...]) -> Linear:
    """Return the stacked maps of keys, at the place `keys`, and of values and perhaps queries."""
    options: dict[str, Any] = {"depth_scaled": (keys + 1,), "heads": heads}
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
        """Return the attention weights w_BHTS; each row sums to 1.

        The weight of an attention sink is dropped and the row renormalised.
        """
        q_BHTK, k_BGSK, _, mask = self.prepare(*inputs, **masks)
        w_BHTS = self.attention_weights(q_BHTK, k_BGSK, mask)
        return w_BHTS if self.scores.sums_to_one else w_BHTS / w_BHTS.sum(3, keepdim=True)

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
        self._make_norms(qk_norm, qk_norm_kind, v_norm)
        shared = {"heads": widths.heads, "bias": bias not in (False, "out")}
        self.gate = make_part(gate, D, widths.heads * widths.value, **shared) if gate else None
        self.out_norm: nn.Module | None = REGISTRY.make(out_norm, widths.heads * widths.value) if out_norm else None
        self.position: Any = make_part(position, widths.key, heads=widths.heads) if position else None
        self.scores = make_part(scores, self.score_terms * widths.key, heads=widths.heads)
        self.selection = make_part(selection, widths.key) if selection else None
        self.needs_distances = self.needs_distances or selection is not None
        self.rotates_keys = hasattr(self.position, "rotate_keys")
        self.rotates, self.biases = isinstance(self.position, RotatesHeads), isinstance(self.position, BiasesScores)

    def _make_projections(self, D: int, E: int | None, bias: Bias) -> None:
        maps, qkv_bias = self.widths.maps, bias not in (False, "out")
        heads = (self.widths.heads, self.widths.kv_heads, self.widths.kv_heads)
        if E is None:
            self.qkv = _stacked(D, maps, bias, 1, heads)
        else:
            self.q = Linear(D, maps[0], bias=qkv_bias, heads=heads[:1])
            self.kv = _stacked(E, maps[1:], bias, 0, heads[1:])
        self.out = Linear(self.widths.heads * self.widths.value, D, bias=bias not in (False, "qkv"), depth_scaled=(0,))

    def _make_norms(self, qk_norm: Part | None, kind: QKNormKind, v_norm: Part | None) -> None:
        """Construct the norms of queries, of keys unless `kind` is `queries`, and of values; `head_gains` has gains."""
        if qk_norm is None and kind != "head":
            raise ValueError(f"qk_norm_kind is {kind}, but there is no norm: write qk_norm: rmsnorm, or leave it out")
        self.qk_norm_kind = kind
        self.q_norm, self.q_gain = self._make_norm(qk_norm, kind, self.widths.heads)
        self.k_norm, self.k_gain = self._make_norm(None if kind == "queries" else qk_norm, kind, self.widths.kv_heads)
        self.v_norm: nn.Module | None = REGISTRY.make(v_norm, self.widths.value) if v_norm else None

    def _make_norm(self, norm: Part | None, kind: QKNormKind, heads: int) -> tuple[Any, nn.Parameter | None]:
        K = self.widths.key
        gain_HK = nn.Parameter(torch.empty(heads, K)) if kind == "head_gains" else None
        return REGISTRY.make(norm, heads * K if kind == "joint" else K) if norm else None, gain_HK

    def initialise(self, name: str, generator: Generator) -> None:
        """Initialise the gains to 1."""
        nn.init.ones_(self.get_parameter(name))

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
            q_BHTK, k_BGSK, v_BGSK = self.self_heads(x_BTD, span_T)
        else:
            q_BHTK, (k_BGSK, v_BGSK) = self.own_queries(x_BTD, span_T), self._keys_and_values(kv_BSE)
        keep = masks["keep_BT"] if kv_BSE is None or masks.get("keep_BS") is None else masks["keep_BS"]
        mask = sequence_mask(keep, causal=self.causal, right_padded=masks.get("right_padded_T", True))
        mask = self.with_positions(span_T, Span(0, k_BGSK.shape[2]), score_bias_HTS, mask)
        return self.select(q_BHTK, k_BGSK, v_BGSK, mask)

    def select(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Heads:
        """Restrict the mask to the keys that `selection` chooses."""
        if self.selection is not None:
            masks = masks._replace(mask=self.selection.select(q_BHTK, k_BGSK, masks), causal=False)
        return q_BHTK, k_BGSK, v_BGSK, masks

    def project(self, linear: Linear, x_BND: Tensor) -> Tensor:
        """Project to queries, keys or values, and clamp them to `clip_qkv`."""
        y_BND: Tensor = linear(x_BND)
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
        kind = self.qk_norm_kind
        if norm is not None and kind != "post_position":
            x_BHNK = normalise(x_BHNK, norm, gain_HK, kind)
        if self.rotates and keys and self.rotates_keys:
            x_BHNK = self.position.rotate_keys(x_BHNK, span_N.on(x_BHNK.device))
        elif self.rotates:
            x_BHNK = self.position.rotate(x_BHNK, span_N.on(x_BHNK.device))
        if norm is not None and kind == "post_position":
            x_BHNK = normalise(x_BHNK, norm, gain_HK, kind)
        return x_BHNK

    def finish(self, y_BHTK: Tensor, x_BTD: Tensor) -> Tensor:
        """Merge the outputs of the heads, apply the gate and the norm, and project to the width of the model."""
        y_BTX = merge_heads(y_BHTK)
        y_BTX = y_BTX if self.gate is None else self.gate(x_BTD, y_BTX)
        out_BTD: Tensor = self.out(y_BTX if self.out_norm is None else self.out_norm(y_BTX))
        return out_BTD

    def self_heads(self, x_BND: Tensor, span_N: Span) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of a sequence."""
        w = self.widths
        heads, head_widths = (w.heads, w.kv_heads, w.kv_heads), (w.key, w.key, w.value)
        q_BHNK, k_BHNK, v_BHNK = split_widths(self.project(self.qkv, x_BND), heads, head_widths)
        return self.queries(q_BHNK, span_N), self.keys(k_BHNK, span_N), self.values(v_BHNK)

    def own_queries(self, x_BTD: Tensor, span_T: Span) -> Tensor:
        """Return the queries of a sequence whose keys and values come from elsewhere."""
        (q_BHTK,) = split_heads(self.project(self.q, x_BTD), self.widths.heads, 1)
        return self.queries(q_BHTK, span_T)

    def _keys_and_values(self, kv_BSE: Tensor) -> tuple[Tensor, Tensor]:
        w = self.widths
        k_BGSK, v_BGSK = split_widths(self.project(self.kv, kv_BSE), (w.kv_heads, w.kv_heads), (w.key, w.value))
        return self.keys(k_BGSK, Span(0, kv_BSE.shape[1])), self.values(v_BGSK)

    def with_positions(
        self, span_T: Span, span_S: Span, score_bias_HTS: Tensor | None, masks: AttentionMask
    ) -> AttentionMask:
        """Return the mask with the biases and distances that depend on positions, if they are needed."""
        device = self.out.weight.device
        distance_TS = distance(span_T.on(device), span_S.on(device)) if self.needs_distances else None
        bias_HTS = score_bias_HTS
        if self.biases:
            position_HTS = bias_between(self.position, span_T, span_S, device)
            bias_HTS = position_HTS if score_bias_HTS is None else position_HTS + score_bias_HTS
        return masks._replace(bias=bias_HTS, distance_TS=distance_TS)

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
        return self.finish(self.attend(*self.select(q_BHPK, k_BGSK, v_BGSK, masks)), x_BPD), state

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
            k_BGSK, v_BGSK, masks = self.append(k_BGMK, v_BGMK, state, score_bias_HTS)
        heads = self.select(q_BHMK, k_BGSK, v_BGSK, masks)
        return self.finish(self.attend_few(*heads), x_BMD).view_as(x_R1D), state

    def band(self, position: int) -> tuple[int | None, int]:
        """Return the number of cached positions that a step attends to, None for all, and the distance between them."""
        return self.window, self.dilation

    def append(
        self, k_BGMK: Tensor, v_BGMK: Tensor, state: State, score_bias_HTS: Tensor | None = None
    ) -> tuple[Tensor, Tensor, AttentionMask]:
        """Append the keys and values of the current position to the caches; return all cached ones and the mask."""
        band = self.band(state.position)
        k_BGSK, v_BGSK = state.append("k", k_BGMK, *band), state.append("v", v_BGMK, *band)
        return k_BGSK, v_BGSK, self._past_mask(Span(state.position, 1), state, score_bias_HTS)

    def _past_mask(self, current: Span, state: State, score_bias_HTS: Tensor | None) -> AttentionMask:
        """Return the mask of the current position over the cached positions of all hypotheses."""
        band = self.band(state.position)
        mask = state.beam_mask(*band)
        if score_bias_HTS is None and not self.biases and not self.needs_distances:
            return AttentionMask(mask)
        past = state.past(*band)
        length = (past.stop - past.start - 1) // past.step + 1
        masks = self.with_positions(current, Span(past.start, length, past.step), score_bias_HTS, AttentionMask(mask))
        per_position = (masks.bias, masks.distance_TS)
        bias, distance_1S = (x if x is None else x.repeat_interleave(state.hypotheses, -1) for x in per_position)
        return masks._replace(bias=bias, distance_TS=distance_1S)

    def attend_few(self, q_BHMK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        """Compute `attend` for one step, with a kernel for few queries if neither a bias nor a subclass prevents it."""
        if not self.scores.fused or masks.bias is not None or type(self).attend is not DotProduct.attend:
            return self.attend(q_BHMK, k_BGSK, v_BGSK, masks)
        return few_queries(q_BHMK, k_BGSK, v_BGSK, masks.mask, self.scores.beta)
