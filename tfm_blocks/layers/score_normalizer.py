"""How attention makes weights of the products of queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class ScoreNormalizer(nn.Module):
    """softmax(β s) of products s, along the last axis; β is 1/√D unless given, D the width that was multiplied.

    `fused` tells that torch's own kernel does all of it, `whole` that the shares of a row add up to 1.
    """

    fused = True
    whole = True

    def __init__(self, D: int, beta: float | None = None) -> None:
        super().__init__()
        self.beta = 1 / math.sqrt(D) if beta is None else beta

    def bend(self, scores_BHTS: Tensor) -> Tensor:
        """What is done to β s before biases and masks are added."""
        return scores_BHTS

    def shares(self, scores_BHTS: Tensor) -> Tensor:
        """The weights: w_BHTS."""
        return torch.softmax(scores_BHTS, -1)
