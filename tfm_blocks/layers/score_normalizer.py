"""From attention logits to weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class ScoreNormalizer(nn.Module):
    """softmax(β s) of the products s along the last axis; β defaults to 1/√D, where D is the width of the keys.

    `fused`: torch's own kernel computes all of it. `sums_to_one`: the weights of a row sum to 1.
    """

    fused = True
    sums_to_one = True

    def __init__(self, D: int, beta: float | None = None) -> None:
        super().__init__()
        self.beta = 1 / math.sqrt(D) if beta is None else beta

    def transform(self, scores_BHTS: Tensor) -> Tensor:
        """Transform β s before biases and masks are added."""
        return scores_BHTS

    def normalize(self, scores_BHTS: Tensor) -> Tensor:
        """Return the weights w_BHTS."""
        return torch.softmax(scores_BHTS, -1)
