"""A plug-in that sends one signal, once: in the middle of a step, while the tokens of a validation or of the test are
scored, in the search of a validation, or while a checkpoint is written.

The environment says which (SEND=TERM, INT or USR1), to whom (TO=one: the last rank to itself; all: every process of the
group; twice: the last rank to itself, and again) and when (WHEN=step, validation, search, test or saving). The file MARK is made then.
"""

import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn

from tfm_blocks.registry.blocks import block

WHEN = os.environ.get("WHEN", "")
AFTER = {"step": 3, "validation": 2, "search": 3, "test": 6}  # calls: a validation is one for its tokens and a search


def send() -> None:
    last = int(os.environ.get("RANK", "0")) + 1 == int(os.environ.get("WORLD_SIZE", "1"))
    saving = WHEN == "saving"  # only on the first rank
    mark = Path(os.environ["MARK"])
    if mark.exists() or not (last or saving):
        return
    mark.touch()
    number = signal.Signals["SIG" + os.environ["SEND"]]
    if os.environ["TO"] == "all":
        os.killpg(0, number)
        return
    for _ in range(2 if os.environ["TO"] == "twice" else 1):
        os.kill(os.getpid(), number)


@block("signalling", "x: B N D -> B N D", source="none")
class Signalling(nn.Module):
    """x. It sends nothing before its first call in training, nor does a copy: a run tries both before its first step."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.calls, self.quiet, self.trained = 0, False, False

    def forward(self, x_BND: Tensor) -> Tensor:
        self.trained |= self.training and not x_BND.is_meta
        if self.trained and not self.quiet and WHEN in AFTER and self.training == (WHEN == "step"):
            self.calls += 1
            if self.calls > AFTER[WHEN]:
                send()
        return x_BND

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        copy = Signalling(0)
        copy.quiet = True
        return copy


def saving(*arguments: object, **options: object) -> None:
    send()
    save(*arguments, **options)


save = torch.save
if WHEN == "saving":
    torch.save = saving
