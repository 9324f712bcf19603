"""Score a model on a split: the loss of all tokens, and the translations of the first rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.layout import EOS, Batch
from tfm_blocks.data.mix import Mix
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.language.spec import TARGET
from tfm_blocks.runs.row_results import Losses
from tfm_blocks.training.metrics import ExactMatch, LengthRatio, text_scores
from tfm_blocks.training.split_scorer import Generation, SplitScorer
from tfm_blocks.translation.translator import Translator


class Scorer(SplitScorer):
    """Compute the metrics of one split of text at a time; the outputs are translations.

    The rows of packed text depend on the tokenizer, so its losses are summed over documents instead of rows.
    """

    def __init__(self, translator: Translator, prepared: Prepared, ranks: Ranks, *, bleu: str) -> None:
        corpus = prepared.last_scored[1]
        super().__init__(ranks, len(corpus.documents.bytes_D if corpus.documents else corpus), prepared.train.mixed)
        self.translator, self.bleu = translator, bleu
        test = prepared.test.groups if prepared.test is not None else ()
        self.exact = ExactMatch([*prepared.val.groups, *test])
        self.lengths = LengthRatio()

    def restart(self, corpus: Corpus) -> None:
        """Reset the metrics before a split."""
        super().restart(corpus)
        self.exact.reset()
        self.lengths.reset()
        self.documents = corpus.documents
        self.tokens.bytes = int(self.documents.bytes_D.sum()) if self.documents else 0
        corpora = corpus.parts if isinstance(corpus, Mix) else {}
        self.parts.bytes = {name: int(part.documents.bytes_D.sum()) for name, part in corpora.items() if part.documents}

    def _add_rows(self, batch: Batch, values_N3: Tensor, row_N: Tensor, row_B: Tensor) -> None:
        if self.documents is None:
            super()._add_rows(batch, values_N3, row_N, row_B)
            return
        is_end_BT = (batch.labels_BT == EOS).long()
        first_B = torch.from_numpy(self.documents.first_R).to(row_B.device)[row_B]
        piece_BT = first_B[:, None] + is_end_BT.cumsum(1) - is_end_BT
        document_P = torch.from_numpy(self.documents.document_P).to(row_B.device)
        document_N = document_P[batch.kept(piece_BT)]
        self.rows.update(torch.cat([values_N3, torch.ones_like(values_N3[:, :2])], 1), document_N)

    def row_losses(self, corpus: Corpus) -> Losses:
        """Return losses_N6 of the counted rows of the split, or of the documents of packed text with their bytes."""
        if self.documents is None:
            return super().row_losses(corpus)
        return self._losses(self.documents.bytes_D.astype(np.float64))

    def row_corpora(self, corpus: Corpus) -> list[str]:
        """Return the name of the corpus of each row, or of each document of packed text, if the split is a mix."""
        if self.documents is None or not isinstance(corpus, Mix):
            return super().row_corpora(corpus)
        parts = [(name, part.documents) for name, part in corpus.parts.items()]
        return [name for name, documents in parts if documents for _ in documents.bytes_D]

    def score(self, corpus: Corpus, generation: Generation) -> dict[str, float]:
        """Return the scores of all counted tokens, and of the translations of the first rows."""
        scores: dict[str, float] = self.tokens.compute()
        columns = self.translator.sources
        rows = corpus.rows(slice(generation.rows)) if columns else []  # plain text is not translated
        if not rows or not math.isfinite(scores["loss"]):
            self.outputs, self.samples = [], []
            return scores
        with generation.precision:
            own = slice(self.ranks.rank, len(rows), self.ranks.world)  # the rows of this rank: every world-th
            sentences = [{name: row[name] for name in columns} for row in rows[own]]
            translations = self.translator.search(sentences, generation.search, stop=generation.stop)
            outputs = [best.text for best, *_ in translations]
        self.outputs = [*self.gather(dict(zip(range(len(rows))[own], outputs, strict=True))).values()]
        references = [row[TARGET] for row in rows]
        self.exact.update(outputs, references[own], corpus.groups[: len(rows)][own])
        self.lengths.update(*(text_ids(self.translator.tokenizer, texts) for texts in (outputs, references[own])))
        sources = [" | ".join(row[name] for name in columns) for row in rows]
        self.samples = list(zip(sources, self.outputs, references, strict=True))
        scores |= text_scores(self.outputs, references, self.bleu) | self.exact.compute() | self.lengths.compute()
        for name in corpus.mixed:
            lines = [line for line, group in enumerate(corpus.groups[: len(rows)]) if group == name]
            texts = [self.outputs[line] for line in lines], [references[line] for line in lines]
            part = text_scores(*texts, self.bleu) if lines else {}
            scores |= {f"{key}/{name}": value for key, value in part.items()}
        return scores


def text_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Sequence[int]]:
    """Return the ids of texts of targets, without special tokens around them."""
    return [tokenizer.conventions.text_of_target(ids) for ids in tokenizer.of(TARGET).encode_batch(texts)]
