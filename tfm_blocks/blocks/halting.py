"""Adaptive halting: each position decides how many applications of a shared layer its output uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from tfm_blocks.blocks.layers.linear import fill_normal
from tfm_blocks.registry.blocks import block


@block(
    "adaptive_halting",
    "states[M]: B N D -> B N D, loss",
    where={
        "M >= 2": "the first is the state before the first step, the others are those after each step",
        "epsilon > 0": "a position halts before its probabilities add up to 1",
        "epsilon < 1": "a position makes at least one step",
        "ponder >= 0": "a cost of steps is not below 0",
    },
    source="Graves 2016, section 2; at each position, Dehghani et al. 2019, section 2.2",
)
class AdaptiveHalting(nn.Module):
    """Σ_t w_t s_t at each position over the states after each step: s_0 … s_T, each x_BND -> x_BND, loss_B.

    The halting probability of step t is p_t = σ(w · s_{t-1} + b). A position halts at the first step where
    p_1 + … + p_t exceeds 1 - `epsilon`, or at the last step T. At that step w_t is the remainder
    1 - p_1 - … - p_{t-1}; before it w_t = p_t, after it 0. The loss is `ponder` times the number of steps plus the
    remainder, averaged over the kept positions of a sequence. All T steps are computed, and other positions attend to
    the changing states of a halted one, as in the published code of Dehghani et al. b starts at 1.
    """

    width_rules: ClassVar = {"weight": "output"}

    def __init__(self, D: int, *, epsilon: float = 0.01, ponder: float = 0.01) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.ponder = ponder
        self.weight = nn.Parameter(torch.empty(D))
        self.bias = nn.Parameter(torch.empty(()))

    def initialise(self, name: str, generator: Generator) -> None:
        if name == "bias":
            nn.init.ones_(self.bias)
        else:
            fill_normal(self, name, generator)

    def forward(self, states: list[Tensor], *, keep_BN: Tensor) -> tuple[Tensor, Tensor]:
        before, after = states[:-1], states[1:]
        weights, ponder_BN = self.halt(
            [torch.sigmoid((x_BND.float() * self.weight).sum(2) + self.bias) for x_BND in before]
        )
        pairs = zip(weights, after, strict=True)
        y_BND = torch.stack([weight_BN[:, :, None].to(x_BND.dtype) * x_BND for weight_BN, x_BND in pairs]).sum(0)
        ponder_B = (ponder_BN * keep_BN).sum(1) / keep_BN.sum(1).clamp(min=1)
        return y_BND, self.ponder * ponder_B

    def halt(self, probabilities: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Compute the weights of the steps from their halting probabilities p_BN, and ponder_BN, steps plus remainder.

        There is a weight_BN for each step. At each position they sum to 1.
        """
        left_BN = torch.ones_like(probabilities[0])
        running_BN = torch.ones_like(left_BN, dtype=torch.bool)
        ponder_BN = torch.zeros_like(left_BN)
        weights = []
        for step, p_BN in enumerate(probabilities, 1):
            halts_BN = running_BN & ((left_BN - p_BN < self.epsilon) | (step == len(probabilities)))
            weights.append(torch.where(halts_BN, left_BN, p_BN) * running_BN)
            ponder_BN = ponder_BN + running_BN + halts_BN * left_BN
            left_BN = left_BN - weights[-1]
            running_BN = running_BN & ~halts_BN
        return weights, ponder_BN
