"""Attention to a prefix and to the past, in one softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfm_blocks.blocks.attention import WHERE
from tfm_blocks.blocks.layers.dot_product import AttentionMask, Span, causal_mask, widths
from tfm_blocks.blocks.layers.multi_head import Heads, MultiHead
from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.registry.blocks import block


@block(
    "prefix_attention",
    "x: B T D, prefix: B S D -> B T D",
    branch=True,
    sees={"x": "past", "prefix": "all"},
    where=WHERE,
    source="Raffel et al. 2020, section 3.2.1, prefix LM; He et al. 2018, layer-wise coordination",
)
class PrefixAttention(MultiHead):
    """Causal self-attention in which each position also attends to a whole prefix: x_BTD -> x_BTD.

    softmax(q [k of the prefix; k of the past]^T / √K) [v of the prefix; v of the past]: a single projection computes
    the keys and values of both. The prefix is prefix_BSD without its padding; another block computes it, such as an
    encoder.

    Also known as: prefix language model, PrefixLM.
    Use: a decoder that continues a sequence that is read from both sides.
    Cost: n · (n + m) · d multiply-adds for n positions after a prefix of m, up to a constant factor.
    """

    def __init__(
        self,
        D: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        d_head: int | None = None,
        d_value: int | None = None,
        **options: Any,
    ) -> None:
        if options.get("selection"):
            raise ValueError("selection compares the positions of one sequence, but prefix is another: leave it out")
        super().__init__(D, D, widths(D, heads, kv_heads, d_head, d_value), **options)

    def forward(  # type: ignore[override]
        self, x_BTD: Tensor, prefix_BSD: Tensor, *, keep_BT: Tensor, keep_BS: Tensor
    ) -> Tensor:
        return self.finish(self.attend(*self.prepare(x_BTD, prefix_BSD, keep_BT=keep_BT, keep_BS=keep_BS)), x_BTD)

    def prepare(  # type: ignore[override]
        self, x_BTD: Tensor, prefix_BSD: Tensor, *, keep_BT: Tensor, keep_BS: Tensor
    ) -> Heads:
        """Return the queries of x, and the keys, values and mask of the prefix and then of x."""
        k_BGNK, v_BGNK = self._keys_and_values(torch.cat((prefix_BSD, x_BTD), 1))
        q_BHTK = self.own_queries(x_BTD, Span(0, x_BTD.shape[1]))
        return q_BHTK, k_BGNK, v_BGNK, _prefix_mask(keep_BS, causal_mask(keep_BT))

    def start(self, prefix_BSD: Tensor, *, keep_BS: Tensor, room: CacheShape) -> State:  # type: ignore[override]
        k_BGSK, v_BGSK = self._keys_and_values(prefix_BSD)
        return State({"k_BGSK": k_BGSK, "v_BGSK": v_BGSK, "keep_BS": keep_BS}, self.caches(room))

    def prefill(self, x_BPD: Tensor, state: State) -> tuple[Tensor, State]:  # type: ignore[override]
        k_BGPK, v_BGPK = self._keys_and_values(x_BPD)
        state.fill(k=k_BGPK, v=v_BGPK)
        past_B1PP = causal_mask(torch.ones(x_BPD.shape[:2], dtype=torch.bool, device=x_BPD.device))
        return self._continue(x_BPD, Span(0, x_BPD.shape[1]), k_BGPK, v_BGPK, past_B1PP, state), state

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:  # type: ignore[override]
        x_BMD = state.fold_beams(x_R1D)
        k_BGMK, v_BGMK = self._keys_and_values(x_BMD)
        k_BGNK, v_BGNK = state.append("k", k_BGMK), state.append("v", v_BGMK)
        past_B1MN = state.beam_mask()
        if past_B1MN is None:
            past_B1MN = torch.ones(x_BMD.shape[0], 1, 1, k_BGNK.shape[2], dtype=torch.bool, device=x_BMD.device)
        return self._continue(x_BMD, Span(state.position, 1), k_BGNK, v_BGNK, past_B1MN, state).view_as(x_R1D), state

    def _continue(
        self, x_BMD: Tensor, span: Span, k_BGNK: Tensor, v_BGNK: Tensor, past_B1MN: Tensor, state: State
    ) -> Tensor:
        """Attend to the prefix and to the target positions that the mask `past_B1MN` allows."""
        k, v = torch.cat((state.fixed["k_BGSK"], k_BGNK), 2), torch.cat((state.fixed["v_BGSK"], v_BGNK), 2)
        masks = _prefix_mask(state.fixed["keep_BS"], past_B1MN)
        return self.finish(self.attend(self.own_queries(x_BMD, span), k, v, masks), x_BMD)


def _prefix_mask(keep_BS: Tensor, past_B1TN: Tensor) -> AttentionMask:
    """Return the mask over the prefix, without its padding, and over the past positions of the sequence."""
    keep_B1TS = keep_BS[:, None, None].expand(-1, -1, past_B1TN.shape[2], -1)
    return AttentionMask(torch.cat((keep_B1TS, past_B1TN), 3))
