"""Score a model on a split: the loss of all tokens, and the translations of the first rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.language.spec import TARGET
from tfm_blocks.training.gather import gather_json
from tfm_blocks.training.metrics import ExactMatch, LengthRatio, text_scores
from tfm_blocks.training.split_scorer import Generation, SplitScorer
from tfm_blocks.translation.translator import Translator

Samples = Sequence[Mapping[str, str]]


class Scorer(SplitScorer):
    """Compute the metrics of one split of text at a time; the outputs are translations."""

    def __init__(self, translator: Translator, prepared: Prepared, ranks: Ranks, *, bleu: str) -> None:
        super().__init__(ranks, len(prepared.last_scored[1]), prepared.train.mixed)
        self.translator, self.bleu = translator, bleu
        test = prepared.test.groups if prepared.test is not None else ()
        self.exact = ExactMatch([*prepared.val.groups, *test])
        self.lengths = LengthRatio()

    def restart(self, corpus: Corpus) -> None:
        """Reset the metrics before a split."""
        super().restart(corpus)
        self.exact.reset()
        self.lengths.reset()

    def score(self, corpus: Corpus, generation: Generation) -> dict[str, float]:
        """Return the scores of all counted tokens, and of the translations of the first rows."""
        scores: dict[str, float] = self.tokens.compute()
        rows = corpus.rows(slice(generation.rows)) if self.translator.sources else []  # plain text is not translated
        if not rows or not math.isfinite(scores["loss"]):
            self.outputs, self.samples = [], []
            return scores
        with generation.precision:
            outputs = self._translate(rows, generation)
        self._count(outputs, rows, corpus.groups)
        self.outputs = self._gather(outputs, len(rows))
        references = [row[TARGET] for row in rows]
        sources = [" | ".join(row[name] for name in self.translator.sources) for row in rows]
        self.samples = list(zip(sources, self.outputs, references, strict=True))
        scores |= text_scores(self.outputs, references, self.bleu) | self.exact.compute() | self.lengths.compute()
        for name in corpus.mixed:
            lines = [line for line, group in enumerate(corpus.groups[: len(rows)]) if group == name]
            texts = [self.outputs[line] for line in lines], [references[line] for line in lines]
            part = text_scores(*texts, self.bleu) if lines else {}
            scores |= {f"{key}/{name}": value for key, value in part.items()}
        return scores

    def _rank_rows(self, rows: Sequence[object]) -> slice:
        """Return the rows of this rank: every world-th."""
        return slice(self.ranks.rank, len(rows), self.ranks.world)

    def _translate(self, rows: Samples, generation: Generation) -> list[str]:
        texts = [{name: row[name] for name in self.translator.sources} for row in rows[self._rank_rows(rows)]]
        return [best[0].text for best in self.translator.search(texts, generation.search, stop=generation.stop)]

    def _count(self, outputs: Sequence[str], rows: Samples, groups: Sequence[str]) -> None:
        rank_rows = self._rank_rows(rows)
        references = [row[TARGET] for row in rows[rank_rows]]
        self.exact.update(outputs, references, groups[: len(rows)][rank_rows])
        encode = self.translator.tokenizer.encode_batch
        self.lengths.update(encode(outputs), encode(references))

    def _gather(self, outputs: list[str], count: int) -> list[str]:
        world = self.ranks.world
        if world == 1:
            return outputs
        by_rank = gather_json(outputs)
        return [by_rank[index % world][index // world] for index in range(count)]
