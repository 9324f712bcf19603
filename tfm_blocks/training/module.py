"""What happens in an optimizer step, and how a model is scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
import torch.distributed
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tfm_blocks.data.collate import Batch
from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.errors import Problem, TfmError
from tfm_blocks.network.graph import Network
from tfm_blocks.training.data import StepBatches
from tfm_blocks.training.loggers import RunLogger
from tfm_blocks.training.loss import chunk_size, smoothed_loss
from tfm_blocks.training.metrics import Pace, token_scores, translation_scores
from tfm_blocks.training.optimizer import build_optimizer
from tfm_blocks.training.processes import Ranks
from tfm_blocks.training.schedule import build_schedule
from tfm_blocks.training.settings import RunSettings
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator


class DivergedError(TfmError):
    """The loss or its gradient is not finite; the weights are still those of the step before."""

    exit_status = 3


class TrainingModule(LightningModule):
    """A network in training: one item of the loader is one optimizer step.

    `latest` holds the newest of every metric, `outputs` the newest translations of the split that was scored last.
    """

    def __init__(self, network: Network, prepared: Prepared, settings: RunSettings, ranks: Ranks) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.network, self.prepared, self.settings, self.ranks = network, prepared, settings, ranks
        self.translator = Translator(network, prepared.tokenizer)
        self.latest: dict[str, float] = {}
        self.outputs: list[str] = []
        self.pace = Pace()

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.settings.optimizer, self.network)
        return [optimizer], [build_schedule(self.settings.schedule, optimizer)]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Only a micro-batch moves, when its turn comes; the many of a step would fill an accelerator."""
        return batch

    def on_train_start(self) -> None:
        self._window = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.pace.restart()

    def training_step(self, step: StepBatches) -> None:
        """Gradients of all micro-batches, then one step of the optimizer. Raises DivergedError."""
        self._seed_dropout()
        optimizer, schedule = cast(LightningOptimizer, self.optimizers()), cast(LambdaLR, self.lr_schedulers())
        optimizer.zero_grad()
        loss = self._accumulate(step)
        limit = self.settings.trainer.clip or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.network.parameters(), limit))
        rate = float(schedule.get_last_lr()[0])
        if not math.isfinite(norm + loss):
            help = f"lower the learning rate (it is {rate:.2e}), warm up longer, or clip: trainer.clip=1.0"
            raise self._diverged(f"loss {loss:.4g}, gradient norm {norm:.4g}", help)
        optimizer.step()
        schedule.step()
        self._note(step, loss, norm, rate)

    def _seed_dropout(self) -> None:
        """Dropout depends on nothing but the seed, the step and the rank, so a resumed run draws the same."""
        words = np.random.SeedSequence((self.settings.seed, self.global_step, self.ranks.rank)).generate_state(1)
        torch.default_generator.manual_seed(int(words[0]))  # torch.manual_seed takes a millisecond
        if self.device.type == "cuda":
            torch.cuda.manual_seed(int(words[0]))

    def _accumulate(self, step: StepBatches) -> float:
        """Adds up the gradients; the ranks exchange them in the last micro-batch's backward. This rank's loss."""
        total = 0.0
        for batch in step.batches[:-1]:
            with self._no_exchange():
                total += self._backward(batch, step.tokens)
        return total + self._backward(step.batches[-1], step.tokens)

    def _no_exchange(self) -> AbstractContextManager[None]:
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()

    def _backward(self, batch: Batch, tokens: int) -> float:
        """The share of the step's mean loss; times the ranks, because their gradients are averaged."""
        x_ND, labels_N = self._kept(batch)
        loss = self._loss(x_ND, labels_N)[0]
        self.manual_backward(loss * (self.ranks.world / tokens))
        return loss.item()

    def _kept(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The trunk's output and the labels of the target tokens, padding left out."""
        src_BS, tgt_BT, labels_BT = (ids.to(self.device) for ids in (batch.src_BS, batch.tgt_BT, batch.labels_BT))
        x_BTD = self.network.trunk(src=src_BS, tgt=tgt_BT)
        kept_N = labels_BT.flatten().nonzero()[:, 0]
        return x_BTD.flatten(0, 1).index_select(0, kept_N), labels_BT.flatten()[kept_N]

    def _loss(self, x_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        head, parameters = self.network.head, self.network.head_parameters()
        smoothing, chunk = self.settings.label_smoothing, chunk_size(x_ND)
        return smoothed_loss(head, parameters, x_ND, labels_N, smoothing=smoothing, chunk=chunk)

    def _diverged(self, what: str, help: str) -> DivergedError:
        return DivergedError(Problem("", f"the run diverged after {self.global_step} steps: {what}", help=help))

    def _note(self, step: StepBatches, loss: float, norm: float, rate: float) -> None:
        """Logs every few steps the mean loss since the last time."""
        self.pace.count(step.tokens)
        self._window += torch.tensor([loss, step.tokens], device=self.device)
        if self.global_step % self.settings.trainer.log_every and self.global_step < self.settings.trainer.steps:
            return
        loss_sum = self._sum_over_ranks(self._window[:1]).item()
        values = (loss_sum / self._window[1].item(), rate, norm, self.pace.read())
        self._window.zero_()
        self._log(dict(zip(("loss", "lr", "gradient_norm", "tokens_per_second"), values, strict=True)), "train")

    def on_validation_epoch_start(self) -> None:
        self._totals = torch.zeros(4, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch) -> None:
        """Adds to the sums: loss, -log p, right tokens, tokens. Logits in float32, where bf16 would make ties."""
        x_ND, labels_N = self._kept(batch)
        with torch.autocast(self.device.type, enabled=False):
            sums = self._loss(x_ND.float(), labels_N)
        self._totals += torch.stack([*(one.double() for one in sums), torch.tensor(len(labels_N), device=self.device)])

    def on_validation_epoch_end(self) -> None:
        self._score("val", self.prepared.val, self.settings.trainer.validate_sentences, Search())

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self._score("test", self.prepared.test, len(self.prepared.test), self.settings.trainer.test_search)

    def _score(self, split: str, corpus: Corpus, sentences: int, search: Search) -> None:
        """Scores over the whole split; translations of its first sentences."""
        scores = token_scores(*self._sum_over_ranks(self._totals).tolist())
        if not math.isfinite(scores["loss"]):
            raise self._diverged(f"{split} loss {scores['loss']}", "lower the learning rate, or warm up longer")
        sources, references = corpus.sources[:sentences], corpus.references[:sentences]
        self.outputs = self._translate(sources, search)
        if self.outputs:
            scores |= translation_scores(self.outputs, references, self.settings.trainer.bleu)
        self._log(scores, split)
        self.samples = list(zip(sources, self.outputs, references, strict=True))[: self.settings.trainer.samples]
        for logger in self._run_loggers():
            logger.log_samples(self.samples, self.global_step)
        self.pace.restart()

    def _translate(self, sources: Sequence[str], search: Search) -> list[str]:
        """Each rank translates every world-th."""
        found = self.translator.search(sources[self.ranks.rank :: self.ranks.world], search)
        mine = [best[0].text for best in found]
        if self.ranks.world == 1:
            return mine
        parts: list[list[str]] = [[] for _ in range(self.ranks.world)]
        torch.distributed.all_gather_object(parts, mine)
        return [parts[place % self.ranks.world][place // self.ranks.world] for place in range(len(sources))]

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        return cast(Tensor, self.trainer.strategy.reduce(values.clone(), reduce_op="sum"))

    def _log(self, scores: dict[str, float], split: str) -> None:
        named = {f"{split}/{name}": value for name, value in scores.items()}
        self.latest |= named
        for logger in self._run_loggers():
            logger.log_metrics(named, self.global_step)

    def _run_loggers(self) -> list[RunLogger]:
        return [logger for logger in self.trainer.loggers if isinstance(logger, RunLogger)]
