"""Write checkpoints during training, and stop the run after a signal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer

from tfm_blocks.errors import PREEMPTED, Problem, RunError, TfmError
from tfm_blocks.runs.checkpoints import OTHER_VERSION, OTHER_VERSION_HELP, read_checkpoint, write_checkpoint
from tfm_blocks.training.module import TrainingModule
from tfm_blocks.training.settings import TrainerSettings

AGREE_EVERY = 0.5  # seconds between two exchanges of the ranks, estimated from the last interval


class PreemptedError(TfmError):
    """The run stopped after a signal and saved its state. `help` is the command that resumes it."""

    exit_status = PREEMPTED

    def __str__(self) -> str:
        return f"{self.problems[0].rule}\nresume: {self.problems[0].help}"


def preempted(number: int, command: str) -> PreemptedError:
    """Return the error of a run that stopped after signal `number`."""
    return PreemptedError(Problem("", f"the run was stopped by {signal.Signals(number).name}", help=command))


class CheckpointFiles(CheckpointIO):
    """Read and write Lightning's checkpoints as files of runs/checkpoints.py.

    The newest `keep` are kept, and the checkpoints after the steps `at`.
    """

    def __init__(self, keep: int, at: Collection[int] = ()) -> None:
        self.keep, self.at = keep, at

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the checkpoint to the folder of `path`, named by its step. Raises RunError if writing fails."""
        folder = Path(path).parent
        try:
            write_checkpoint(folder, checkpoint["global_step"], checkpoint, self.keep, self.at)
        except OSError as error:
            rule = f"a checkpoint cannot be written: {error.strerror}"
            raise RunError(Problem(str(folder), rule, help="free disk space, then resume the run")) from None

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the checkpoint on the CPU; loading never runs code. Raises RunError."""
        checkpoint = read_checkpoint(Path(path))
        if not checkpoint.keys() >= {
            "counted",
            "log_bytes",
            "validation_interrupted",
            "tokens",
            "seconds",
            "validated",
            "stopped_early",
        }:
            raise RunError(Problem(str(path), OTHER_VERSION, help=OTHER_VERSION_HELP))
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Do nothing: `write_checkpoint` removes old checkpoints."""


class Checkpoints(Callback):
    """Write checkpoints and stop the run between two steps, when all ranks agree to.

    The ranks agree about every half second, because an exchange at every step would slow down short steps.
    `stop_signal` returns the pending signal of this rank, or 0. `command` resumes the run. `logs` are files that grow
    with the steps.
    """

    def __init__(
        self,
        folder: Path,
        logs: Sequence[Path],
        settings: TrainerSettings,
        stop_signal: Callable[[], int],
        command: str,
    ) -> None:
        self.folder, self.logs, self.settings = folder, logs, settings
        self.stop_signal, self.command = stop_signal, command
        self.written = -1
        self.validation_interrupted = False  # True if the run must repeat this validation
        self._group: Any = None  # a gloo group, so that an exchange does not wait for a device

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.written = trainer.global_step
        self._last = self._agreed = time.monotonic()
        self._agreed_step = self._next = trainer.global_step
        if trainer.world_size > 1:
            self._group = torch.distributed.new_group(backend="gloo")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, TrainingModule)
        if self.validation_interrupted:  # validate as Lightning does between two steps, in on_advance_end
            self.validation_interrupted = False
            trainer.validating = True
            first = trainer._logger_connector._first_loop_iter
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True
            trainer._logger_connector._first_loop_iter = first
        every, step = self.settings.checkpoint_every, trainer.global_step
        must_agree = trainer.world_size == 1 or pl_module.abandoned or step >= self._next  # the same on every rank
        number, timely = self._agree(trainer) if must_agree else (0, False)
        if number or timely or (every and step % every == 0) or step in self.settings.checkpoint_at:
            self._write(trainer, number)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the last checkpoint, from which the run can be trained for longer."""
        self._write(trainer, self._agree(trainer)[0])

    def _agree(self, trainer: Trainer) -> tuple[int, bool]:
        """Return the signal of any rank, and True if the clock of any rank says that a checkpoint is due.

        The slowest rank's seconds per step decide at which step the ranks agree next. No device is waited for.
        """
        now, minutes = time.monotonic(), self.settings.checkpoint_minutes
        timely = bool(minutes) and now - self._last >= 60 * (minutes or 0)
        steps = trainer.global_step - self._agreed_step
        pace = (now - self._agreed) / steps if steps else AGREE_EVERY
        exchanged = torch.tensor([self.stop_signal(), timely, pace], dtype=torch.float64)
        if trainer.world_size > 1:
            torch.distributed.all_reduce(exchanged, torch.distributed.ReduceOp.MAX, group=self._group)
        number, due, pace = exchanged.tolist()
        self._agreed, self._agreed_step = now, trainer.global_step
        self._next = trainer.global_step + max(1, int(AGREE_EVERY / pace))
        return int(number), bool(due)

    def _write(self, trainer: Trainer, number: int) -> None:
        """Write the checkpoint, unless it exists. Raises PreemptedError after the signal `number`, unless it is 0."""
        if trainer.global_step != self.written or not trainer.global_step:
            trainer.save_checkpoint(self.folder / "step.ckpt", weights_only=False)
        self.written, self._last = trainer.global_step, time.monotonic()
        if number:
            raise preempted(number, self.command)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        assert isinstance(pl_module, TrainingModule)
        _count_whole_steps(checkpoint)
        checkpoint["validation_interrupted"] = pl_module.abandoned
        pl_module.skipped.flush()  # before its file is measured: Lightning calls the module's hook after this one
        checkpoint["log_bytes"] = {log.name: log.stat().st_size if log.exists() else 0 for log in self.logs}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Truncate the logs to their length at the checkpoint."""
        self.validation_interrupted = checkpoint["validation_interrupted"]
        for log in self.logs if trainer.is_global_zero else ():
            if log.exists():
                os.truncate(log, min(checkpoint["log_bytes"][log.name], log.stat().st_size))


def _count_whole_steps(checkpoint: dict[str, Any]) -> None:
    """Set Lightning's counters to the completed steps.

    Lightning has already counted the next batch, or the end of the epoch at the end of training. With those counters, a
    resumed run would validate at other steps.
    """
    loops = checkpoint["loops"]["fit_loop"]
    whole = dict.fromkeys(("ready", "started", "processed", "completed"), checkpoint["global_step"])
    counts = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    loops["epoch_loop.batch_progress"] |= {"total": whole, "current": dict(whole), "is_last_batch": False}
    loops["epoch_progress"] = {"total": counts, "current": dict(counts)}
    checkpoint["epoch"] = 0
