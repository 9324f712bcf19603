"""What a run does beside training: it keeps weights and shows how far it is."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tfm_blocks.network.attention import attention_nodes
from tfm_blocks.report.attention import png
from tfm_blocks.runs.average import step_file, step_files
from tfm_blocks.runs.model import weights_of, write_tensors
from tfm_blocks.training.loggers import WandbLogger
from tfm_blocks.training.module import TrainingModule
from tfm_blocks.translation.attention import attention_of

LAST = "last.ckpt"
BEST = "best.ckpt"
SHORT = 24  # tokens of a sentence whose attention is pictured: the labels of eight heads of them still fit a screen


class KeepWeights(Callback):
    """Each validation leaves `last.ckpt`, all that is needed to go on, and the lowest loss `best.ckpt`, weights only.

    The loss decides, not BLEU: it is over the whole validation set, and a few sentences' BLEU is noise. The weights of
    the last `keep_last` validations stay too, to be averaged.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.best_loss = math.inf

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        loss = pl_module.latest["val/loss"]
        if loss < self.best_loss:
            self.best_loss = loss
            trainer.save_checkpoint(self.folder / BEST, weights_only=True)
        if trainer.is_global_zero and self.keep_last:
            write_tensors(step_file(self.folder, trainer.global_step), weights_of(pl_module.network))
            for path in step_files(self.folder)[: -self.keep_last]:
                path.unlink()
        trainer.save_checkpoint(self.folder / LAST)  # after which all ranks go on: what rank 0 wrote is there for all

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_loss = state_dict["best_loss"]


class LogAttention(Callback):
    """Each validation logs pictures of the attention between two validation sentences and their references.

    They are the first that are short on both sides, so that all validations show the same and a picture takes no longer
    than a moment; a model without attention, or a corpus without short sentences, has none.
    """

    def __init__(self, logger: WandbLogger) -> None:
        self.logger = logger

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        if not attention_nodes(pl_module.network):
            return
        corpus = pl_module.prepared.val
        short = (np.maximum(corpus.src_lengths_N, corpus.tgt_lengths_N) <= SHORT).nonzero()[0][:2]
        pictures = {}
        for number, pair in enumerate(short, 1):
            looked = attention_of(pl_module.translator, corpus.sources[pair], corpus.references[pair])
            pictures[f"attention/{number}"] = png(looked)
        self.logger.log_pictures(pictures, trainer.global_step)


class ShowProgress(Callback):
    """A bar on a terminal; elsewhere a line each validation. Samples are shown in both."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Progress | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begun = time.perf_counter()
        self.first = trainer.global_step
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[news]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(elapsed_when_finished=False),
                console=self.console,
                speed_estimate_period=120,
            )
            self.task = self.bar.add_task("", total=trainer.max_steps, completed=trainer.global_step, news="")
            self.bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, TrainingModule)
        if self.bar:
            self.bar.update(self.task, completed=trainer.global_step, news=train_news(pl_module.latest))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        left = (time.perf_counter() - self.begun) / max(trainer.global_step - self.first, 1)
        seconds = left * (trainer.max_steps - trainer.global_step)
        line = f"step {trainer.global_step}/{trainer.max_steps}  {score_news(pl_module.latest, 'val')}"
        if not self.bar:
            line += f"  {train_news(pl_module.latest)}  {seconds:.0f} s left"
        self._print(line)
        for source, output, reference in pl_module.samples:
            self._print(f"  {source}\n    -> {output}" + ("" if output == reference else f"\n     = {reference}"))

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None


def train_news(latest: dict[str, float]) -> str:
    """Loss, learning rate and pace, as the last log had them."""
    if "train/loss" not in latest:
        return ""
    loss, rate, pace = (latest[f"train/{name}"] for name in ("loss", "lr", "tokens_per_second"))
    return f"loss {loss:.3f}  lr {rate:.2e}  {pace:,.0f} tokens/s"


def score_news(latest: dict[str, float], split: str) -> str:
    """The scores of a split in one line."""
    forms = {
        "loss": "loss {:.3f}",
        "perplexity": "perplexity {:.2f}",
        "token_accuracy": "tokens {:.1%}",
        "bleu": "BLEU {:.2f}",
        "chrf": "chrF {:.2f}",
        "exact_match": "exact {:.1%}",
    }
    found = [form.format(latest[f"{split}/{name}"]) for name, form in forms.items() if f"{split}/{name}" in latest]
    return f"{split}: " + ", ".join(found)
