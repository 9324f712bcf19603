"""Local self-attention with a few global positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfm_blocks.blocks.restricted import WHERE, RestrictedAttention
from tfm_blocks.layers.attention_position import Span, distance
from tfm_blocks.layers.dot_product import AttentionMask
from tfm_blocks.layers.global_banded import global_banded_attention
from tfm_blocks.layers.state import State
from tfm_blocks.registry.blocks import block


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
    positions.

    Also known as: Longformer attention, global tokens.
    Use: long sequences whose first positions summarise the rest.
    Example: r: 64
    """

    def __init__(self, D: int, *, first: int = 1, **options: Any) -> None:
        super().__init__(D, **options)
        self.first = first

    def attend_near(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, keep_BT: Tensor) -> Tensor:
        assert self.window is not None
        return global_banded_attention(
            q_BHTK,
            k_BGTK,
            v_BGTK,
            keep_BT,
            r=self.window,
            first=self.first,
            causal=self.causal,
            dropout=self.dropout if self.training else 0.0,
            scores=self.scores,
            bias=self.of_distance if self.biases else None,
        )

    def step(self, x_R1D: Tensor, state: State, score_bias_HTS: Tensor | None = None) -> tuple[Tensor, State]:
        """Read the next target position: x_R1D -> x_R1D. It attends to the last r positions and the first ones."""
        x_BMD = state.fold_beams(x_R1D)
        q_BHMK, k_BGMK, v_BGMK = self.self_heads(x_BMD, Span(state.position, 1))
        near = state.append("k", k_BGMK, self.window), state.append("v", v_BGMK, self.window)
        first = slice(0, min(self.first, state.past(self.window).start))
        early = (state.caches[name][:, :, first].flatten(2, 3) for name in ("k", "v"))
        k_BGSK, v_BGSK = (torch.cat(both, 2) for both in zip(early, near, strict=True))
        mask = state.beam_mask(self.window)
        if mask is not None and state.path_BMTM is not None:
            mask = torch.cat((state.path_BMTM[:, :, first].flatten(2)[:, None], mask), 3)
        masks = AttentionMask(mask, bias=self._bias_of_step(state, first) if self.biases else None)
        return self.finish(self.attend(q_BHMK, k_BGSK, v_BGSK, masks), x_BMD).view_as(x_R1D), state

    def _bias_of_step(self, state: State, first: slice) -> Tensor:
        """Return the bias from the current position to those it attends to, for all hypotheses: bias_H1S."""
        past_N = torch.arange(state.position + 1, device=self.out.weight.device)
        seen_S = torch.cat((past_N[first], past_N[state.past(self.window)]))
        return self.of_distance(distance(past_N[-1:], seen_S)).repeat_interleave(state.hypotheses, -1)
