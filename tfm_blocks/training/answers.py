"""Score the answers of a model to a probe task, for each test length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.layout import EOS, SOURCE, Batch
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.language.spec import TARGET
from tfm_blocks.scoring.labels import Floats
from tfm_blocks.training.metrics import RowSums
from tfm_blocks.training.objective import Objective
from tfm_blocks.training.split_scorer import Generation, Predictions, SplitScorer
from tfm_blocks.translation.translator import Translator


class AnswerScorer(SplitScorer):
    """Compute the metrics of one split of a probe task at a time; `chance` is the accuracy of guesses.

    With a `translator` the model generates each answer token by token from its own output; the accuracy of single
    tokens after the correct ones is a second score. Without one, the model answers at positions of the input.
    """

    counts_rows = True

    def __init__(self, translator: Translator | None, prepared: Prepared, ranks: Ranks, chance: float) -> None:
        rows = max(len(prepared.val), len(prepared.last_scored[1]))
        super().__init__(ranks, rows)
        self.translator, self.tokenizer, self.chance = translator, prepared.tokenizer, chance
        self.forced, self.generated = RowSums(rows, 2), RowSums(rows, 2)
        self.answers: dict[int, list[int]] = {}

    def restart(self, corpus: Corpus) -> None:
        """Reset the metrics before a split."""
        super().restart(corpus)
        self.forced.reset()
        self.generated.reset()
        self.answers = {}

    def count_rows(self, objective: Objective, batch: Batch) -> Predictions:
        """Add the losses of a batch, and its answer tokens given the correct ones before."""
        predictions = super().count_rows(objective, batch)
        answer_N = predictions.labels_N != EOS
        correct_N = (predictions.best_N == predictions.labels_N)[answer_N]
        self.forced.update(torch.stack([correct_N, torch.ones_like(correct_N)], 1), predictions.row_N[answer_N])
        if self.translator is None:
            for row, token in zip(predictions.row_N.tolist(), predictions.best_N.tolist(), strict=True):
                self.answers.setdefault(row, []).append(token)
        return predictions

    def score(self, corpus: Corpus, generation: Generation) -> dict[str, float]:
        """Return the loss and the scores of the answers. Only the first answers are generated."""
        scores = {name: value for name, value in self.tokens.compute().items() if name != "token_accuracy"}
        self.outputs, self.samples = [], []
        if not math.isfinite(scores["loss"]):
            return scores
        forced = answer_scores(self.forced.compute().cpu().numpy(), corpus.groups, self.chance)
        if self.translator is not None:
            with generation.precision:
                rows = range(min(generation.rows, len(corpus)))[self.ranks.rank :: self.ranks.world]
                longest = int(corpus.lengths_N(TARGET).max()) + 1
                search = replace(generation.search, longest=(0.0, longest), max_tokens=longest)
                counts: list[list[int]] = []
                outputs = self.translator.search(
                    [corpus.text[SOURCE][row] for row in rows], search, stop=generation.stop
                )
                for row, (best, *_) in zip(rows, outputs, strict=True):
                    answer = corpus.ids(TARGET, row).tolist()
                    self.answers[row] = list(best.ids)
                    correct = sum(token == right for token, right in zip(best.ids, answer, strict=False))
                    counts.append([correct, max(len(best.ids), len(answer))])
                counts_R2 = self.generated.sums.new_tensor(counts).view(-1, 2)
                self.generated.update(counts_R2, torch.tensor(rows, dtype=torch.int64, device=counts_R2.device))
        self.keep_outputs(corpus, {row: " ".join(map(self.tokenizer.piece, ids)) for row, ids in self.answers.items()})
        if self.translator is None:
            return scores | forced
        generated = answer_scores(self.generated.compute().cpu().numpy(), corpus.groups, self.chance)
        accuracies = {name: value for name, value in forced.items() if name.partition("@")[0] == "accuracy"}
        return scores | generated | {f"teacher_forced_{name}": value for name, value in accuracies.items()}


def answer_scores(counts_R2: Floats, groups: Sequence[str], chance: float) -> dict[str, float]:
    """Return the accuracy, the same scaled by chance, and the fraction of exact answers, of all rows and of each group.

    `counts_R2` has the correct tokens and all tokens of each row; a row without tokens was not scored. The accuracy is
    the mean over rows of the fraction of correct tokens.
    """
    parts: dict[str, list[int]] = {}
    for row in np.flatnonzero(counts_R2[:, 1]).tolist():
        for suffix in ("", f"@{groups[row]}") if groups else ("",):
            parts.setdefault(suffix, []).append(row)
    scores = {}
    for suffix, rows in parts.items():
        accuracy_N = counts_R2[rows, 0] / counts_R2[rows, 1]
        accuracy = float(accuracy_N.mean())
        scores[f"accuracy{suffix}"] = accuracy
        scores[f"exact{suffix}"] = float((accuracy_N == 1).mean())
        scores[f"scaled_accuracy{suffix}"] = (accuracy - chance) / (1 - chance)
    return scores
