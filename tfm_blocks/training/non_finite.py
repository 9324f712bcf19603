"""Record the steps that were skipped because their loss or gradient was not finite."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.errors import Problem, TfmError, counted

SKIPPED = "skipped.jsonl"


class DivergedError(TfmError):
    """Too many consecutive steps, or a validation, had a loss or gradient that is not finite.

    No saved weights contain such values.
    """

    exit_status = 3


IN_A_ROW = "steps in a row is not finite"  # the end of the reason of a run that `trainer.patience_nan` stopped


def diverged(steps: int, reason: str) -> DivergedError:
    """Return the error of a run whose weights were last good after `steps` steps."""
    help = "lower the learning rate, warm up longer, or clip: trainer.clip=1.0"
    return DivergedError(Problem("", f"the run diverged after {counted(steps, 'step')}: {reason}", help=help))


class NonFiniteSteps:
    """Write the corpus rows of skipped steps to `path`, one JSON object per row, unless `path` is None.

    The device decides which steps are skipped, and only `flush` waits for it. `in_row` is the number of consecutive
    skipped steps up to the last one. After `patience` of them the run has diverged.
    """

    def __init__(self, path: Path | None, corpus: Corpus, patience: int) -> None:
        self.path, self.corpus, self.patience = path, corpus, patience
        self.in_row = 0
        self._flags: list[Tensor] = []
        self._steps: list[tuple[int, Sequence[int]]] = []

    def note(self, skipped: Tensor, step: int, rows: Sequence[int]) -> None:
        """Note a step, counted from 1, and its rows of the corpus."""
        self._flags.append(skipped)
        self._steps.append((step, rows))

    def flush(self) -> None:
        """Read the flags of the steps since the last call. Raises DivergedError."""
        flags = torch.stack(self._flags).tolist() if self._flags else []
        steps, self._flags, self._steps = self._steps, [], []
        for skipped, (step, rows) in zip(flags, steps, strict=True):
            self.in_row = self.in_row + 1 if skipped else 0
            if skipped and self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    for row in rows:
                        (text,) = self.corpus.rows(slice(row, row + 1))
                        file.write(json.dumps({"step": step, "row": row, **text}, ensure_ascii=False) + "\n")
            if self.in_row >= self.patience:  # >=, because a resume may lower `patience`
                reason = f"the loss or the gradient of {self.in_row} {IN_A_ROW}"
                raise diverged(step - self.in_row, reason)
