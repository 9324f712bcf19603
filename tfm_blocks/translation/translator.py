"""Text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import DataError, Problem, RunError
from tfm_blocks.language.causality import TARGET
from tfm_blocks.network.graph import Network, evaluating
from tfm_blocks.network.packed import packed
from tfm_blocks.runs.folder import TOKENIZER
from tfm_blocks.runs.model import read_network
from tfm_blocks.translation.beam import Penalty, beam_search, gnmt, plain
from tfm_blocks.translation.coverage import with_coverage
from tfm_blocks.translation.sampling import chooser
from tfm_blocks.translation.search import EOS, PAD, Bounds, Hypothesis, one_by_one
from tfm_blocks.translation.settings import LengthPenalty, Search

PENALTIES: dict[LengthPenalty, Callable[[float], Penalty]] = {"gnmt": gnmt, "plain": plain}


@dataclass(frozen=True)
class Translation:
    """A text with the ids that it was decoded from, the sum of its tokens' log probabilities, and the score that ranks
    it: that sum divided by the length penalty, plus the weighted coverage.
    """

    text: str
    ids: tuple[int, ...]
    log_p: float
    score: float


GREEDY = Search()
BLANK = Translation("", (), 0.0, 0.0)


class Translator:
    """Translates with a network that reads `src` and `tgt`, and a tokenizer with as many pieces as it; or RunError."""

    def __init__(self, network: Network, tokenizer: Tokenizer) -> None:
        names = {put.name for put in network.spec.inputs}
        if TARGET not in names:
            rule = f"is not autoregressive: it does not read {TARGET}, what has been translated so far"
            raise RunError(Problem("model", rule, help="translate with a run whose model reads src and tgt"))
        if names != {"src", TARGET}:
            rule = f"translating needs the inputs src and {TARGET}, but the model reads {', '.join(sorted(names))}"
            raise RunError(Problem("model.inputs", rule))
        if network.spec.sink.shape[-1] != tokenizer.size:
            rule = f"has {tokenizer.size} pieces, but the model {network.spec.sink.shape[-1]}"
            raise RunError(Problem("tokenizer", rule, help="take the tokenizer of the model's own run folder"))
        self.network = network
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, run: str | Path, *, device: str = "cpu", plugins: Sequence[str] = ()) -> Translator:
        """The translator of a run folder, with the plug-in modules that its model needs. Raises RunError."""
        network = read_network(Path(run), plugins)
        tokenizer = Tokenizer.load(Path(run) / TOKENIZER)
        try:
            torch.zeros((), device=device).item()
            return cls(network.to(device), tokenizer)
        except (RuntimeError, AssertionError) as error:  # torch's answers to a device that it does not have
            rule = f"{device!r} cannot be used: {str(error).splitlines()[0]}"
            raise RunError(Problem("device", rule, help="write cpu, or cuda where there is one")) from None

    def translate(self, sentences: Iterable[str], *, batch_tokens: int = 4096, **settings: Any) -> list[str]:
        """The best translation of each sentence, in the order given; `settings` are those of Search, such as beam=4."""
        search = Search(**settings)
        if search.nbest > 1:
            raise ValueError("translate gives the best of each sentence: search(sentences, Search(nbest=…)) gives more")
        return [best[0].text for best in self.search(sentences, search, batch_tokens=batch_tokens)]

    def search(
        self,
        sentences: Iterable[str],
        search: Search,
        *,
        prefixes: Iterable[str] = (),
        batch_tokens: int = 4096,
        first_line: int = 1,
    ) -> list[list[Translation]]:
        """The nbest translations of each sentence, best first, in the order given; blank sentences stay blank.

        `prefixes`, where given one for each sentence, begin the translations. A batch has about `batch_tokens` source
        tokens over all hypotheses. Errors tell, and sampling draws by, numbers that count from `first_line`. Raises
        DataError for a sentence beyond the known positions or a prefix beyond the most tokens, TypeError for what is no
        text, ValueError for another number of prefixes.
        """
        sentences, prefixes = _texts(sentences, "sentences"), _texts(prefixes, "prefixes")
        if prefixes and len(prefixes) != len(sentences):
            raise ValueError(f"there are {len(sentences)} sentences, but {len(prefixes)} prefixes")
        src = self.tokenizer.encode_batch(sentences)
        tgt = self.tokenizer.encode_batch(prefixes) if prefixes else [[] for _ in sentences]
        self._expect_room(src, tgt, search, first_line)
        rows = sorted((row for row, text in enumerate(sentences) if text.strip()), key=lambda row: len(src[row]))
        done = [[BLANK] for _ in sentences]
        with evaluating(self.network), packed(self.network):
            for batch in _batches(rows, [len(one) + 1 for one in src], batch_tokens // search.beam):
                numbers = [first_line + row for row in batch]
                found = self._batch([src[row] for row in batch], [tgt[row] for row in batch], numbers, search)
                for row, hypotheses in zip(batch, found, strict=True):
                    done[row] = [self._translation(one, search) for one in hypotheses]
        return done

    def _expect_room(
        self, src: Sequence[Sequence[int]], tgt: Sequence[Sequence[int]], search: Search, first_line: int
    ) -> None:
        known, most = self.network.longest("src").tokens, min(search.max_tokens, self.network.longest(TARGET).tokens)
        for number, (sentence, prefix) in enumerate(zip(src, tgt, strict=True), first_line):
            if len(sentence) + 1 > known:
                rule = f"has {len(sentence) + 1} tokens with eos, and the model knows {known} positions"
                raise DataError(Problem(f"sentence {number}", rule, help="split it"))
            if len(prefix) + 1 > most:
                rule = f"has {len(prefix) + 1} tokens with eos, and a translation at most {most}"
                raise DataError(Problem(f"prefix {number}", rule, help="shorten it, or raise the most tokens"))

    def _batch(
        self, src: Sequence[list[int]], tgt: Sequence[list[int]], numbers: Sequence[int], search: Search
    ) -> list[list[Hypothesis]]:
        sources = {"src": self._padded([[*ids, EOS] for ids in src])}
        bounds = self._bounds(src, tgt, search)
        if search.beam > 1:
            return self._beam(sources, bounds, search)
        if search.sampling:
            choose = chooser(search.sampling, numbers, int(bounds.longest_B.max()))
            return [[one] for one in one_by_one(self.network, sources, bounds, choose)]
        return [[one] for one in one_by_one(self.network, sources, bounds)]

    def _beam(self, sources: dict[str, Tensor], bounds: Bounds, search: Search) -> list[list[Hypothesis]]:
        penalty = PENALTIES[search.penalty](search.alpha)
        if not search.coverage:
            return beam_search(self.network, sources, bounds, beam=search.beam, penalty=penalty, nbest=search.nbest)
        found = beam_search(self.network, sources, bounds, beam=search.beam, penalty=penalty, nbest=search.beam)
        covered = with_coverage(self.network, sources, found)
        return [sorted(one, key=lambda each: -_score(each, search))[: search.nbest] for one in covered]

    def _bounds(self, src: Sequence[list[int]], tgt: Sequence[list[int]], search: Search) -> Bounds:
        room = self.network.longest(TARGET).tokens
        longest = [
            int(min(max(search.most(len(ids) + 1), len(prefix) + 1), room))
            for ids, prefix in zip(src, tgt, strict=True)
        ]
        device = next(self.network.parameters()).device
        shortest = [search.fewest(len(ids) + 1) for ids in src]
        return Bounds(torch.tensor(shortest, device=device), torch.tensor(longest, device=device), self._padded(tgt))

    def _padded(self, rows: Sequence[list[int]]) -> Tensor:
        width = max(map(len, rows))
        ids = [[*row] + [PAD] * (width - len(row)) for row in rows]
        return torch.tensor(ids, dtype=torch.int64, device=next(self.network.parameters()).device)

    def _translation(self, one: Hypothesis, search: Search) -> Translation:
        return Translation(self.tokenizer.decode(one.ids), tuple(one.ids), one.log_p, _score(one, search))


def _score(one: Hypothesis, search: Search) -> float:
    return one.log_p / PENALTIES[search.penalty](search.alpha)(one.length) + search.coverage * one.coverage


def _texts(texts: Iterable[str], what: str) -> list[str]:
    if isinstance(texts, str):
        raise TypeError(f"{what} are a list of texts, not one string")
    texts = list(texts)
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise TypeError(f"{what} are texts, but number {number} is {type(text).__name__}")
    return texts


def _batches(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows from short to long, each batch at most `batch_tokens` with padding, or one row."""
    batch: list[int] = []
    for row in order:
        if batch and (len(batch) + 1) * lengths[row] > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
