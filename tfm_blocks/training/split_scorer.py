"""Score a split by the losses of its tokens and of its rows; the base of all scorers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.layout import SOURCE, Batch
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.tokenizer import MASK, Tokenizer
from tfm_blocks.devices import sum_dtype
from tfm_blocks.language.spec import TARGET
from tfm_blocks.runs.row_results import Losses
from tfm_blocks.scoring.labels import Floats
from tfm_blocks.training.gather import gather_json
from tfm_blocks.training.metrics import PartScores, RowSums, TokenScores
from tfm_blocks.training.objective import Objective, ReplacedTokenObjective
from tfm_blocks.translation.settings import Search

SAMPLED = 40  # tokens of a row of a sample


class Generation(NamedTuple):
    """The number of rows whose outputs are generated, the search, and the autocast context around it.

    When `stop` returns a true value, this rank stops generating, but still takes part in the collectives. The scores
    are then meaningless.
    """

    rows: int
    search: Search
    precision: AbstractContextManager[None]
    stop: Callable[[], object] = lambda: False


class Predictions(NamedTuple):
    """The row, the label and the most probable token of each predicted position of a batch."""

    row_N: Tensor
    labels_N: Tensor
    best_N: Tensor


class SplitScorer(nn.Module):
    """Compute the loss, the perplexity and the token accuracy of one split at a time. Subclasses also score outputs.

    `outputs` are the newest outputs, and `samples` the same with their texts as (source, output, reference).
    `parts` are the scores of each corpus of a mix. A test counts the losses of each row, and with `counts_rows` also a
    validation.
    """

    counts_rows = False

    def __init__(self, ranks: Ranks, rows: int, mixed: Sequence[str] = ()) -> None:
        super().__init__()
        self.ranks = ranks
        self.tokens, self.rows, self.parts = TokenScores(), RowSums(rows, 5), PartScores(mixed)
        self.outputs: list[str] = []
        self.samples: list[tuple[str, str, str]] = []
        self._part_R: Tensor | None = None  # of the split, the number of the corpus of each row

    def restart(self, corpus: Corpus) -> None:
        """Reset the metrics before a split."""
        self.tokens.reset()
        self.rows.reset()
        self.parts.reset()
        self._part_R = torch.tensor([self.parts.names.index(name) for name in corpus.groups]) if corpus.mixed else None

    def count(self, objective: Objective, batch: Batch) -> None:
        """Add the losses of a batch of a validation."""
        if self.counts_rows:
            self.count_rows(objective, batch)
        elif self._part_R is None:
            self.tokens.update(*objective.scores(batch), batch.tokens, len(batch.kept_N))
        else:
            loss_N, nll_N, best_N = objective.position_scores(batch)
            self._sum(batch, torch.stack([loss_N, nll_N, best_N == batch.kept(batch.labels_BT)], 1))

    def _sum(self, batch: Batch, values_N3: Tensor) -> None:
        """Add sums over all rows, and over the rows of each corpus of a mix."""
        loss, nll, correct = values_N3.sum(0, dtype=sum_dtype(values_N3.device))
        self.tokens.update(loss, nll, correct, batch.tokens, len(batch.kept_N))
        if self._part_R is not None:
            part_B = self._part_R[list(batch.rows)].to(values_N3.device)
            self.parts.update(values_N3, part_B[batch.kept_N // batch.labels_BT.shape[1]], batch.counts_B, part_B)

    def count_rows(self, objective: Objective, batch: Batch) -> Predictions:
        """Add the losses of a batch and of each of its rows, and return its predictions."""
        loss_N, nll_N, best_N = objective.position_scores(batch)
        return self.add(batch, loss_N, nll_N, best_N)

    def add(self, batch: Batch, loss_N: Tensor, nll_N: Tensor, best_N: Tensor) -> Predictions:
        """Add the losses of the labels of a batch and of each of its rows, and return the predictions `best_N`."""
        labels_N = batch.kept(batch.labels_BT)
        row_B = torch.tensor(batch.rows, device=labels_N.device)
        row_N = row_B[batch.kept_N // batch.labels_BT.shape[1]]
        values_N3 = torch.stack([loss_N, nll_N, best_N == labels_N], 1)
        self._sum(batch, values_N3)
        self._add_rows(batch, values_N3, row_N, row_B)
        return Predictions(row_N, labels_N, best_N)

    def _add_rows(self, batch: Batch, values_N3: Tensor, row_N: Tensor, row_B: Tensor) -> None:
        """Add the loss, -log p and correctness of predicted positions, and the counts of tokens and labels, by row."""
        self.rows.update(values_N3, row_N)
        self.rows.update(batch.counts_B[:, None], row_B, 3)
        self.rows.update(torch.ones_like(values_N3[:, :1]), row_N, 4)

    def row_losses(self, corpus: Corpus) -> Losses:
        """Return losses_N6 of the counted rows of the split, with 0 bytes."""
        return self._losses(np.zeros(len(corpus)))

    def row_corpora(self, corpus: Corpus) -> list[str]:
        """Return the name of the corpus of each row of `row_losses`, if the split is a mix."""
        return list(corpus.groups) if corpus.mixed else []

    def _losses(self, bytes_N: Floats) -> Losses:
        """Return losses_N6 of the first rows, in the order of LOSS_COLUMNS."""
        loss_N, nll_N, correct_N, tokens_N, labels_N = self.rows.compute()[: len(bytes_N)].cpu().numpy().T
        return np.column_stack([loss_N, nll_N, tokens_N, bytes_N, correct_N, labels_N])

    def score(self, corpus: Corpus, generation: Generation) -> dict[str, float]:
        """Return the scores of all counted tokens, and of the outputs of the first rows.

        If the loss is not finite, nothing is generated.
        """
        scores: dict[str, float] = self.tokens.compute()
        return scores

    def gather(self, of_row: Mapping[int, Any]) -> dict[int, Any]:
        """Return what all ranks have of the rows, in their order."""
        items = list(of_row.items())
        if self.ranks.world > 1:
            items = list(chain.from_iterable(gather_json(items)))
        return dict(sorted(items))

    def keep_outputs(self, corpus: Corpus, output_of: Mapping[int, str]) -> list[int]:
        """Set `outputs` and `samples` to the outputs of all ranks, by row, and return their rows."""
        by_row = self.gather(output_of)
        self.outputs = [*by_row.values()]
        self.samples = [(corpus.text[SOURCE][row], text, corpus.text[TARGET][row]) for row, text in by_row.items()]
        return [*by_row]


class ReplacedScorer(SplitScorer):
    """Compute the loss and the accuracy of the decisions of objective=replaced_token, which concern all tokens."""

    counts_rows = True

    def count_rows(self, objective: Objective, batch: Batch) -> Predictions:
        assert isinstance(objective, ReplacedTokenObjective), "the module makes both"
        decided, loss_N, best_N = objective.decisions(batch)
        return self.add(decided, loss_N, loss_N, best_N)

    def score(self, corpus: Corpus, generation: Generation) -> dict[str, float]:
        """Return the scores of all tokens, except the perplexity, which needs predictions of tokens."""
        scores = super().score(corpus, generation)
        return {name: value for name, value in scores.items() if not name.startswith("perplexity")}


class MaskedScorer(SplitScorer):
    """Also keep the first `most` rows as samples: their text with masks, with the predicted tokens, and as it is."""

    def __init__(self, ranks: Ranks, rows: int, tokenizer: Tokenizer, most: int, mixed: Sequence[str] = ()) -> None:
        super().__init__(ranks, rows, mixed)
        self.tokenizer, self.most = tokenizer, most
        self.sample_of: dict[int, tuple[str, str, str]] = {}  # by row

    def restart(self, corpus: Corpus) -> None:
        """Reset the metrics and samples before a split."""
        super().restart(corpus)
        self.samples, self.sample_of = [], {}

    def count(self, objective: Objective, batch: Batch) -> None:
        super().count(objective, batch)
        if any(row < self.most for row in batch.rows):
            self._keep(batch, objective.position_scores(batch)[2])

    def count_rows(self, objective: Objective, batch: Batch) -> Predictions:
        predictions = super().count_rows(objective, batch)
        self._keep(batch, predictions.best_N)
        return predictions

    def _keep(self, batch: Batch, best_N: Tensor) -> None:
        """Keep the samples of a batch."""
        (ids_BT,) = batch.inputs.values()
        best_BT = ids_BT.flatten().index_copy(0, batch.kept_N, best_N.to(ids_BT.dtype)).view_as(ids_BT)
        for place, row in enumerate(batch.rows):
            if row < self.most and len(batch.kept_N):
                ids, labels, best = (x_BT[place, :SAMPLED].tolist() for x_BT in (ids_BT, batch.labels_BT, best_BT))
                whole = [label or id for id, label in zip(ids, labels, strict=True)]
                hidden, shown = [label != 0 for label in labels], [False] * len(ids)
                sides = ((whole, hidden), (best, shown), (whole, shown))
                source, output, reference = (sample_text(self.tokenizer, *side) for side in sides)
                self.sample_of[row] = source, output, reference

    def score(self, corpus: Corpus, generation: Generation) -> dict[str, float]:
        """Return the scores of all hidden tokens; nothing is generated."""
        self.samples = [
            (source, output, reference) for source, output, reference in self.gather(self.sample_of).values()
        ]
        return super().score(corpus, generation)


def sample_text(tokenizer: Tokenizer, ids: Sequence[int], hidden: Sequence[bool]) -> str:
    """Return the text of ids, with MASK in place of each hidden one, and ⏎ for an end of text inside."""
    text, start = "", 0
    for place, (id, is_hidden) in enumerate(zip(ids, hidden, strict=True)):
        if is_hidden or id in tokenizer.ends:
            text = (text + tokenizer.decode(ids[start:place], ids[:start])).removesuffix(" ")
            text += f" {MASK}" if is_hidden else " ⏎ "
            start = place + 1
    return (text + tokenizer.decode(ids[start:], ids[:start])).strip(" ⏎")
