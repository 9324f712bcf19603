"""The weights of validations that a resume from any checkpoint finds."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import torch

from tfm_blocks.runs.checkpoints import (
    NEVER,
    delete_old_weights,
    list_checkpoints,
    replace_best,
    restore_weights,
    write_checkpoint,
)
from tfm_blocks.runs.folder import BEST, step_file, step_files, step_of
from tfm_blocks.runs.model import read_tensors, write_tensors

KEEP_LAST, AVERAGE, CHECKPOINTS = 3, 2, 2


class Training:
    """Validations with random losses, and checkpoints before or after some of them; weights are their step."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, Random(seed)
        self.loss, self.best, self.validated = math.inf, NEVER, [NEVER]
        self.known: dict[int, tuple[list[int], int]] = {}  # by the step of a checkpoint: its validations and its best

    def train(self, steps: int) -> None:
        for step in range(steps):
            for part in self.random.sample([self.validate, self.checkpoint], self.random.randrange(3)):
                part(step)

    def validate(self, step: int) -> None:
        weights = {"step": torch.tensor(float(step))}
        self.validated.append(step)
        if (loss := self.random.random()) < self.loss:
            replace_best(self.folder, weights, step, self.best)
            self.loss, self.best = loss, step
        write_tensors(step_file(self.folder, step), weights)
        delete_old_weights(self.folder, KEEP_LAST, AVERAGE)

    def checkpoint(self, step: int) -> None:
        write_checkpoint(self.folder, step, {}, CHECKPOINTS)
        self.known[step] = list(self.validated), self.best


def test_each_checkpoint_restores_its_best_weights_and_those_of_its_mean(tmp_path: Path) -> None:
    for seed in range(25):
        training = Training(tmp_path / str(seed), seed)
        training.folder.mkdir()
        training.train(Random(seed).randint(1, 15))
        assert len(step_files(training.folder)) <= KEEP_LAST + CHECKPOINTS * AVERAGE
        assert len(step_files(training.folder, "best")) <= CHECKPOINTS
        for checkpoint in list_checkpoints(training.folder):  # the newest first: restoring it keeps the older
            validated, best = training.known[checkpoint.step]
            restore_weights(training.folder, validated[-1], best)
            kept = [step_of(path) for path in step_files(training.folder)]
            repeated = checkpoint.step in training.validated and checkpoint.step not in validated
            expected = validated[1:][-(AVERAGE - repeated) :]
            assert kept[len(kept) - len(expected) :] == expected
            assert (training.folder / BEST).is_file() == (best != NEVER)
            assert best == NEVER or read_tensors(training.folder / BEST)["step"] == best
