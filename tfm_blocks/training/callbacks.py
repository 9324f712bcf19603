"""Callbacks that average weights, save the best ones, log images, and show progress."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor

from tfm_blocks.errors import printable
from tfm_blocks.language.spec import TARGET
from tfm_blocks.metric_schema import METRIC_KEYS, OBJECTIVE, SKIPPED
from tfm_blocks.network.attention_maps import attention_nodes
from tfm_blocks.network.matching import fill, saved_weights
from tfm_blocks.report.attention import png
from tfm_blocks.report.confusion import confusion_png, count_confusions, has_confusion
from tfm_blocks.runs.checkpoints import NEVER, delete_old_weights, replace_best, restore_weights
from tfm_blocks.runs.folder import step_file
from tfm_blocks.runs.model import write_tensors
from tfm_blocks.tracking.loggers import RunLogger
from tfm_blocks.training.fsdp2 import full_tensors
from tfm_blocks.training.heartbeat import Heartbeat
from tfm_blocks.training.labels import LabelScorer
from tfm_blocks.training.module import TrainingModule
from tfm_blocks.translation.sentence_attention import attention_of

SHORT = 24  # most tokens of a sentence in an attention image, so that the labels of eight heads fit on a screen


class BestWeights(Callback):
    """Write `best.safetensors` after each validation with the lowest loss so far.

    The criterion is the loss and not BLEU, because BLEU covers only a few sentences of the validation set. The weights
    of the last `keep_last` validations are kept, and the weights that a resume needs for the mean of `average`.
    """

    def __init__(self, folder: Path, keep_last: int, average: int = 0) -> None:
        self.folder, self.keep_last, self.average = folder, keep_last, average
        self.best_loss, self.best_step = math.inf, NEVER

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        if pl_module.abandoned:
            return
        loss, step = pl_module.latest[OBJECTIVE], trainer.global_step
        weights = full_tensors(saved_weights(pl_module.network))
        if trainer.is_global_zero:
            if loss < self.best_loss:
                replace_best(self.folder, weights, step, self.best_step)
            if self.keep_last:
                write_tensors(step_file(self.folder, step), weights)
                delete_old_weights(self.folder, self.keep_last, self.average)
        if loss < self.best_loss:
            self.best_loss, self.best_step = loss, step

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_loss = state_dict["best_loss"]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the files of the checkpoint, which later validations may have replaced."""
        validated, self.best_step = validated_steps(checkpoint)
        if trainer.is_global_zero:
            restore_weights(self.folder, validated, self.best_step)


def validated_steps(checkpoint: Mapping[str, Any]) -> tuple[int, int]:
    """Return the steps of the newest and of the best validation that a checkpoint knows."""
    return checkpoint["validated"], checkpoint["callbacks"][BestWeights.__name__]["best_step"]


class LogAttention(Callback):
    """Log images of the attention between two validation sentences and their references, after each validation.

    It uses the first two pairs that are short on both sides, so that every validation shows the same pairs. It logs
    nothing for a model without attention or a corpus without short pairs.
    """

    def __init__(self, loggers: Sequence[RunLogger]) -> None:
        self.loggers = loggers

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        translator = pl_module.translator
        if pl_module.abandoned or translator is None or not attention_nodes(pl_module.network):
            return
        corpus = pl_module.prepared.val
        short = (corpus.lengths_NC.max(1) <= SHORT).nonzero()[0][:2]
        pictures = {}
        for number, index in enumerate(short.tolist(), 1):
            (row,) = corpus.rows(slice(index, index + 1))
            target = row.pop(TARGET)
            sources = {name: row[name] for name in translator.sources}
            attention = attention_of(translator, sources, target) if sources else attention_of(translator, target)
            pictures[f"attention/{number}"] = png(attention)
        for logger in self.loggers:
            logger.log_pictures(pictures, trainer.global_step)


