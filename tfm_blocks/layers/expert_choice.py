"""From router logits to the choice of experts."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

TINY = 1e-20  # added to a sum of weights, which may all underflow to 0


class Routing(nn.Module, ABC):
    """The routing of a mixture of experts: z_BTE, the logits of E experts, -> score_BTE, which selects the experts.

    The experts form `groups` of equal size, in order. Only experts of the `top_groups` best groups can be chosen; the
    score of a group is the sum of its `leaders` best scores. `scale` multiplies the weights of the chosen experts.
    """

    leaders = 1

    def __init__(self, E: int, groups: int, top_groups: int, scale: float) -> None:
        super().__init__()
        if E % groups:
            raise ValueError(f"groups must divide the number of experts, but groups = {groups}, experts = {E}")
        self.groups, self.top_groups, self.scale = groups, top_groups, scale
        self.candidates = E // groups * top_groups

    @abstractmethod
    def weights(self, z_BTE: Tensor) -> Tensor:
        """Return the weight that each expert has if it is chosen: p_BTE, in float32 under any precision."""

    def scores(self, p_BTE: Tensor) -> Tensor:
        """Return the scores of experts with these weights."""
        return p_BTE

    def probabilities(self, p_BTE: Tensor) -> Tensor:
        """Return the weights, normalised so that the weights of a position sum to 1."""
        return p_BTE

    def forward(self, z_BTE: Tensor) -> Tensor:
        return self.scores(self.weights(z_BTE))

    def restrict(self, score_BTE: Tensor) -> Tensor:
        """Set the scores outside the best groups to -inf."""
        if self.top_groups == self.groups:
            return score_BTE
        score_BTGX = torch.unflatten(score_BTE, 2, (self.groups, -1))
        group_BTG = score_BTGX.topk(min(self.leaders, score_BTGX.shape[3]), 3).values.sum(3)
        best_BTN = group_BTG.topk(self.top_groups, 2).indices
        kept_BTG = torch.zeros_like(group_BTG, dtype=torch.bool).scatter(2, best_BTN, True)
        return score_BTGX.masked_fill(~kept_BTG[..., None], -torch.inf).flatten(2)

    def balancing(self, fraction_BE: Tensor) -> Tensor:
        """Return a loss_B of value 0 that moves parameters by the fraction of the choices that fell on each expert."""
        return fraction_BE.new_zeros(len(fraction_BE))
