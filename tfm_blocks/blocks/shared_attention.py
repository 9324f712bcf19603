"""Attention whose keys and values are nodes, which several layers can read."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from tfm_blocks.blocks.attention import WHERE as ATTENTION
from tfm_blocks.blocks.layers.dot_product import AttentionMask, Span, Widths, sequence_mask, split_heads
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.multi_head import Bias, Heads, MultiHead
from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.registry.blocks import block
from tfm_blocks.registry.values import Position

OWN_WIDTHS = ("D %", "d_head", "d_value")  # begin the rules of `attention` on widths that the ports set here


@block(
    "shared_attention",
    "x: B T D, k: B T E, v: B T F -> B T D",
    branch=True,
    sees={"k": "mask", "v": "mask"},
    where={
        **{rule: sentence for rule, sentence in ATTENTION.items() if not rule.startswith(OWN_WIDTHS)},
        "E % heads == 0 unless kv_heads": "the width of k must split evenly into heads",
        "E % kv_heads == 0": "the width of k must split evenly into heads",
        "F % heads == 0 unless kv_heads": "the width of v must split evenly into heads",
        "F % kv_heads == 0": "the width of v must split evenly into heads",
    },
    source="Sun et al. 2024 (YOCO), section 2.2; values of another layer: Zhou et al. 2024 (ResFormer), section 3",
)
class SharedAttention(MultiHead):
    """`attention` with projected keys k and values v from other nodes: x_BTD, k_BTE, v_BTF -> x_BTD.

    Only queries and the output have projections here. k contains `kv_heads` heads of width E / `kv_heads`, which is
    also the width of the queries, and v as many heads of width F / `kv_heads`. `kv_heads` defaults to `heads`.
    `qk_norm` and `position` act on the keys here, so k is the projection before both. Other arguments are the same as
    in `attention`, and so is the result if k and v are its projections of x.

    Layers that read one node for k and v share keys and values. If k and v are the same node, values are keys. If v is
    a mix of two nodes, values of an earlier layer flow into this layer.

    Also known as: cross-layer attention, KV sharing (YOCO, Gemma 3n); shared keys and values, K = V; value residual.
    Use: keys and values of another layer, or values that are more than a projection.
    Example: k: key, v: value
    """

    def __init__(
        self,
        D: int,
        E: int,
        F: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        mask: Literal["causal"] | None = None,
        position: Position | None = None,
        **options: Any,
    ) -> None:
        groups = heads if kv_heads is None else kv_heads
        super().__init__(D, None, Widths(heads, groups, E // groups, F // groups), mask, position, **options)

    def _make_projections(self, D: int, E: int | None, bias: Bias) -> None:
        w = self.widths
        self.q = Linear(D, w.maps[0], bias=bias in (True, "qkv"), heads=(w.heads,))
        self.out = Linear(w.heads * w.value, D, bias=bias in (True, "out"), depth_scaled=(0,))

    def forward(  # type: ignore[override]
        self, x_BTD: Tensor, k_BTE: Tensor, v_BTF: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True
    ) -> Tensor:
        heads = self.prepare(x_BTD, k_BTE, v_BTF, keep_BT=keep_BT, right_padded_T=right_padded_T)
        return self.finish(self.attend(*heads), x_BTD)

    def prepare(  # type: ignore[override]
        self, x_BTD: Tensor, k_BTE: Tensor, v_BTF: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True
    ) -> Heads:
        masks = sequence_mask(keep_BT, causal=self.causal, right_padded=right_padded_T)
        return self._heads_from_start(x_BTD, k_BTE, v_BTF, masks)

    def _heads_from_start(self, x_BTD: Tensor, k_BTE: Tensor, v_BTF: Tensor, masks: AttentionMask) -> Heads:
        span_T = Span(0, x_BTD.shape[1])
        k_BGTK, v_BGTK = self._split(k_BTE, v_BTF, span_T)
        return self.own_queries(x_BTD, span_T), k_BGTK, v_BGTK, self.with_positions(span_T, span_T, None, masks)

    def _split(self, k_BTE: Tensor, v_BTF: Tensor, span_T: Span) -> tuple[Tensor, Tensor]:
        """Return the keys, normalised and with positions, and the values."""
        groups = self.widths.kv_heads
        (k_BGTK,), (v_BGTK,) = split_heads(k_BTE, groups, 1), split_heads(v_BTF, groups, 1)
        return self.keys(k_BGTK, span_T), v_BGTK

    def start(self, *, room: CacheShape) -> State:  # type: ignore[override]
        return State(caches=self.caches(room))

    def prefill(  # type: ignore[override]
        self, x_BPD: Tensor, state: State, k_BTE: Tensor, v_BTF: Tensor
    ) -> tuple[Tensor, State]:
        q_BHPK, k_BGPK, v_BGPK, masks = self._heads_from_start(x_BPD, k_BTE, v_BTF, AttentionMask(causal=True))
        state.fill(k=k_BGPK, v=v_BGPK)
        return self.finish(self.attend(q_BHPK, k_BGPK, v_BGPK, masks), x_BPD), state

    def step(  # type: ignore[override]
        self, x_R1D: Tensor, state: State, k_BTE: Tensor, v_BTF: Tensor
    ) -> tuple[Tensor, State]:
        """Process the next position of each hypothesis: k_BTE and v_BTF are its key and value."""
        x_BMD, current = state.fold_beams(x_R1D), Span(state.position, 1)
        keys_and_values = self._split(state.fold_beams(k_BTE), state.fold_beams(v_BTF), current)
        k_BGSK, v_BGSK, masks = self.append(*keys_and_values, state)
        y_BHMK = self.attend_few(self.own_queries(x_BMD, current), k_BGSK, v_BGSK, masks)
        return self.finish(y_BHMK, x_BMD).view_as(x_R1D), state
