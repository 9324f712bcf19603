"""The LightningModule: the optimizer and its steps, validation and test."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.layout import Batch
from tfm_blocks.data.objective_layouts import HiddenTokens, layout_of
from tfm_blocks.data.objectives import (
    DistilSettings,
    HidingSettings,
    LabelSettings,
    MaskedSettings,
    ReplacedTokenSettings,
)
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.data.probe_settings import ProbeSettings
from tfm_blocks.devices import CPU, seed_device, sum_dtype, without_autocast
from tfm_blocks.language.spec import names
from tfm_blocks.metric_schema import SECONDS, TOKENS, find_key
from tfm_blocks.network.call import losses_of
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import saved_weights
from tfm_blocks.runs.model import read_network
from tfm_blocks.runs.records import Score
from tfm_blocks.scoring.labels import Floats
from tfm_blocks.scoring.perplexity import pseudo_losses, pseudo_score, usual_context
from tfm_blocks.tracking.loggers import RunLogger
from tfm_blocks.training.answers import AnswerScorer
from tfm_blocks.training.data import StepBatches
from tfm_blocks.training.evaluation import Scorer
from tfm_blocks.training.fsdp2 import FSDP2Strategy, full_tensors, shard
from tfm_blocks.training.groups import build_optimizer, freeze, set_rates
from tfm_blocks.training.labels import LabelObjective, LabelScorer, class_weights
from tfm_blocks.training.loss import backward_scale
from tfm_blocks.training.metrics import StepSums, Throughput
from tfm_blocks.training.non_finite import NonFiniteSteps, diverged
from tfm_blocks.training.objective import Objective, Trunk, make_objective
from tfm_blocks.training.optimizers import expect_equal_groups
from tfm_blocks.training.settings import RunSettings, measured_kinds
from tfm_blocks.training.split_scorer import Generation, MaskedScorer, ReplacedScorer, SplitScorer
from tfm_blocks.translation.fill import Filler
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator


class TrainingModule(LightningModule):
    """Train a network: one item of the loader is one optimizer step.

    With `adam` or `adamw`, a step synchronises with the device only when it logs metrics; with other optimizers and in
    mixtures of experts in float32 it always does.
    `latest` holds the newest value of every metric. `stop_signal` returns the pending stop signal of this rank, or 0.
    If a signal is pending on any rank, the validation is `abandoned` and logs no scores.
    """

    def __init__(
        self,
        network: Network,
        prepared: Prepared,
        settings: RunSettings,
        ranks: Ranks,
        skipped: NonFiniteSteps,
        stop_signal: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.network, self.prepared, self.settings, self.ranks = network, prepared, settings, ranks
        generates = (
            settings.objective.generates
            and not layout_of(prepared.train, names(network.spec.inputs), settings.objective).at_positions
        )
        self.translator = Translator(network, prepared.tokenizer, prepared.train.columns) if generates else None
        freeze(settings.optimizer, network)
        network.recomputes = settings.trainer.activation_checkpointing
        self.objective = self._make_objective(_compiled_trunk(network) if settings.trainer.compile else None)
        self.latest: dict[str, float] = {}
        self.row_losses = np.zeros((0, 6))  # of the split that was scored last
        self.row_corpora: list[str] = []  # the corpus of each of these rows, if they are a mix
        self.pseudo: tuple[Score, Floats] | None = None  # the pseudo-perplexity, and its losses by text
        self.stop_signal, self.abandoned = stop_signal, False
        self.skipped = skipped
        self.losses = settings.losses.names_with(losses_of(network.spec), settings.objective)
        self.steps, self.throughput = StepSums(self.losses), Throughput()
        self.tokens = 0  # target tokens that all ranks have read
        self.validated = -1  # the step of the newest complete validation
        self.seconds_before, self.start = 0.0, time.monotonic()  # the time before a resume
        self.scorer = self._make_scorer()
        self.strict_loading = not network.spec.adapted  # a checkpoint has the adapters alone

    def _make_objective(self, trunk: Trunk | None) -> Objective:
        settings, corpus = self.settings, self.prepared.train
        options, objective = (self.network, settings.label_smoothing, trunk, settings.losses), settings.objective
        if isinstance(objective, LabelSettings):
            assert corpus.labels is not None, "objective=label needs data=labels"
            return LabelObjective(*options, coder=corpus.labels, weights_C=class_weights(objective, corpus))
        teacher = read_network(Path(objective.teacher)) if isinstance(objective, DistilSettings) else None
        return make_objective(objective, *options, teacher)

    def _make_scorer(self) -> SplitScorer:
        settings, prepared, ranks = self.settings, self.prepared, self.ranks
        data, objective = settings.data, settings.objective
        if isinstance(objective, LabelSettings):
            return LabelScorer(prepared, ranks)
        if isinstance(data, ProbeSettings):
            return AnswerScorer(self.translator, prepared, ranks, data.probe.chance)
        rows, mixed = len(prepared.last_scored[1]), prepared.train.mixed
        if isinstance(objective, ReplacedTokenSettings):
            return ReplacedScorer(ranks, max(len(prepared.val), rows), mixed)
        if isinstance(objective, HidingSettings):
            return MaskedScorer(ranks, rows, prepared.tokenizer, settings.trainer.samples, mixed)
        if self.translator is None:
            return SplitScorer(ranks, rows, mixed)
        return Scorer(self.translator, prepared, ranks, bleu=settings.trainer.bleu)

    @property
    def seconds(self) -> float:
        """Return the seconds of training up to now."""
        return self.seconds_before + time.monotonic() - self.start

    def configure_model(self) -> None:
        """Shard the network for FSDP2; called before the optimizer exists, and at each stage of the trainer."""
        strategy = self.trainer.strategy
        if isinstance(strategy, FSDP2Strategy):
            shard(self.network, strategy.device_mesh["data_parallel"])
            self.objective.trunk = self.network.trunk_with_losses

    def configure_optimizers(self) -> Any:
        schedule = self.settings.schedule
        optimizer = build_optimizer(self.settings.optimizer, self.network, peak=schedule.rate(schedule.warmup))
        optimizer.register_load_state_dict_pre_hook(expect_equal_groups)
        return optimizer

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the step unchanged: `_backward` moves one micro-batch at a time, to save memory."""
        return batch

    def on_train_start(self) -> None:
        self.start = time.monotonic()
        self.throughput.restart()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Return -1, which ends training, if a validation that a resumed run repeated has stopped it early."""
        return -1 if self.trainer.should_stop else None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the counters, the newest metrics, and the sums over all ranks since metrics were last logged."""
        self.skipped.flush()
        if self.network.spec.adapted:
            state, saved = checkpoint["state_dict"], saved_weights(self.network)
            checkpoint["state_dict"] = {f"network.{name}": state[f"network.{name}"] for name in saved}
        checkpoint["tokens"], checkpoint["seconds"] = self.tokens, self.seconds
        checkpoint["validated"] = self.validated
        checkpoint["latest"] = {name: float(value) for name, value in self.latest.items()}
        checkpoint["counted"] = self.steps.kept() | {"in_row": self.skipped.in_row}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seconds_before, self.start = checkpoint["seconds"], time.monotonic()
        self.validated = checkpoint["validated"]
        self.latest = checkpoint.get("latest", {})
        self.tokens, counted = checkpoint["tokens"], checkpoint["counted"]
        self.skipped.in_row = counted["in_row"]
        self.steps.restore(counted, self.ranks.rank)

    def training_step(self, step: StepBatches) -> None:
        """Accumulate the gradients of all micro-batches, then step the optimizer.

        The optimizer skips a step whose gradient is not finite. Raises DivergedError.
        """
        # seeds dropout by the run's seed, the step and the rank, so that a resumed run draws the same values
        words = np.random.SeedSequence((self.settings.seed, self.global_step, self.ranks.rank)).generate_state(1)
        seed_device(self.device, int(words[0]))
        self.objective.step = self.global_step + 1
        optimizer = cast(LightningOptimizer, self.optimizers())
        optimizer.zero_grad()
        sums = self._accumulate(step)
        trainer = self.settings.trainer
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        norm = torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
        if trainer.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, trainer.clip, norm)
        norm = full_tensors(norm)  # before clipping
        skipped = ~norm.isfinite()
        optimizer.optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]  # read by torch's fused kernels and by JointOptimizer
        rate = set_rates(optimizer.param_groups, self.settings.schedule, self.global_step + 1)
        with without_autocast(self.device):  # Lightning calls this method under autocast
            optimizer.step()
        self.skipped.note(skipped, self.global_step, step.rows)
        self.steps.update(sums, step, norm, skipped)
        self.throughput.update(step.own_tokens, step.waited)
        self.tokens += step.tokens
        if self.global_step % trainer.log_every == 0 or self.global_step == trainer.steps:
            metrics = self.steps.read()
            norm_read, limit = metrics["gradient_norm"], trainer.clip or math.inf
            clipped = norm_read * min(1.0, limit / (norm_read + 1e-6))  # as torch's clip_grad_norm_ scales it
            metrics |= {"gradient_norm_clipped": clipped, "lr": rate}
            self._log(metrics | self.throughput.read(self.ranks.world), "train")
            self.skipped.flush()

    def _accumulate(self, step: StepBatches) -> Tensor:
        """Accumulate gradients. The ranks exchange them in the backward pass of the last micro-batch.

        Return sums over the tokens of this rank: the loss, -log p, and the other losses.
        """
        total = torch.zeros(2 + len(self.losses), dtype=sum_dtype(self.device), device=self.device)
        strategy = self.trainer.strategy
        for batch in step.batches[:-1]:
            with strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext():
                total += self._backward(batch, step.tokens)
        return total + self._backward(step.batches[-1], step.tokens)

    def _backward(self, batch: Batch, tokens: int) -> Tensor:
        """Compute the gradient of the step's mean loss, times the number of ranks, which average gradients."""
        loss, sums = self.objective.loss(batch.to(self.device))
        with without_autocast(self.device):  # products that the forward pass computes in float32 have such gradients
            self.manual_backward(loss * backward_scale(loss, self.ranks.world / tokens))
        return sums

    def on_validation_epoch_start(self) -> None:
        self.scorer.restart(self.prepared.val)

    def validation_step(self, batch: Batch) -> None:
        """Count the batch, unless a stop was requested."""
        if self._is_stopping():
            return
        self.scorer.count(self.objective, batch.to(self.device))

    def on_validation_epoch_end(self) -> None:
        """Score and log the validation set. All ranks decide together, before and after the search, to abandon it."""
        if self._decide_abandoned():
            return
        scores = self._score("val", self.prepared.val, self.settings.trainer.validate_sentences, Search())
        if self._decide_abandoned():
            return
        self._log(scores, "val")
        self.validated = self.global_step

    def _decide_abandoned(self) -> bool:
        """Set `abandoned` on all ranks if a stop was requested on any rank; return it."""
        stopping = torch.tensor(float(self._is_stopping()), device=self.device)
        self.abandoned = bool(self.trainer.strategy.reduce(stopping, reduce_op="max"))
        if self.abandoned:
            self.trainer.sanity_checking = True  # makes Lightning's callbacks ignore this validation
        return self.abandoned

    def _is_stopping(self) -> bool:
        """Return True if a stop was requested on this rank during training. Later, a signal exits immediately."""
        return self.trainer.state.fn == TrainerFn.FITTING and bool(self.stop_signal())

    def on_test_epoch_start(self) -> None:
        self.scorer.restart(self.prepared.last_scored[1])

    def test_step(self, batch: Batch) -> None:
        """Add the batch to the sums of the split and of each row."""
        self.scorer.count_rows(self.objective, batch.to(self.device))

    def on_test_epoch_end(self) -> None:
        """Score the test set and log it.

        Without a test set, score the validation set with the search settings of the test, and do not log it.
        """
        split, corpus = self.prepared.last_scored
        self.row_losses, self.row_corpora = self.scorer.row_losses(corpus), self.scorer.row_corpora(corpus)
        self._score_pseudo_perplexity(corpus)
        scores = self._score(split, corpus, len(corpus), self.settings.trainer.test_search)
        if split == "test":
            self._log(scores, split)
        self.latest |= _with_prefix(scores, split)

    def _score_pseudo_perplexity(self, corpus: Corpus) -> None:
        """Set `pseudo` for the first `objective.pseudo_documents`, which the ranks share; in float32."""
        objective, data = self.settings.objective, self.settings.data
        if not isinstance(objective, MaskedSettings) or not objective.pseudo_documents:
            return
        layout = layout_of(corpus, names(self.network.spec.inputs), objective)
        assert isinstance(layout, HiddenTokens), "it is the layout of objective=masked"
        texts = [*islice(corpus.texts(layout.column), objective.pseudo_documents)]
        own = range(self.ranks.rank, len(texts), self.ranks.world)
        filler = Filler(self.network, self.prepared.tokenizer)
        context = usual_context(getattr(data, "context", None), self.network.longest(filler.input).tokens)
        own_texts = [texts[number] for number in own]
        losses_D2 = pseudo_losses(filler, own_texts, context=context, batch_tokens=data.batch_tokens)
        by_text = self.scorer.gather(dict(zip(own, losses_D2.tolist(), strict=True)))
        self.pseudo = pseudo_score(np.array([*by_text.values()]), filler, context=context)

    def _score(self, split: str, corpus: Corpus, sentences: int, search: Search) -> dict[str, float]:
        """Return the scores of a split. Raises DivergedError if the loss is not finite."""
        plugin = self.trainer.precision_plugin  # a search on a CPU computes in float32
        precision = nullcontext() if self.device.type == CPU else plugin.forward_context()
        scores = self.scorer.score(corpus, Generation(sentences, search, precision, self._is_stopping))
        if not math.isfinite(scores["loss"]):
            raise diverged(self.global_step, f"{split} loss {scores['loss']}")
        self.throughput.restart()
        parts = self.scorer.parts.compute() if corpus.mixed else {}
        return scores | {name: value for name, value in parts.items() if name.partition("/")[0] in scores}

    @property
    def samples(self) -> list[tuple[str, str, str]]:
        """Return the first `trainer.samples` of the scored translations, as (source, output, reference)."""
        return self.scorer.samples[: self.settings.trainer.samples]

    def _log(self, scores: dict[str, float], split: str) -> None:
        """Log the scores with the tokens and seconds so far, which make runs with different batches comparable.

        So are the samples of a validation or a test.
        Scores that the table of metrics excludes for the kind of run are left out, such as the perplexity of numbers.
        """
        kinds = measured_kinds(self.settings.data, self.settings.objective)
        named = _with_prefix(scores, split) | {TOKENS: self.tokens, SECONDS: self.seconds}
        named = {name: value for name, value in named.items() if find_key(name).is_of(kinds)}
        self.latest |= named
        for logger in self.trainer.loggers:
            logger.log_metrics(named, self.global_step)
        callback_metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in named.items()}
        self.trainer.callback_metrics.update(callback_metrics)  # for callbacks that monitor a metric; self.log is slow
        for logger in self.trainer.loggers if self.samples and split != "train" else ():
            if isinstance(logger, RunLogger):
                logger.log_samples(split, self.samples, self.global_step)


def _compiled_trunk(network: Network) -> Trunk:
    """Compile the trunk, with a backward pass that runs outside autocast, as `_backward` does."""
    torch._functorch.config.backward_pass_autocast = "off"
    return torch.compile(network.trunk_with_losses, dynamic=True)


def _with_prefix(scores: dict[str, float], split: str) -> dict[str, float]:
    return {f"{split}/{name}": value for name, value in scores.items()}
