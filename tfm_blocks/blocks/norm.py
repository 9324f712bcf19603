"""Normalisations."""

from __future__ import annotations

from torch import Generator, Tensor, nn

from tfm_blocks.registry.blocks import block


@block(
    "layernorm",
    "x: B T D -> B T D",
    norm=True,
    where={"eps >= 0": "the variance is not below 0"},
    source="Ba et al. 2016, equation 4",
)
class LayerNorm(nn.LayerNorm):
    """(x - mean) / √(variance + eps) · gain + bias, over the width: x_BTD -> x_BTD. Gains start at 1, biases at 0."""

    def __init__(self, D: int, *, eps: float = 1e-5) -> None:
        super().__init__(D, eps=eps)

    def initialise(self, name: str, generator: Generator) -> None:
        """Fills the parameter `name`."""
        nn.init.constant_(self.get_parameter(name), 1.0 if name == "weight" else 0.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD)
