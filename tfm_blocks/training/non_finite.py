"""Steps that were not taken, because their loss or gradient was not finite."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.errors import Problem, TfmError

SKIPPED = "skipped.jsonl"


class DivergedError(TfmError):
    """Too many steps in a row had a loss or gradient that is not finite, or a validation had; no weights hold it."""

    exit_status = 3


def diverged(steps: int, what: str) -> DivergedError:
    """The error of a run whose weights after so many steps are good, and what came then."""
    help = "lower the learning rate, warm up longer, or clip: trainer.clip=1.0"
    return DivergedError(Problem("", f"the run diverged after {steps} steps: {what}", help=help))


class NonFiniteSteps:
    """Writes the lines of the corpus that skipped steps have read to `path`, one JSON object each, where it is given.

    Whether a step was skipped is known on the device; nothing waits for it before `look`. `in_row` is how many of the
    last steps were skipped; with `patience` of them the run has diverged.
    """

    def __init__(self, path: Path | None, corpus: Corpus, patience: int) -> None:
        self.path, self.corpus, self.patience = path, corpus, patience
        self.in_row = 0
        self._flags: list[Tensor] = []
        self._steps: list[tuple[int, Sequence[int]]] = []

    def note(self, skipped: Tensor, step: int, rows: Sequence[int]) -> None:
        """The run's step, counted from 1, which has read these rows."""
        self._flags.append(skipped)
        self._steps.append((step, rows))

    def look(self) -> None:
        """Reads what was noted since the last time. Raises DivergedError."""
        flags = torch.stack(self._flags).tolist() if self._flags else []
        steps, self._flags, self._steps = self._steps, [], []
        for skipped, (step, rows) in zip(flags, steps, strict=True):
            self.in_row = self.in_row + 1 if skipped else 0
            if skipped:
                self._write(step, rows)
            if self.in_row >= self.patience:  # which a resume may lower
                what = f"the loss or the gradient of {self.in_row} steps in a row is not finite"
                raise diverged(step - self.in_row, what)

    def _write(self, step: int, rows: Sequence[int]) -> None:
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            for row in rows:
                (text,) = self.corpus.rows(slice(row, row + 1))
                file.write(json.dumps({"step": step, "row": row, **text}, ensure_ascii=False) + "\n")
