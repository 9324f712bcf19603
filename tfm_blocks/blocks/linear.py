"""The affine map, with the starting values of the project."""

from __future__ import annotations

import math

from torch import Generator, Tensor, nn


class Linear(nn.Linear):
    """x W^T + b. Several maps of one input are stacked as `parts`, and each starts by its own fan.

    W starts Xavier-uniform (Glorot and Bengio 2010, equation 16), b at 0.
    """

    def __init__(self, inputs: int, outputs: int, *, parts: int = 1, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def initialise(self, name: str, generator: Generator) -> None:
        """Fills the parameter `name`."""
        if name == "bias":
            nn.init.zeros_(self.bias)
        for part in self.weight.chunk(self.parts) if name == "weight" else ():
            nn.init.xavier_uniform_(part, generator=generator)


def normal_(weight: Tensor, width: int, generator: Generator) -> None:
    """N(0, width^-0.5) as the standard deviation, so that an embedding scaled by √width has unit variance."""
    nn.init.normal_(weight, std=1 / math.sqrt(width), generator=generator)
