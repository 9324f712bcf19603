"""Category `gate`: factors between 0 and 1 for the output of attention heads."""

from __future__ import annotations

import torch
from torch import Tensor

from tfm_blocks.layers.linear import Linear
from tfm_blocks.registry.blocks import block

SIGNATURE = "x: B T D, y: B T E -> B T E"


@block("sigmoid_gate", SIGNATURE, category="gate", source="Qiu et al. 2025, section 2.2, elementwise gate (G1)")
class SigmoidGate(Linear):
    """y ⊙ σ(W x + b): x_BTD, y_BTE -> y_BTE.

    As the `gate` of an attention, y is the output of all heads and x the input of the attention. Attention sets `bias`:
    the gate has a bias if the projections to queries, keys and values have one.

    Also known as: gated attention.
    Use: attention with `gate: sigmoid_gate`, as in Qwen3-Next.
    """

    def __init__(self, D: int, E: int, *, bias: bool = True) -> None:
        super().__init__(D, E, bias=bias)

    def forward(self, x_BTD: Tensor, y_BTE: Tensor) -> Tensor:  # type: ignore[override]
        return y_BTE * torch.sigmoid(super().forward(x_BTD))


@block(
    "headwise_gate",
    SIGNATURE,
    category="gate",
    where={"heads >= 1": "there is at least one head", "E % heads == 0": "the width must split evenly into heads"},
    source="Qiu et al. 2025, section 2.2, headwise gate (G1)",
)
class HeadwiseGate(Linear):
    """`sigmoid_gate` with one factor for each head: x_BTD, y_BTE -> y_BTE.

    Each of `heads` equal parts of y is multiplied by its factor σ(w x + b). Attention sets `heads` and `bias`.
    """

    def __init__(self, D: int, *, heads: int, bias: bool = True) -> None:
        super().__init__(D, heads, bias=bias)

    def forward(self, x_BTD: Tensor, y_BTE: Tensor) -> Tensor:  # type: ignore[override]
        y_BTHK = torch.unflatten(y_BTE, 2, (self.out_features, -1))
        return (y_BTHK * torch.sigmoid(super().forward(x_BTD))[..., None]).flatten(2)