class LogConfusion(Callback):
    """Log the confusion matrix of the validation and test labels as an image, if each label is one of a few classes."""

    def __init__(self, loggers: Sequence[RunLogger]) -> None:
        self.loggers = loggers

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        if not pl_module.abandoned:
            self._log(pl_module, "val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        if pl_module.prepared.last_scored[0] == "test":
            self._log(pl_module, "test")

    def _log(self, module: TrainingModule, split: str) -> None:
        scorer = module.scorer
        if not isinstance(scorer, LabelScorer) or not scorer.outputs or not has_confusion(scorer.coder):
            return
        counts_CC = count_confusions(scorer.coder, scorer.outputs, [label for _, _, label in scorer.samples])
        for logger in self.loggers:
            logger.log_pictures({f"confusion/{split}": confusion_png(scorer.coder, counts_CC)}, module.global_step)


class ShowProgress(Callback):
    """Show a progress bar on a terminal, and print the scores and samples of each validation.

    The lines of `heartbeat` show the step, loss and speed, or the activity, such as validating.
    """

    def __init__(self, console: Console, heartbeat: Heartbeat) -> None:
        self.console, self.heartbeat = console, heartbeat
        self.start, self.first = time.perf_counter(), 0
        self.bar: Progress | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self.start = time.perf_counter()
        self.first = trainer.global_step
        self.heartbeat.line = lambda: f"{_step(trainer)}  {self._pace(trainer, pl_module)}"
        if self.console.is_terminal:
            self.bar = progress_bar(self.console)
            self.task = self.bar.add_task("", total=trainer.max_steps, completed=trainer.global_step, news="")
            self.bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, TrainingModule)
        if self.bar:
            self.bar.update(self.task, completed=trainer.global_step, news=train_news(pl_module.latest))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.training = self.heartbeat.line
        self.heartbeat.doing(f"{_step(trainer)}  validating")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self.heartbeat.line = self.training
        if pl_module.abandoned:
            return
        line = f"{_step(trainer)}  {score_news(pl_module.latest, 'val')}"
        if not self.bar:
            line += f"  {self._pace(trainer, pl_module)}"
        self._print(line)
        for source, output, reference in pl_module.samples:
            self._print(f"  {source}\n    -> {output}" + ("" if output == reference else f"\n     = {reference}"))

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.heartbeat.doing("testing")

    def _pace(self, trainer: Trainer, module: TrainingModule) -> str:
        left = (time.perf_counter() - self.start) / max(trainer.global_step - self.first, 1)
        return f"{train_news(module.latest)}  {left * (trainer.max_steps - trainer.global_step):.0f} s left".strip()

    def _print(self, text: str) -> None:
        self.heartbeat.printed = time.monotonic()
        self.console.print(printable(text), markup=False, emoji=False, highlight=False, soft_wrap=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


def progress_bar(console: Console) -> Progress:
    """Return the progress bar of a training. Below 100 columns, the bar is shorter and the elapsed time is left out.

    Without colours, rich draws only the completed part of a bar, so a percentage replaces it.
    """
    whole = Column(no_wrap=True)
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(table_column=whole),
        TextColumn("{task.percentage:>3.0f}%") if console.no_color else BarColumn(),
        TextColumn("{task.fields[news]}"),
        *([TimeElapsedColumn()] if console.width >= 100 else []),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False, table_column=whole),
        console=console,
        speed_estimate_period=120,
    )


def _step(trainer: Trainer) -> str:
    return f"step {trainer.global_step}/{trainer.max_steps}"


def train_news(latest: dict[str, float]) -> str:
    """Return loss, learning rate and speed of the last row of metrics, or "" before the first."""
    if "train/loss" not in latest:
        return ""
    return "  ".join(_progress({name: value for name, value in latest.items() if name != SKIPPED or value}, "train"))


def score_news(latest: dict[str, float], split: str) -> str:
    """Return the scores of a split in one line."""
    return f"{split}: " + ", ".join(_progress(latest, split))


def _progress(latest: dict[str, float], split: str) -> list[str]:
    keys = (key for key in METRIC_KEYS if key.progress and key.name.startswith(f"{split}/"))
    return [key.progress.format(latest[key.name]) for key in keys if key.name in latest]


class MovingAverage(Callback):
    """Update average += (1 - d) · (weights - average) after each step, d = min(decay, (1 + steps) / (10 + steps)).

    The smaller d of the first steps forgets the initial weights, as in TensorFlow's ExponentialMovingAverage. During a
    validation, the network holds the average. This must be the last callback, because the others read the weights then.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = _weights(pl_module)
        initial = weights | self.average
        self.average = {name: initial[name].to(tensor.device, copy=True) for name, tensor in weights.items()}

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps = trainer.global_step
        weight = 1 - min(self.decay, (1 + steps) / (10 + steps))
        weights = _weights(pl_module)
        floating = [name for name, tensor in weights.items() if tensor.is_floating_point()]
        torch._foreach_lerp_([self.average[name] for name in floating], [weights[name] for name in floating], weight)
        for name in weights.keys() - floating:
            self.average[name].copy_(weights[name])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._weights = {name: tensor.clone() for name, tensor in _weights(pl_module).items()}
        fill(pl_module.network, self.average)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        fill(pl_module.network, self._weights)
        self._weights = {}

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]


def _weights(module: LightningModule) -> dict[str, Tensor]:
    assert isinstance(module, TrainingModule)
    return saved_weights(module.network)
