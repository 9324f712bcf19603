"""Attention whose keys and values are nodes, which several layers can read."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from tfm_blocks.blocks.attention import WHERE as ATTENTION
from tfm_blocks.blocks.layers.dot_product import AttentionMask, Span, Widths, sequence_mask, to_heads
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.multi_head import Bias, Heads, MultiHead
from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.registry.blocks import block
from tfm_blocks.registry.values import Position


class ReadsHeads(MultiHead):
    """Attention to queries, keys and values that `read` makes of x and of the other ports."""

    @abstractmethod
    def read(self, x_BTD: Tensor, span_T: Span, *inputs: Any, **ports: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_BHTK and k_BGTK, normalised and with positions, and v_BGTK; `ports` are inputs by name."""

    def prepare(self, x_BTD: Tensor, *inputs: Any, keep_BT: Tensor, right_padded_T: bool = True, **ports: Any) -> Heads:  # type: ignore[override]
        masks = sequence_mask(keep_BT, causal=self.causal, right_padded=right_padded_T)
        return self.from_start(x_BTD, masks, *inputs, **ports)

    def from_start(self, x_BTD: Tensor, masks: AttentionMask, *inputs: Any, **ports: Any) -> Heads:
        """Return the heads of a sequence from its first position on."""
        span_T = Span(0, x_BTD.shape[1])
        heads = self.read(x_BTD, span_T, *inputs, **ports)
        return self.with_pairs(*heads, self.with_positions(span_T, span_T, None, masks))

    def start(self, *, room: CacheShape) -> State:  # type: ignore[override]
        return State(caches=self.caches(room))

    def prefill(self, x_BPD: Tensor, state: State, **ports: Any) -> tuple[Tensor, State]:  # type: ignore[override]
        q_BHPK, k_BGPK, v_BGPK, masks = self.from_start(x_BPD, AttentionMask(causal=True), **ports)
        state.fill(k=k_BGPK, v=v_BGPK)
        return self.finish(self.attend(q_BHPK, k_BGPK, v_BGPK, masks), x_BPD), state

    def step(self, x_R1D: Tensor, state: State, **ports: Any) -> tuple[Tensor, State]:  # type: ignore[override]
        """Process the next position of each hypothesis. `ports` holds its operands."""
        x_BMD = state.fold_beams(x_R1D)
        folded = {
            name: [state.fold_beams(one) for one in value] if isinstance(value, list) else state.fold_beams(value)
            for name, value in ports.items()
        }
        q_BHMK, k_BGMK, v_BGMK = self.read(x_BMD, Span(state.position, 1), **folded)
        k_BGSK, v_BGSK, masks = self.append(x_BMD, k_BGMK, v_BGMK, state)
        heads = self.with_pairs(q_BHMK, k_BGSK, v_BGSK, masks)
        return self.finish(self.attend_few(*heads), x_BMD).view_as(x_R1D), state


OWN_WIDTHS = ("D %", "d_head", "d_value")  # begin the rules of `attention` on widths that the ports set here
RULES = {
    **{rule: sentence for rule, sentence in ATTENTION.items() if not rule.startswith(OWN_WIDTHS)},
    "E % heads == 0 unless kv_heads": "the width of k must split evenly into heads",
    "E % kv_heads == 0": "the width of k must split evenly into heads",
    "F % heads == 0 unless kv_heads": "the width of v must split evenly into heads",
    "F % kv_heads == 0": "the width of v must split evenly into heads",
}


