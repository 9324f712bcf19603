"""Multi-head attention, of which the registered blocks change a part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tfm_blocks.layers.attention_position import BiasesScores, RotatesHeads, Span, bias_between, distance
from tfm_blocks.layers.dot_product import AttentionMask, causal_mask, few_queries, weighed_attention
from tfm_blocks.layers.heads import Widths, merge_heads, one_hot_values, repeat_kv, split_heads, split_widths
from tfm_blocks.layers.linear import Linear
from tfm_blocks.layers.score_normalizer import ScoreNormalizer
from tfm_blocks.layers.state import CacheShape, State
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.values import Part

SOFTMAX = Part("softmax")


def part_of(part: Part, widths: Widths) -> Any:
    """The module of a position or of scores, for heads of these widths."""
    known = {**part.arguments, "heads": widths.heads} if "heads" in part.arguments else part.arguments
    return REGISTRY.make(replace(part, arguments=known), widths.key)


class MultiHead(nn.Module):
    """Self-attention, and attention to another sequence where the width `E` of its vectors is given.

    Queries, keys and values are made by one map, or by one of queries and one of the others: `qkv`, or `q` and `kv`.
    The output map has a bias where they do, unless `out_bias` says otherwise.
    A step sees the last `most` positions, or of every so many; all of them where `most` is None. Subclasses override
    `project`, `queries`, `keys`, `attend`, `shares` or `finish`.
    """

    most: int | None = None
    every = 1
    measures = False  # `attend` asks for distances

    def __init__(
        self,
        D: int,
        E: int | None,
        widths: Widths,
        *,
        mask: str | None,
        dropout: float,
        bias: bool = True,
        out_bias: bool | None = None,
        position: Part | None = None,
        scores: Part = SOFTMAX,
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
        self.dropout = dropout
        maps = widths.maps
        if E is None:
            self.qkv = Linear(D, sum(maps), parts=maps, bias=bias, depth_scaled=(2,))
        else:
            self.q = Linear(D, maps[0], bias=bias)
            self.kv = Linear(E, maps[1] + maps[2], parts=maps[1:], bias=bias, depth_scaled=(1,))
        self.out = Linear(
            widths.heads * widths.value, D, bias=bias if out_bias is None else out_bias, depth_scaled=(0,)
        )
        self.position: Any = part_of(position, widths) if position else None
        self.scores: ScoreNormalizer = part_of(scores, widths)
        self.turns = isinstance(self.position, RotatesHeads)
        self.biases = isinstance(self.position, BiasesScores)

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
        """Apply a map to queries, keys or values."""
        y_BND: Tensor = map(x_BND)
        return y_BND

    def queries(self, q_BHTK: Tensor, span_T: Span) -> Tensor:
        """Queries with their positions, of which there is one for all or one for each."""
        turned: Tensor = self.position.turn(q_BHTK, span_T.on(q_BHTK.device)) if self.turns else q_BHTK
        return turned

    def keys(self, k_BGSK: Tensor, span_S: Span) -> Tensor:
        """Keys with their positions."""
        turned: Tensor = self.position.turn(k_BGSK, span_S.on(k_BGSK.device)) if self.turns else k_BGSK
        return turned

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, look: AttentionMask) -> Tensor:
        """y_BHTK."""
        dropout = self.dropout if self.training else 0.0
        return weighed_attention(q_BHTK, k_BGSK, v_BGSK, look, self.scores, dropout=dropout)

    def finish(self, y_BHTK: Tensor, x_BTD: Tensor) -> Tensor:
        """What the heads found, put together."""
        out_BTD: Tensor = self.out(merge_heads(y_BHTK))
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


class SelfAttention(MultiHead):
    """Attention within one sequence."""

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Tensor:  # type: ignore[override]
        return super().forward(x_BTD, keep_BT=keep_BT, right_padded_T=right_padded_T)

    def weights(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Tensor:  # type: ignore[override]
        """How much each head of each position looks at what: w_BHTT, of which each row adds up to 1."""
        return super().weights(x_BTD, keep_BT=keep_BT, right_padded_T=right_padded_T)
