"""A plug-in whose block does harm in the last rank after a few calls."""

import os
import signal
from typing import Literal

from torch import Tensor, nn

from tfm_blocks.registry.blocks import block


@block("faulty", "x: B N D -> B N D", source="none")
class Faulty(nn.Module):
    """x, for `sound` calls; then not a number, or an error, or the end of the process."""

    def __init__(self, D: int, *, harm: Literal["poison", "error", "end"], sound: int) -> None:
        super().__init__()
        self.harm, self.sound, self.calls = harm, sound, 0

    def forward(self, x_BND: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls <= self.sound or int(os.environ.get("RANK", "0")) + 1 != int(os.environ.get("WORLD_SIZE", "1")):
            return x_BND
        if self.harm == "error":
            raise RuntimeError("the last rank broke")
        if self.harm == "end":
            os.kill(os.getpid(), signal.SIGKILL)
        return x_BND * float("nan")