@block(
    "shared_attention",
    "x: B T D, k: B T E, v: B T F -> B T D",
    branch=True,
    sees={"k": "mask", "v": "mask"},
    where=RULES,
    source="Sun et al. 2024 (YOCO), section 2.2; values of another layer: Zhou et al. 2024 (ResFormer), section 3",
)
class SharedAttention(ReadsHeads):
    """`attention` with projected keys k and values v from other nodes: x_BTD, k_BTE, v_BTF -> x_BTD.

    Only queries and the output have projections here. k contains `kv_heads` heads of width E / `kv_heads`, which is
    also the width of the queries, and v as many heads of width F / `kv_heads`. `kv_heads` defaults to `heads`.
    `clip_qkv`, `qk_norm`, `v_norm` and `position` act on k and v here, which are the projections before them. Other
    arguments are the same as in `attention`, and so is the result if k and v are its projections of x.

    Layers that read one node for k and v share keys and values. In decoding, layers with the same nodes share one cache
    if the norms, the rotation and `clip_qkv` of keys and values are equal and have no separate weights. If k and v are
    the same node, values are keys. If v is a mix of two nodes, values of an earlier layer flow into this layer.

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

    def describe_caches(self) -> str:
        """Return a text of all that acts on cached keys and values: widths, arguments, and identities of weights."""
        parts = [part for part in (self.position if self.rotates else None, self.k_norm, self.v_norm) if part]
        modules = [module for part in parts for module in part.modules()]
        settings = [{key: value for key, value in vars(module).items() if key[0] != "_"} for module in modules]
        weights = [weight for module in modules for weight in (*module.parameters(False), *module.buffers(False))]
        order = self.qk_norm_kind if self.k_norm else None
        kinds = [(name, type(part)) for name, part in self.named_modules() if part in modules]
        identities = [id(weight) for weight in (self.k_gain, *weights)]
        return str((self.widths, self.clip_qkv, order, kinds, settings, identities))

    def _make_projections(self, D: int, E: int | None, bias: Bias) -> None:
        self.q = Linear(D, self.widths.maps[0], bias=bias not in (False, "out"), heads=(self.widths.heads,))

    def forward(  # type: ignore[override]
        self, x_BTD: Tensor, k_BTE: Tensor, v_BTF: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True
    ) -> Tensor:
        heads = self.prepare(x_BTD, k_BTE, v_BTF, keep_BT=keep_BT, right_padded_T=right_padded_T)
        return self.finish(self.attend(*heads), x_BTD)

    def read(self, x_BTD: Tensor, span_T: Span, k_BTE: Tensor, v_BTF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = self.widths.kv_heads
        k_BGTK, v_BGTK = (to_heads(self.clamped(x), groups) for x in (k_BTE, v_BTF))
        return self.own_queries(x_BTD, span_T), self.keys(k_BGTK, span_T), self.values(v_BGTK)


@block(
    "residual_attention",
    "x: B T D, q[M]: B T E, k[]: B T E, v: B T F -> B T D",
    branch=True,
    sees={"k": "mask", "v": "mask"},
    where={
        "heads >= 1": "there is at least one head",
        "E % heads == 0": "the width of q and k must split evenly into heads",
        "F % heads == 0": "the width of v must split evenly into heads",
        "clip_qkv > 0": ATTENTION["clip_qkv > 0"],
    },
    source="He et al. 2020 (RealFormer), equation 4",
)
class ResidualAttention(ReadsHeads):
    """softmax(β Σ_m q_m k_m^T) v with M projected queries and keys from other nodes: q_BTE, k_BTE, v_BTF -> x_BTD.

    If q and k list the nodes of all layers up to this one, the products of earlier layers are added to the products of
    this layer. All are computed as one product of M times the width, so no scores are stored. x is the input of the
    residual connection and of the `gate`, so without a gate, `add_norm` has no `pre`. `clip_qkv`, `qk_norm` and
    `position` act on each q_m and k_m.

    Also known as: residual attention scores, RealFormer.
    Use: scores that change little from layer to layer.
    Example: q: [query, decoder.*.query], k: [key, decoder.*.key], v: value
    """

    def __init__(
        self,
        D: int,
        M: int,
        E: int,
        F: int,
        *,
        heads: int,
        mask: Literal["causal"] | None = None,
        position: Position | None = None,
        **options: Any,
    ) -> None:
        super().__init__(D, None, Widths(heads, heads, E // heads, F // heads), mask, position, **options)
        if position is not None and self.compares:
            raise ValueError(
                f"{position.block} compares one query with one key, but residual_attention may add several products: "
                "choose another position"
            )
        self.products = M

    def _make_projections(self, D: int, E: int | None, bias: Bias) -> None:
        """Construct no maps: other nodes contain them."""

    def forward(  # type: ignore[override]
        self,
        x_BTD: Tensor,
        q: list[Tensor],
        k: list[Tensor],
        v_BTF: Tensor,
        *,
        keep_BT: Tensor,
        right_padded_T: bool = True,
    ) -> Tensor:
        return self.finish(
            self.attend(*self.prepare(x_BTD, q, k, v_BTF, keep_BT=keep_BT, right_padded_T=right_padded_T)), x_BTD
        )

    def read(
        self, x_BTD: Tensor, span_T: Span, q: list[Tensor], k: list[Tensor], v_BTF: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if len(q) != len(k):
            raise ValueError(f"each q has a k, but there are {len(q)} of q and {len(k)} of k")
        heads = self.widths.heads
        q_NHTK, k_NHTK = (to_heads(self.clamped(torch.cat(x)), heads) for x in (q, k))
        q_BHTX = _side_by_side(self.queries(q_NHTK, span_T), len(v_BTF))
        k_BHTX = _side_by_side(self.keys(k_NHTK, span_T), len(v_BTF))
        return q_BHTX, k_BHTX, self.values(to_heads(self.clamped(v_BTF), heads))

    def caches(self, room: CacheShape) -> dict[str, Tensor]:
        w = self.widths
        return {"k": room.cache(w.heads, self.products * w.key), "v": room.cache(w.heads, w.value)}


def _side_by_side(x_NHTK: Tensor, rows: int) -> Tensor:
    """Concatenate the widths of M batches of `rows`, which are stacked along the first axis: x_BHT(M·K)."""
    return torch.unflatten(x_NHTK, 0, (-1, rows)).permute(1, 2, 3, 0, 4).flatten(3)
