"""A plug-in whose block fails in the last rank after a few calls, or sends it a signal."""

import os
import shutil
import signal
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from tfm_blocks.registry.blocks import block

left: list[bool] = []


@block("faulty", "x: B N D -> B N D", source="none")
class Faulty(nn.Module):
    """x, for `sound` calls; then not a number, or an error, or the end of the process, or once SIGTERM.

    `lose` deletes the paths in the environment variable LOSE, once. With `leave` SIGTERM comes in the first validation after these calls, once in a process: if `left` is empty.
    `end_once` spares a process that a launcher restarted. With `steps`, x is not a number in these calls alone, counted from 1. A copy does no harm: a run tries one before
    its first step.
    """

    def __init__(
        self,
        D: int,
        *,
        harm: Literal["poison", "error", "end", "end_once", "stop", "leave", "lose"],
        sound: int,
        steps: str = "",
    ) -> None:
        super().__init__()
        self.harm, self.sound, self.calls = harm, sound, 0
        self.steps = [int(step) for step in steps.split("-") if step]

    def __deepcopy__(self, memo: dict[int, object]) -> "Faulty":
        return Faulty(0, harm=self.harm, sound=1 << 40)

    def forward(self, x_BND: Tensor) -> Tensor:
        self.calls += self.training and not x_BND.is_meta
        if self.harm == "leave":
            if self.calls > self.sound and not (self.training or left):
                left.append(True)
                os.kill(os.getpid(), signal.SIGTERM)
            return x_BND
        if self.calls <= self.sound or int(os.environ.get("RANK", "0")) + 1 != int(os.environ.get("WORLD_SIZE", "1")):
            return x_BND
        if self.steps:
            return x_BND * float("nan") if self.training and self.calls in self.steps else x_BND
        if self.harm == "error":
            raise RuntimeError("the last rank broke")
        if self.harm == "stop":
            if self.training and self.calls == self.sound + 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return x_BND
        if self.harm == "lose":
            if self.training and self.calls == self.sound + 1:
                for path in map(Path, os.environ["LOSE"].split(os.pathsep)):
                    path.unlink() if path.is_file() else shutil.rmtree(path)
            return x_BND
        if self.harm == "end_once" and os.environ.get("TORCHELASTIC_RESTART_COUNT") != "0":
            return x_BND
        if self.harm in ("end", "end_once"):
            os.kill(os.getpid(), signal.SIGKILL)
        return x_BND * float("nan")
