"""Local (restricted) self-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.blocks.attention import WHERE as ATTENTION
from tfm_blocks.blocks.attention import SelfAttention
from tfm_blocks.blocks.layers.banded import banded_attention, global_banded_attention
from tfm_blocks.blocks.layers.dot_product import (
    AttentionMask,
    Span,
    distance,
    one_hot_values,
    renormalised,
    split_widths,
    to_heads,
)
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.multi_head import Bias, MultiHead, stacked
from tfm_blocks.blocks.layers.state import State
from tfm_blocks.blocks.shared_attention import RULES as SHARED
from tfm_blocks.blocks.shared_attention import SharedAttention
from tfm_blocks.registry.blocks import block

RANGE = {"r >= 1": "a position sees at least itself"}
WHERE = {**ATTENTION, **RANGE}


class Windowed(MultiHead):
    """Attention in which each query attends to keys near its position, chosen without a matrix of all pairs.

    `read` returns the queries, keys and values of a span of positions, for the inputs of `forward`.
    """

    window: int
    read: Callable[..., tuple[Tensor, Tensor, Tensor]]

    def attend_near(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, keep_BT: Tensor) -> Tensor:
        """Attend from each position to the positions near it: y_BHTK."""
        return banded_attention(q_BHTK, k_BGTK, v_BGTK, keep_BT, r=self.window, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """Return the options that functions of windows share: the mask, dropout, scores and biases."""
        dropout, bias = self.dropout if self.training else 0.0, self.bias if self.biases or self.compares else None
        return {"causal": self.causal, "dropout": dropout, "scores": self.scores, "bias": bias}

    def output(self, x_BTD: Tensor, *inputs: Tensor, keep_BT: Tensor) -> Tensor:
        """Return the output of a sequence from its first position on."""
        heads = self.read(x_BTD, Span(0, x_BTD.shape[1]), *inputs)
        return self.finish(self.attend_near(*heads, keep_BT), x_BTD)

    def weights(self, x_BTD: Tensor, *inputs: Tensor, keep_BT: Tensor, **ports: Tensor) -> Tensor:
        q_BHTK, k_BGTK, _ = self.read(x_BTD, Span(0, x_BTD.shape[1]), *inputs, **ports)
        w_BHTT = self.attend_near(q_BHTK, k_BGTK, one_hot_values(k_BGTK), keep_BT)
        return w_BHTT if self.scores.sums_to_one else renormalised(w_BHTT)

    def bias(self, q_BHTK: Tensor, k_BGSK: Tensor, distance_TS: Tensor) -> Tensor:
        """Return the bias of the scores of keys at these distances, in steps of the window: bias_HTS or bias_BHTS."""
        if self.compares:
            return self.pair_bias(q_BHTK, k_BGSK, distance_TS)
        bias_HTS: Tensor = self.position.of_distance(distance_TS)
        return bias_HTS

    def prefill(self, x_BPD: Tensor, state: State, **ports: Tensor) -> tuple[Tensor, State]:  # type: ignore[override]
        q_BHPK, k_BGPK, v_BGPK = self.read(x_BPD, Span(0, x_BPD.shape[1]), **ports)
        state.fill(k=k_BGPK, v=v_BGPK)
        keep_BP = torch.ones(x_BPD.shape[:2], dtype=torch.bool, device=x_BPD.device)
        return self.finish(self.attend_near(q_BHPK, k_BGPK, v_BGPK, keep_BP), x_BPD), state


def refuse_selection(options: dict[str, Any]) -> None:
    """Raise ValueError if a window has a `selection`."""
    if options.get("selection"):
        raise ValueError("selection chooses among all keys, but each query has a window: use it in attention")


class WindowAttention(Windowed, SelfAttention):  # type: ignore[misc]
    """Self-attention in a window."""

    read = SelfAttention.self_heads

    def __init__(self, D: int, **options: Any) -> None:
        refuse_selection(options)
        super().__init__(D, **options)
        if self.forget is not None:
            raise ValueError("forget_gate has no form in windows: write block: attention, or leave forget_gate out")

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:  # type: ignore[override]
        return self.output(x_BTD, keep_BT=keep_BT)


@block(
    "restricted_attention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where=WHERE,
    source="Vaswani et al. 2017, section 4",
)
class RestrictedAttention(WindowAttention):
    """Self-attention to `r` neighbours, the position itself included: x_BTD -> x_BTD, cost O(n·r·d).

    r // 2 neighbours lie before and (r - 1) // 2 after; with `mask: causal` all r - 1 lie before. Parameters and other
    arguments, except `selection`, are the same as in `attention`, so weights are interchangeable.

    Also known as: sliding-window attention, local attention, windowed attention.
    Use: long sequences; layers of Gemma 2 and 3 and Mistral, with `mask: causal`.
    Example: r: 64
    """

    def __init__(self, D: int, *, r: int, **options: Any) -> None:
        super().__init__(D, **options)
        self.window = r


@block(
    "restricted_shared_attention",
    "x: B T D, k: B T E, v: B T F -> B T D",
    branch=True,
    sees={"k": "mask", "v": "mask"},
    where={**SHARED, **RANGE},
    source="Gemma Team 2025 (Gemma 3n), keys and values of earlier local layers",
)
class RestrictedSharedAttention(Windowed, SharedAttention):
    """`shared_attention` to `r` neighbours, as in `restricted_attention`: x_BTD, k_BTE, v_BTF -> x_BTD, cost O(n·r·d).

    Also known as: cross-layer attention with a sliding window.
    Use: local layers that read keys and values of another local layer.
    Example: k: key, v: value, r: 64
    """

    describe_caches = SharedAttention.describe_caches

    def __init__(self, D: int, E: int, F: int, *, r: int, **options: Any) -> None:
        refuse_selection(options)
        super().__init__(D, E, F, **options)
        self.window = r

    def forward(self, x_BTD: Tensor, k_BTE: Tensor, v_BTF: Tensor, *, keep_BT: Tensor) -> Tensor:  # type: ignore[override]
        return self.output(x_BTD, k_BTE, v_BTF, keep_BT=keep_BT)


@block(
    "dilated_attention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where={**WHERE, "dilation >= 1": "neighbours are at least 1 apart"},
    source="Beltagy et al. 2020 (Longformer), section 3.1, dilated sliding window",
)
class DilatedAttention(RestrictedAttention):
    """`restricted_attention` to every `dilation`-th position: x_BTD -> x_BTD, cost O(n·r·d), range r · dilation.

    The r neighbours, the position itself included, lie `dilation` apart: r // 2 before and (r - 1) // 2 after, or with
    `mask: causal` all r - 1 before.

    Also known as: dilated sliding window, strided attention.
    Use: a longer reach at the cost of `restricted_attention`.
    Example: r: 64
    """

    def __init__(self, D: int, *, dilation: int = 2, **options: Any) -> None:
        super().__init__(D, **options)
        self.dilation = dilation

    def attend_near(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, keep_BT: Tensor) -> Tensor:
        # `apart` sequences of every `apart`-th position: x_(B·apart)HNK
        apart, T = self.dilation, keep_BT.shape[1]
        missing = -T % apart
        padded = (F.pad(x, (0, 0, 0, missing)) for x in (q_BHTK, k_BGTK, v_BGTK))
        q, k, v = (torch.unflatten(x, 2, (-1, apart)).permute(0, 3, 1, 2, 4).flatten(0, 1) for x in padded)
        keep = torch.unflatten(F.pad(keep_BT, (0, missing)), 1, (-1, apart)).transpose(1, 2).flatten(0, 1)
        y = super().attend_near(q, k, v, keep)
        return torch.unflatten(y, 0, (-1, apart)).permute(0, 2, 3, 1, 4).flatten(2, 3)[:, :, :T]

    def bias(self, q_BHTK: Tensor, k_BGSK: Tensor, distance_TS: Tensor) -> Tensor:
        return super().bias(q_BHTK, k_BGSK, distance_TS * self.dilation)


@block(
    "restricted_global_attention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where={**WHERE, "first >= 1": "at least one position is seen by all"},
    source="Beltagy et al. 2020 (Longformer), section 3.1, global attention; with mask: causal, Xiao et al. 2023",
)
class RestrictedGlobalAttention(RestrictedAttention):
    """`restricted_attention` with `first` global positions, which attend to all and all to them: x_BTD -> x_BTD.

    Cost O(n·(r + first)·d). With `mask: causal` every position, global or not, attends only to itself and to earlier
    positions. With `separate`, which needs attention in both directions, the queries of the global positions, and the
    keys and values that they read, are separate projections; the norms, the gate and the output are shared.

    Also known as: Longformer attention, global tokens.
    Use: long sequences whose first positions summarise the rest; as in Longformer and LED, with `separate: true`.
    Example: r: 64
    """

    def __init__(self, D: int, *, first: int = 1, separate: bool = False, bias: Bias = True, **options: Any) -> None:
        super().__init__(D, bias=bias, **options)
        self.first, self.separate = first, separate
        if separate and self.causal:
            raise ValueError("separate projections are for attention in both directions: leave mask or separate out")
        if separate:
            maps, (G, H) = self.widths.maps, (self.widths.kv_heads, self.widths.heads)
            self.global_q = Linear(D, maps[0], bias=bias not in (False, "out"), heads=(H,))
            self.global_kv = stacked(D, maps[1:], bias, 0, depth_scaled=(1,), heads=(G, G))

    def global_heads(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries of the global positions, and the keys and values of all, with separate projections."""
        w, (_, T, _) = self.widths, x_BTD.shape
        q_BHFK = to_heads(self.clamped(self.global_q(x_BTD[:, : self.first])), w.heads)
        k_BGTK, v_BGTK = split_widths(self.clamped(self.global_kv(x_BTD)), (w.kv_heads, w.kv_heads), (w.key, w.value))
        spans = Span(0, q_BHFK.shape[2]), Span(0, T)
        return self.queries(q_BHFK, spans[0]), self.keys(k_BGTK, spans[1]), self.values(v_BGTK)

    def attend_near(
        self,
        q_BHTK: Tensor,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        keep_BT: Tensor,
        heads: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        sizes: dict[str, Any] = {"r": self.window, "first": self.first, "heads": heads}
        return global_banded_attention(q_BHTK, k_BGTK, v_BGTK, keep_BT, **sizes, **self.options)

    def output(self, x_BTD: Tensor, *inputs: Tensor, keep_BT: Tensor) -> Tensor:
        heads = self.global_heads(x_BTD) if self.separate else None
        near = self.read(x_BTD, Span(0, x_BTD.shape[1]))
        return self.finish(self.attend_near(*near, keep_BT, heads), x_BTD)

    def weights(self, x_BTD: Tensor, *inputs: Tensor, keep_BT: Tensor, **ports: Tensor) -> Tensor:
        if not self.separate:
            return super().weights(x_BTD, keep_BT=keep_BT)
        (q_BHTK, k_BGTK, _), (q_BHFK, key_BGTK, _) = self.read(x_BTD, Span(0, x_BTD.shape[1])), self.global_heads(x_BTD)
        heads = q_BHFK, key_BGTK, one_hot_values(key_BGTK)
        w_BHTT = self.attend_near(q_BHTK, k_BGTK, one_hot_values(k_BGTK), keep_BT, heads)
        return w_BHTT if self.scores.sums_to_one else renormalised(w_BHTT)

    def step(self, x_R1D: Tensor, state: State, score_bias_HTS: Tensor | None = None) -> tuple[Tensor, State]:
        """Read the next target position, which attends to the last r positions and the first ones."""
        x_BMD = state.fold_beams(x_R1D)
        q_BHMK, k_BGMK, v_BGMK = self.self_heads(x_BMD, Span(state.position, 1))
        near = state.append("k", k_BGMK, self.window), state.append("v", v_BGMK, self.window)
        first = slice(0, min(self.first, state.past(self.window).start))
        early = (state.caches[name][:, :, first].flatten(2, 3) for name in ("k", "v"))
        k_BGSK, v_BGSK = (torch.cat(both, 2) for both in zip(early, near, strict=True))
        mask = state.beam_mask(self.window)
        if mask is not None and state.path_BMTM is not None:
            mask = torch.cat((state.path_BMTM[:, :, first].flatten(2)[:, None], mask), 3)
        masks = AttentionMask(mask)
        bias = self.options["bias"]
        if bias is not None:
            past_N = torch.arange(state.position + 1, device=x_BMD.device)
            seen_S = torch.cat((past_N[first], past_N[state.past(self.window)]))
            distance_1S = distance(past_N[-1:], seen_S).repeat_interleave(state.hypotheses, -1)
            masks = masks.plus(bias(q_BHMK, k_BGSK, distance_1S))
        return self.finish(self.attend(q_BHMK, k_BGSK, v_BGSK, masks), x_BMD).view_as(x_R1D), state
