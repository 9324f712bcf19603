"""A block with a statement that the partial evaluation does not cover."""

from torch import Tensor, nn

from tfm_blocks.registry.blocks import block

NAME = "halved_until_small"


@block(NAME, "x: B N D -> B N D", source="none")
class HalvedUntilSmall(nn.Module):
    """Halves x five times."""

    def forward(self, x_BND: Tensor) -> Tensor:
        times = 5
        while times:
            x_BND = x_BND / 2
            times -= 1
        return x_BND
