"""How a model does on a split: by its tokens, and by its translations of the first rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import nn

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.language.spec import TARGET
from tfm_blocks.training.gather import gather_json
from tfm_blocks.training.metrics import ExactMatch, LengthRatio, RowLosses, TokenScores, text_scores
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator

Samples = Sequence[Mapping[str, str]]


class Scorer(nn.Module):
    """Metrics of one split at a time. `outputs` are the newest translations, `samples` the first of them as
    (source, output, reference).
    """

    def __init__(self, translator: Translator, prepared: Prepared, ranks: Ranks, *, bleu: str) -> None:
        super().__init__()
        self.translator, self.ranks, self.bleu = translator, ranks, bleu
        test = prepared.test.groups if prepared.test is not None else ()
        self.tokens, self.rows = TokenScores(), RowLosses(len(prepared.last_scored[1]))
        self.exact = ExactMatch([*prepared.val.groups, *test])
        self.lengths = LengthRatio()
        self.outputs: list[str] = []
        self.samples: list[tuple[str, str, str]] = []

    def restart(self) -> None:
        """Another split begins."""
        for metric in (self.tokens, self.rows, self.exact, self.lengths):
            metric.reset()

    def score(
        self,
        corpus: Corpus,
        sentences: int,
        search: Search,
        precision: AbstractContextManager[None],
        stop: Callable[[], object] = lambda: False,
    ) -> dict[str, float]:
        """Scores over all tokens that were counted, and of the translations of the first `sentences` rows.

        They are all of a loss that is not finite. Where `stop` says so, this rank translates no further; it still takes
        part in all that the ranks do together, so that nobody waits for it, and the scores are worth nothing.
        """
        scores: dict[str, float] = self.tokens.compute()
        rows = corpus.rows(slice(sentences)) if self.translator.sources else []  # plain text is not translated
        if not rows or not math.isfinite(scores["loss"]):
            self.outputs, self.samples = [], []
            return scores
        with precision:
            mine = self._translate(rows, search, stop)
        self._count(mine, rows, corpus.groups)
        self.outputs = self._gather(mine, len(rows))
        references = [row[TARGET] for row in rows]
        read = [" | ".join(row[name] for name in self.translator.sources) for row in rows]
        self.samples = list(zip(read, self.outputs, references, strict=True))
        return scores | text_scores(self.outputs, references, self.bleu) | self.exact.compute() | self.lengths.compute()

    def _mine(self, rows: Sequence[object]) -> slice:
        """Each rank translates every world-th."""
        return slice(self.ranks.rank, len(rows), self.ranks.world)

    def _translate(self, rows: Samples, search: Search, stop: Callable[[], object]) -> list[str]:
        texts = [{name: row[name] for name in self.translator.sources} for row in rows[self._mine(rows)]]
        return [best[0].text for best in self.translator.search(texts, search, stop=stop)]

    def _count(self, mine: Sequence[str], rows: Samples, groups: Sequence[str]) -> None:
        own = self._mine(rows)
        references = [row[TARGET] for row in rows[own]]
        self.exact.update(mine, references, groups[: len(rows)][own])
        encode = self.translator.tokenizer.encode_batch
        self.lengths.update(encode(mine), encode(references))

    def _gather(self, mine: list[str], count: int) -> list[str]:
        world = self.ranks.world
        if world == 1:
            return mine
        parts = gather_json(mine)
        return [parts[place % world][place // world] for place in range(count)]
