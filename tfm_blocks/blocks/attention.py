"""Multi-head attention."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from tfm_blocks.blocks.dot_product import dot_product_attention, past_attention, source_attention
from tfm_blocks.blocks.linear import Linear
from tfm_blocks.blocks.state import Room, State
from tfm_blocks.registry.blocks import block
from tfm_blocks.registry.values import Rate


def split_heads(x_BTD: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    """`parts` tensors side by side in the width, each into its heads: x_BT(D·parts) -> x_BHTK."""
    B, T, width = x_BTD.shape
    return x_BTD.view(B, T, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4).unbind(0)


def merge_heads(x_BHTK: Tensor) -> Tensor:
    """x_BHTK -> x_BT(H·K)."""
    return x_BHTK.transpose(1, 2).flatten(2)


def one_hot_values(k_BHSK: Tensor) -> Tensor:
    """v_BHSS with which attention gives its weights: the value of a position is 1 in its own place, 0 elsewhere."""
    B, H, S, _ = k_BHSK.shape
    return torch.eye(S, dtype=k_BHSK.dtype, device=k_BHSK.device).expand(B, H, S, S)


@block(
    "attention",
    "x: B T D, kv?: B S E -> B T D",
    branch=True,
    sees={"kv|x": "mask"},
    where={"heads >= 1": "there is at least one head", "D % heads == 0": "the width must split evenly into heads"},
    source="Vaswani et al. 2017, section 3.2.2",
)
class Attention(nn.Module):
    """softmax(q k^T / √K) v in each of H heads of width K = D / H: x_BTD, kv_BSE -> x_BTD.

    Queries come from x; keys and values from kv, or from x where kv is left out. Padding is never looked at; with
    `mask: causal` no later position either. Padding comes last in a sequence, so the causal mask hides it too.
    """

    def __init__(
        self,
        D: int,
        E: int | None,
        *,
        heads: int,
        mask: Literal["causal"] | None = None,
        attention_dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        if mask and E is not None:
            raise ValueError(
                "mask: causal orders the positions of one sequence, but kv is another: leave one of them out"
            )
        self.heads = heads
        self.causal = mask == "causal"
        self.dropout = attention_dropout
        if E is None:
            self.qkv = Linear(D, 3 * D, parts=3)
        else:
            self.q = Linear(D, D)
            self.kv = Linear(E, 2 * D, parts=2)
        self.out = Linear(D, D)

    def forward(
        self, x_BTD: Tensor, kv_BSE: Tensor | None = None, *, keep_BT: Tensor, keep_BS: Tensor | None = None
    ) -> Tensor:
        q_BHTK, k_BHSK, v_BHSK = self._heads(x_BTD, kv_BSE)
        y_BHTK = self._attend(q_BHTK, k_BHSK, v_BHSK, keep_BT if keep_BS is None else keep_BS)
        out_BTD: Tensor = self.out(merge_heads(y_BHTK))
        return out_BTD

    def weights(
        self, x_BTD: Tensor, kv_BSE: Tensor | None = None, *, keep_BT: Tensor, keep_BS: Tensor | None = None
    ) -> Tensor:
        """How much each head of each position looks at what: w_BHTS, of which each row adds up to 1."""
        q_BHTK, k_BHSK, _ = self._heads(x_BTD, kv_BSE)
        return self._attend(q_BHTK, k_BHSK, one_hot_values(k_BHSK), keep_BT if keep_BS is None else keep_BS)

    def _heads(self, x_BTD: Tensor, kv_BSE: Tensor | None) -> tuple[Tensor, ...]:
        if kv_BSE is None:
            return split_heads(self.qkv(x_BTD), self.heads, 3)
        return *split_heads(self.q(x_BTD), self.heads, 1), *split_heads(self.kv(kv_BSE), self.heads, 2)

    def _attend(self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, keep_BS: Tensor) -> Tensor:
        mask_B11S = None if self.causal else keep_BS[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        return dot_product_attention(q_BHTK, k_BHSK, v_BHSK, mask_B11S, dropout=dropout, causal=self.causal)

    def start(self, kv_BSE: Tensor | None = None, *, keep_BS: Tensor | None = None, room: Room) -> State:
        """Room for keys and values of the target; or those of `kv_BSE`, which do not change."""
        if kv_BSE is None:
            return State(caches={name: room.cache(self.heads, self.out.in_features // self.heads) for name in "kv"})
        assert keep_BS is not None
        k_BHSK, v_BHSK = split_heads(self.kv(kv_BSE), self.heads, 2)
        return State(fixed={"k_BHSK": k_BHSK.contiguous(), "v_BHSK": v_BHSK.contiguous(), "keep_BS": keep_BS})

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        """One more target position: x_R1D -> x_R1D. The M hypotheses of a sentence are so many queries."""
        x_BMD = state.abreast(x_R1D)
        if not state.fixed:
            y_BHMK = past_attention(*split_heads(self.qkv(x_BMD), self.heads, 3), state=state)
        else:
            (q_BHMK,) = split_heads(self.q(x_BMD), self.heads, 1)
            k_BHSK, v_BHSK, keep_BS = (state.fixed[name] for name in ("k_BHSK", "v_BHSK", "keep_BS"))
            y_BHMK = source_attention(q_BHMK, k_BHSK, v_BHSK, keep_BS)
        return self.out(merge_heads(y_BHMK)).view_as(x_R1D), state
