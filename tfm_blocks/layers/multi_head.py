"""Multi-head attention, of which the registered blocks change a part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from tfm_blocks.layers.attention_position import BiasesScores, RotatesHeads, Span, bias_between, distance
from tfm_blocks.layers.dot_product import AttentionMask, causal_mask, few_queries, weighed_attention
from tfm_blocks.layers.heads import Widths, merge_heads, one_hot_values, repeat_kv, split_heads, split_widths
from tfm_blocks.layers.linear import Linear
from tfm_blocks.layers.qk_norm import QKNormKind, normalise
from tfm_blocks.layers.score_normalizer import ScoreNormalizer
from tfm_blocks.layers.state import CacheShape, State
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.values import Gate, Norm, Part, Position, Rate, Scores

SOFTMAX = Part("softmax")
Bias = Literal[True, False, "qkv", "out"]


def part_of(part: Part, *sizes: int, **own: Any) -> Any:
    """Construct a part of attention. Its arguments of the names in `own` are set to those values."""
    arguments = REGISTRY.blocks[part.block].arguments
    known = {name: value for name, value in own.items() if name in arguments}
    return REGISTRY.make(replace(part, arguments={**part.arguments, **known}), *sizes)


class MultiHead(nn.Module):
    """Self-attention, and attention to another sequence where the width `E` of its vectors is given.

    Queries, keys and values are made by one map, or by one of queries and one of the others: `qkv`, or `q` and `kv`.
    A step sees the last `most` positions, or of every so many; all of them where `most` is None. Subclasses override
    `attend` or `shares`, and pass the keyword-only arguments on.
    """

    most: int | None = None
    every = 1
    measures = False  # `attend` asks for distances

    def __init__(
        self,
        D: int,
        E: int | None,
        widths: Widths,
        mask: Literal["causal"] | None = None,
        position: Position | None = None,
        *,
        scores: Scores = SOFTMAX,
        qk_norm: Norm | None = None,
        qk_norm_kind: QKNormKind = "head",
        gate: Gate | None = None,
        clip_qkv: float | None = None,
        bias: Bias = True,
        attention_dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        if mask and E is not None:
            raise ValueError(
                "mask: causal orders the positions of one sequence, but kv is another: leave one of them out"
            )
        if widths.heads % widths.kv_heads:
            raise ValueError(f"kv_heads must divide heads, but heads = {widths.heads}, kv_heads = {widths.kv_heads}")
        self.widths = widths
        self.causal = mask == "causal"
        self.dropout = attention_dropout
        self.clip_qkv = clip_qkv
        self._make_maps(D, E, bias)
        self._make_norms(qk_norm, qk_norm_kind)
        own = {"heads": widths.heads, "bias": bias in (True, "qkv")}
        self.gate = part_of(gate, D, widths.heads * widths.value, **own) if gate else None
        self.position: Any = part_of(position, widths.key, heads=widths.heads) if position else None
        self.scores: ScoreNormalizer = part_of(scores, widths.key, heads=widths.heads)
        self.turns = isinstance(self.position, RotatesHeads)
        self.biases = isinstance(self.position, BiasesScores)

    def _make_maps(self, D: int, E: int | None, bias: Bias) -> None:
        maps, qkv_bias = self.widths.maps, bias in (True, "qkv")
        if E is None:
            self.qkv = Linear(D, sum(maps), parts=maps, bias=qkv_bias, depth_scaled=(2,))
        else:
            self.q = Linear(D, maps[0], bias=qkv_bias)
            self.kv = Linear(E, maps[1] + maps[2], parts=maps[1:], bias=qkv_bias, depth_scaled=(1,))
        self.out = Linear(self.widths.heads * self.widths.value, D, bias=bias in (True, "out"), depth_scaled=(0,))

    def _make_norms(self, norm: Part | None, kind: QKNormKind) -> None:
        """Make the norms of queries and keys, and with `head_gains` the gains of each head."""
        if norm is None and kind != "head":
            raise ValueError(f"qk_norm_kind is {kind}, but there is no norm: write qk_norm: rmsnorm, or leave it out")
        self.qk_norm_kind = kind
        self.q_norm, self.q_gain = self._make_norm(norm, kind, self.widths.heads)
        self.k_norm, self.k_gain = self._make_norm(norm, kind, self.widths.kv_heads)

    def _make_norm(
        self, norm: Part | None, kind: QKNormKind, heads: int
    ) -> tuple[nn.Module | None, nn.Parameter | None]:
        """The norm of so many heads, and with `head_gains` their gains."""
        K = self.widths.key
        gain_HK = nn.Parameter(torch.empty(heads, K)) if kind == "head_gains" else None
        return REGISTRY.make(norm, heads * K if kind == "joint" else K) if norm else None, gain_HK

    def initialise(self, name: str, generator: Generator) -> None:
        """The gains start at 1."""
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
        q_BHTK, k_BGSK, v_BGSK = self._heads(x_BTD, kv_BSE)
        keep = keep_BT if kv_BSE is None or keep_BS is None else keep_BS
        look = self._look(q_BHTK, k_BGSK, score_bias_HTS, keep, right_padded_T)
        return self.finish(self.attend(q_BHTK, k_BGSK, v_BGSK, look), x_BTD)

    def weights(
        self,
        x_BTD: Tensor,
        kv_BSE: Tensor | None = None,
        score_bias_HTS: Tensor | None = None,
        *,
        keep_BT: Tensor,
        keep_BS: Tensor | None = None,
        right_padded_T: bool = True,
    ) -> Tensor:
        """How much each head of each position looks at what: w_BHTS, of which each row adds up to 1.

        What a head leaves to its sink is left out, and the rest counted as 1.
        """
        q_BHTK, k_BGSK, _ = self._heads(x_BTD, kv_BSE)
        keep = keep_BT if kv_BSE is None or keep_BS is None else keep_BS
        w_BHTS = self.shares(q_BHTK, k_BGSK, self._look(q_BHTK, k_BGSK, score_bias_HTS, keep, right_padded_T))
        return w_BHTS if self.scores.whole else w_BHTS / w_BHTS.sum(3, keepdim=True)

    def shares(self, q_BHTK: Tensor, k_BGSK: Tensor, look: AttentionMask) -> Tensor:
        """The weights of an attention: w_BHTS."""
        return self.attend(q_BHTK, k_BGSK, one_hot_values(k_BGSK), look)

    def project(self, map: Linear, x_BND: Tensor) -> Tensor:
        """Apply a map to queries, keys or values, and clamp them."""
        y_BND: Tensor = map(x_BND)
        return y_BND if self.clip_qkv is None else y_BND.clamp(-self.clip_qkv, self.clip_qkv)

    def queries(self, q_BHTK: Tensor, span_T: Span) -> Tensor:
        """Queries with their norm and their positions, of which there is one for all or one for each."""
        return self._normalised_in_order(q_BHTK, self.q_norm, self.q_gain, span_T)

    def keys(self, k_BGSK: Tensor, span_S: Span) -> Tensor:
        """Keys with their norm and their positions."""
        return self._normalised_in_order(k_BGSK, self.k_norm, self.k_gain, span_S)

    def _normalised_in_order(
        self, x_BHNK: Tensor, norm: nn.Module | None, gain_HK: Tensor | None, span_N: Span
    ) -> Tensor:
        kind = self.qk_norm_kind
        if norm is not None and kind != "post_position":
            x_BHNK = normalise(x_BHNK, norm, gain_HK, kind)
        if self.turns:
            x_BHNK = self.position.turn(x_BHNK, span_N.on(x_BHNK.device))
        if norm is not None and kind == "post_position":
            x_BHNK = normalise(x_BHNK, norm, gain_HK, kind)
        return x_BHNK

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, look: AttentionMask) -> Tensor:
        """y_BHTK."""
        dropout = self.dropout if self.training else 0.0
        return weighed_attention(q_BHTK, k_BGSK, v_BGSK, look, self.scores, dropout=dropout)

    def finish(self, y_BHTK: Tensor, x_BTD: Tensor) -> Tensor:
        """Merge the outputs of the heads, apply the gate and map them to the width of the model."""
        y_BTX = merge_heads(y_BHTK)
        out_BTD: Tensor = self.out(y_BTX if self.gate is None else self.gate(x_BTD, y_BTX))
        return out_BTD

    def self_heads(self, x_BND: Tensor, span_N: Span) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of one sequence."""
        w = self.widths
        heads, wide = (w.heads, w.kv_heads, w.kv_heads), (w.key, w.key, w.value)
        q_BHNK, k_BHNK, v_BHNK = split_widths(self.project(self.qkv, x_BND), heads, wide)
        return self.queries(q_BHNK, span_N), self.keys(k_BHNK, span_N), v_BHNK

    def _queries(self, x_BTD: Tensor, span_T: Span) -> Tensor:
        (q_BHTK,) = split_heads(self.project(self.q, x_BTD), self.widths.heads, 1)
        return self.queries(q_BHTK, span_T)

    def _keys_and_values(self, kv_BSE: Tensor) -> tuple[Tensor, Tensor]:
        w = self.widths
        k_BGSK, v_BGSK = split_widths(self.project(self.kv, kv_BSE), (w.kv_heads, w.kv_heads), (w.key, w.value))
        return self.keys(k_BGSK, Span(0, kv_BSE.shape[1])), v_BGSK

    def _heads(self, x_BTD: Tensor, kv_BSE: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        span_T = Span(0, x_BTD.shape[1])
        if kv_BSE is None:
            return self.self_heads(x_BTD, span_T)
        return self._queries(x_BTD, span_T), *self._keys_and_values(kv_BSE)

    def _look(
        self, q_BHTK: Tensor, k_BGSK: Tensor, score_bias_HTS: Tensor | None, keep_BS: Tensor, right_padded: bool
    ) -> AttentionMask:
        """Padding that comes last needs no mask where only the past is looked at."""
        spans = (Span(0, q_BHTK.shape[2]), Span(0, k_BGSK.shape[2]))
        if not self.causal:
            return self._ordered(*spans, score_bias_HTS, keep_BS[:, None, None, :])
        return self._ordered(
            *spans, score_bias_HTS, None if right_padded else causal_mask(keep_BS), causal=right_padded
        )

    def _ordered(
        self,
        span_T: Span,
        span_S: Span,
        score_bias_HTS: Tensor | None,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
    ) -> AttentionMask:
        """With what the order of positions gives: biases and distances, where they are needed."""
        device = self.out.weight.device
        distance_TS = distance(span_T.on(device), span_S.on(device)) if self.measures else None
        bias_HTS = score_bias_HTS
        if self.biases:
            own_HTS = bias_between(self.position, span_T, span_S, device)
            bias_HTS = own_HTS if score_bias_HTS is None else own_HTS + score_bias_HTS
        return AttentionMask(mask, causal, bias_HTS, distance_TS)

    def start(self, kv_BSE: Tensor | None = None, *, keep_BS: Tensor | None = None, room: CacheShape) -> State:
        """Room for keys and values of the target; or those of `kv_BSE`, which do not change."""
        w = self.widths
        if kv_BSE is None:
            return State(caches={"k": room.cache(w.kv_heads, w.key), "v": room.cache(w.kv_heads, w.value)})
        assert keep_BS is not None
        k_BGSK, v_BGSK = self._keys_and_values(kv_BSE)
        return State(fixed={"k_BGSK": k_BGSK.contiguous(), "v_BGSK": v_BGSK.contiguous(), "keep_BS": keep_BS})

    def prefill(self, x_BPD: Tensor, state: State, score_bias_HTS: Tensor | None = None) -> tuple[Tensor, State]:
        """The first P target positions at once: x_BPD -> x_BPD."""
        span_P = Span(0, x_BPD.shape[1])
        if state.fixed:
            k_BGSK, v_BGSK, keep_BS = (state.fixed[name] for name in ("k_BGSK", "v_BGSK", "keep_BS"))
            look = self._ordered(span_P, Span(0, k_BGSK.shape[2]), score_bias_HTS, keep_BS[:, None, None])
            return self.finish(self.attend(self._queries(x_BPD, span_P), k_BGSK, v_BGSK, look), x_BPD), state
        q_BHPK, k_BGPK, v_BGPK = self.self_heads(x_BPD, span_P)
        state.fill(k=k_BGPK, v=v_BGPK)
        look = self._ordered(span_P, span_P, score_bias_HTS, causal=True)
        return self.finish(self.attend(q_BHPK, k_BGPK, v_BGPK, look), x_BPD), state

    def step(self, x_R1D: Tensor, state: State, score_bias_HTS: Tensor | None = None) -> tuple[Tensor, State]:
        """One more target position: x_R1D -> x_R1D. The M hypotheses of a sentence are so many queries."""
        x_BMD, here = state.abreast(x_R1D), Span(state.position, 1)
        if state.fixed:
            q_BHMK = self._queries(x_BMD, here)
            k_BGSK, v_BGSK, keep_BS = (state.fixed[name] for name in ("k_BGSK", "v_BGSK", "keep_BS"))
            look = self._ordered(here, Span(0, k_BGSK.shape[2]), score_bias_HTS, keep_BS[:, None, None])
        else:
            q_BHMK, k_BGMK, v_BGMK = self.self_heads(x_BMD, here)
            seen = (self.most, self.every)
            k_BGSK, v_BGSK = state.remember("k", k_BGMK, *seen), state.remember("v", v_BGMK, *seen)
            look = self._past(here, state, score_bias_HTS)
        return self.finish(self._attend_few(q_BHMK, k_BGSK, v_BGSK, look), x_BMD).view_as(x_R1D), state

    def _past(self, here: Span, state: State, score_bias_HTS: Tensor | None) -> AttentionMask:
        """What the present position sees of its past, of all hypotheses side by side."""
        mask = state.own(self.most, self.every)
        if score_bias_HTS is None and not self.biases and not self.measures:
            return AttentionMask(mask)
        past = state.past(self.most, self.every)
        length = (past.stop - past.start - 1) // past.step + 1
        look = self._ordered(here, Span(past.start, length, past.step), score_bias_HTS)
        both = (look.bias, look.distance_TS)
        bias, distance_1S = (one if one is None else one.repeat_interleave(state.hypotheses, -1) for one in both)
        return AttentionMask(mask, False, bias, distance_1S)

    def _attend_few(self, q_BHMK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, look: AttentionMask) -> Tensor:
        if not self.scores.fused or look.bias is not None or type(self).attend is not MultiHead.attend:
            return self.attend(q_BHMK, k_BGSK, v_BGSK, look)
        k_BHSK, v_BHSK = (repeat_kv(one, self.widths.heads) for one in (k_BGSK, v_BGSK))
        return few_queries(q_BHMK, k_BHSK, v_BHSK, look.mask, self.scores.beta)
