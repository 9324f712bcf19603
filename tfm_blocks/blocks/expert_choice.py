"""Experts that choose positions, instead of positions that choose experts."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from tfm_blocks.blocks.experts import EXPERTS, Mixture
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.registry.blocks import block


@block(
    "expert_choice_moe",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "all"},
    where={
        **EXPERTS,
        "capacity > 0": "experts choose positions",
        "capacity <= experts": "an expert chooses no position twice",
    },
    source="Zhou et al. 2022 (arXiv 2202.09368), section 3.2",
)
class ExpertChoice(Mixture):
    """Σ_e p_e(x_t) · ffn_e(x_t) over the experts e that choose position t, with p = softmax(W x): x_BTD -> x_BTD.

    Each expert chooses the positions of its sequence with the largest p_e: `capacity` · n / `experts` of n positions,
    rounded up, so that a position has `capacity` experts on average. A position can have no expert, or all. The load
    is balanced without a loss. The choice depends on later positions, so decoders cannot use this block. The other
    arguments are as in `moe`.

    Also known as: expert choice routing.
    Use: encoders. `moe` lets each position choose its experts.
    Cost: 2 · (capacity + shared) · d · d_ff multiply-adds for each position; with `gated`, 3 instead of 2.
    Example: experts: 8
    """

    weight_roles: ClassVar = {"router.weight": "router"}

    def __init__(self, D: int, *, experts: int, capacity: float = 2.0, **options: Any) -> None:
        super().__init__(D, experts=experts, **options)
        self.router = Linear(D, experts, bias=False)
        least = Fraction(1, 10**9)  # a product of its numerator and a length fits into 63 bits
        self.each = max(Fraction(capacity).limit_denominator(10**9), least) / experts  # the fraction of the positions

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        p_BET = torch.softmax(self.router(x_BTD).float(), 2).transpose(1, 2)
        # a stable order: if two positions have equal p, the first is chosen, however long the padding is
        sorted_BET, order_BET = p_BET.masked_fill(~keep_BT[:, None], -1).sort(dim=2, descending=True, stable=True)
        most = self.count(T)
        surplus_BC = torch.arange(most, device=x_BTD.device) >= self.count(keep_BT.sum(1))[:, None]
        weight_BEC = sorted_BET[:, :, :most].masked_fill(surplus_BC[:, None], 0)
        first_B11 = torch.arange(0, B * T, T, device=x_BTD.device)[:, None, None]
        row_R = (order_BET[:, :, :most] + first_B11).transpose(0, 1).flatten()  # sorted by expert
        ends_E = torch.arange(1, p_BET.shape[1] + 1, device=x_BTD.device) * (B * most)
        x_ND = x_BTD.reshape(B * T, D)
        y_RD: Tensor = self.experts(x_ND.index_select(0, row_R), ends_E)
        weight_R1 = weight_BEC.transpose(0, 1).reshape(-1, 1).to(y_RD.dtype)
        y_ND = y_RD.new_zeros(B * T, D).index_add(0, row_R, y_RD * weight_R1)
        return self.add_shared(y_ND.view(B, T, D), x_BTD)

    def count(self, n: Any) -> Any:
        """Return the number of positions that an expert chooses of n; n is an int or a tensor of ints."""
        times, parts = self.each.numerator, self.each.denominator
        return (n * times + parts - 1) // parts  # without negative numbers, which ONNX rounds towards 0
