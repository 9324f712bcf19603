"""The loss and the scores of labels: of a class, of several, of a number, or of each word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.labels import LabelCoder
from tfm_blocks.data.layout import Batch
from tfm_blocks.data.mix import Mix
from tfm_blocks.data.objectives import LabelSettings
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.devices import without_autocast
from tfm_blocks.language.spec import TARGET
from tfm_blocks.scoring.corpus import MEASURES
from tfm_blocks.scoring.labels import label_statistics
from tfm_blocks.training.objective import Objective
from tfm_blocks.training.split_scorer import Generation, Predictions, SplitScorer


def class_weights(settings: LabelSettings, corpus: Corpus) -> Tensor | None:
    """Return the weight of each class; `balanced`: n / (C · n_c) for n labels of an epoch, n_c of them of class c."""
    coder = corpus.labels
    assert coder is not None, "objective=label needs data=labels"
    if settings.weights is None or coder.predict == "number":
        return None
    if isinstance(settings.weights, str):
        counts_C = _class_counts(corpus, coder.outputs)
        balanced_C = counts_C.sum() / (coder.outputs * np.where(counts_C > 0, counts_C, 1))
        return torch.tensor(balanced_C, dtype=torch.float32)
    return torch.tensor([settings.weights[name] for name in coder.names])


def _class_counts(corpus: Corpus, classes: int) -> npt.NDArray[np.float64]:
    """Return the mean number of labels of each class in an epoch, which reads the rows of a mix unequally often."""
    if isinstance(corpus, Mix) and corpus.counts_P:
        parts = zip(corpus.parts.values(), corpus.counts_P, strict=True)
        counts_PC = np.stack([count / len(part) * _class_counts(part, classes) for part, count in parts])
        mixed_C: npt.NDArray[np.float64] = counts_PC.sum(0)
        return mixed_C
    ids = chain.from_iterable(corpus.ids(TARGET, row).tolist() for row in range(len(corpus)))
    return np.bincount(np.fromiter(ids, np.int64), minlength=classes + 1)[1:].astype(np.float64)


class LabelObjective(Objective):
    """The loss of labels, as in transformers: cross-entropy, binary cross-entropy of each class, or squared error.

    The outputs are the logits of the model except the first, which belongs to padding. `weights_C` are the factors of
    the loss for each class. The loss of several classes is the mean over classes.
    """

    def __init__(self, *arguments: Any, coder: LabelCoder, weights_C: Tensor | None = None) -> None:
        super().__init__(*arguments)
        self.coder, self.weights_C = coder, weights_C

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sums over the batch: the differentiable total, and [loss, -log p, auxiliary losses...]."""
        x_ND, labels_N, losses = self._predicted(batch)
        loss_N, nll_N = self._losses(self._outputs(x_ND), labels_N, batch)
        loss, nll = loss_N.sum(), nll_N.sum()
        return self.total(batch, loss, [loss, nll], losses)

    def label_outputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss and -log p of each label, and the outputs_NC."""
        x_ND, labels_N, _ = self._predicted(batch)
        with without_autocast(x_ND.device):
            outputs_NC = self._outputs(x_ND.float())
            return *self._losses(outputs_NC, labels_N, batch), outputs_NC

    def _outputs(self, x_ND: Tensor) -> Tensor:
        return self.network.head(x_ND)[:, self.network.first_predicted :].float()

    def _losses(self, outputs_NC: Tensor, labels_N: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted and smoothed loss of each label, and its loss without both."""
        weights_C = None if self.weights_C is None else self.weights_C.to(outputs_NC)
        if batch.values_NC is None:
            nll_N = F.cross_entropy(outputs_NC, labels_N - 1, reduction="none")
            if weights_C is None and not self.smoothing:
                return nll_N, nll_N
            options = {"weight": weights_C, "label_smoothing": self.smoothing}
            return F.cross_entropy(outputs_NC, labels_N - 1, reduction="none", **options), nll_N  # type: ignore[arg-type]
        values_NC = batch.values_NC.to(outputs_NC)
        if self.coder.predict == "number":
            error_N = (outputs_NC - values_NC).square()[:, 0]
            return error_N, error_N
        nll_NC = F.binary_cross_entropy_with_logits(outputs_NC, values_NC, reduction="none")
        return (nll_NC if weights_C is None else nll_NC * weights_C).mean(1), nll_NC.mean(1)


def label_scores(outputs: Sequence[str], references: Sequence[str], coder: LabelCoder) -> dict[str, float]:
    """Return the scores of labels, from 0 to 1 or from -1 to 1.

    For classes: accuracy, F1 as the mean over the classes that occur in outputs or references, and Matthews'
    correlation. For several classes: the fraction of right decisions, and F1. For numbers: Spearman's rank correlation.
    """
    statistics = label_statistics(outputs, references, coder)
    scores = {name: float(MEASURES[name](stats_NK.sum(0)[None])[0]) for name, stats_NK in statistics.items()}
    return {name: score / 100 if name == "accuracy" else score for name, score in scores.items()}


class LabelScorer(SplitScorer):
    """Compute the loss and the scores of the labels of one split at a time."""

    counts_rows = True

    def __init__(self, prepared: Prepared, ranks: Ranks) -> None:
        super().__init__(ranks, max(len(prepared.val), len(prepared.last_scored[1])), prepared.train.mixed)
        coder = prepared.train.labels
        assert coder is not None, "objective=label needs data=labels"
        self.coder = coder
        self.predicted: dict[int, list[list[float]]] = {}  # outputs of the labels of each row

    def restart(self, corpus: Corpus) -> None:
        """Reset the metrics before a split."""
        super().restart(corpus)
        self.predicted = {}

    def count_rows(self, objective: Objective, batch: Batch) -> Predictions:
        """Add the losses and the outputs of a batch."""
        assert isinstance(objective, LabelObjective), "the module makes both"
        loss_N, nll_N, outputs_NC = objective.label_outputs(batch)
        predictions = self.add(batch, loss_N, nll_N, outputs_NC.argmax(1) + 1)
        for row, outputs in zip(predictions.row_N.tolist(), outputs_NC.tolist(), strict=True):
            self.predicted.setdefault(row, []).append(outputs)
        return predictions

    def score(self, corpus: Corpus, generation: Generation) -> dict[str, float]:
        """Return the loss and the scores of all labels; nothing is generated."""
        scores: dict[str, float] = self.tokens.compute()
        del scores["token_accuracy"]
        if self.coder.predict in ("number", "several"):
            del scores["perplexity"]
        self.outputs, self.samples = [], []
        if not math.isfinite(scores["loss"]):
            return scores
        rows = self.keep_outputs(corpus, {row: self.coder.text_of(outputs) for row, outputs in self.predicted.items()})
        labels = [label for _, _, label in self.samples]
        scores |= label_scores(self.outputs, labels, self.coder)
        for name in corpus.mixed:
            lines = [line for line, row in enumerate(rows) if corpus.groups[row] == name]
            outputs, references = ([texts[line] for line in lines] for texts in (self.outputs, labels))
            part = label_scores(outputs, references, self.coder) if lines else {}
            scores |= {f"{key}/{name}": value for key, value in part.items()}
        return scores
