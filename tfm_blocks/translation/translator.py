"""Text in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import DataError, Problem, RunError
from tfm_blocks.language.causality import TARGET
from tfm_blocks.network.graph import Network
from tfm_blocks.runs.folder import TOKENIZER
from tfm_blocks.runs.model import read_network
from tfm_blocks.translation.beam import beam_search, gnmt, plain
from tfm_blocks.translation.sampling import Sampling
from tfm_blocks.translation.search import EOS, PAD, Bounds, Hypothesis, one_by_one

PENALTIES = {"gnmt": gnmt, "plain": plain}


@dataclass(frozen=True, kw_only=True)
class Search:
    """How to look for translations. A beam of 1 is greedy search; with `sampling` tokens are drawn instead.

    alpha, penalty: the length penalty that ranks hypotheses of n tokens, eos included: "gnmt" ((5 + n) / 6)^alpha, or
    "plain" n^alpha. nbest: how many of a sentence, at most `beam`. longest, shortest: (a, b), the most tokens with eos
    and the fewest without, a·n + b for n source tokens with eos. cap: the most tokens in any case. Raises ValueError
    for numbers that say nothing.
    """

    beam: int = 1
    alpha: float = 0.6
    penalty: Literal["gnmt", "plain"] = "gnmt"
    nbest: int = 1
    longest: tuple[float, int] = (2.0, 20)
    shortest: tuple[float, int] = (0.0, 0)
    cap: int = 1024
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.beam < 1 or not 1 <= self.nbest <= self.beam:
            raise ValueError(f"nbest must be from 1 to beam, but nbest is {self.nbest} and beam {self.beam}")
        if self.alpha < 0:
            raise ValueError(f"alpha must be at least 0, but is {self.alpha}")
        if self.sampling and self.beam > 1:
            raise ValueError(f"sampling draws one token at a time, but beam is {self.beam}: leave one of them out")

    def most(self, source_tokens: int) -> int:
        """The most tokens of an output, eos included."""
        return max(1, min(int(self.longest[0] * source_tokens) + self.longest[1], self.cap))

    def fewest(self, source_tokens: int) -> int:
        """The fewest tokens of an output, without eos."""
        return int(self.shortest[0] * source_tokens) + self.shortest[1]


@dataclass(frozen=True)
class Translation:
    """A text with the sum of its tokens' log probabilities, and that sum divided by the length penalty."""

    text: str
    log_p: float
    score: float


GREEDY = Search()
BLANK = Translation("", 0.0, 0.0)


class Translator:
    """Translates with a network that reads `src` and `tgt`, and a tokenizer with as many pieces as it; or RunError."""

    def __init__(self, network: Network, tokenizer: Tokenizer) -> None:
        names = {put.name for put in network.spec.inputs}
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
            return cls(network.to(device), tokenizer)
        except (RuntimeError, AssertionError) as error:  # torch's answers to a device that it does not have
            rule = f"{device!r} cannot be used: {str(error).splitlines()[0]}"
            raise RunError(Problem("device", rule, help="write cpu, or cuda where there is one")) from None

    def translate(self, sentences: Sequence[str], *, batch_tokens: int = 4096, **settings: Any) -> list[str]:
        """The best translation of each sentence, in the order given; `settings` are those of Search, such as beam=4."""
        return [best[0].text for best in self.search(sentences, Search(**settings), batch_tokens=batch_tokens)]

    def search(
        self,
        sentences: Sequence[str],
        search: Search,
        *,
        prefixes: Sequence[str] = (),
        batch_tokens: int = 4096,
        first_line: int = 1,
    ) -> list[list[Translation]]:
        """The nbest translations of each sentence, best first, in the order given; blank sentences stay blank.

        `prefixes`, one for each sentence where they are given, are how the translations begin. A batch has about
        `batch_tokens` source tokens over all hypotheses. `first_line` is the number of the first sentence: errors tell
        it, and sampling draws by it. Raises DataError for a sentence beyond the positions that the model knows,
        TypeError for a single string, ValueError for another number of prefixes.
        """
        if isinstance(sentences, str):
            raise TypeError("it takes a list of sentences, not one string")
        if prefixes and len(prefixes) != len(sentences):
            raise ValueError(f"there are {len(sentences)} sentences, but {len(prefixes)} prefixes")
        src = self.tokenizer.encode_batch(list(sentences))
        tgt = self.tokenizer.encode_batch(list(prefixes)) if prefixes else [[] for _ in sentences]
        self._expect_room(src, first_line)
        rows = sorted((row for row, text in enumerate(sentences) if text.strip()), key=lambda row: len(src[row]))
        done = [[BLANK] for _ in sentences]
        was_training = self.network.training
        self.network.eval()
        for batch in _batches(rows, [len(one) + 1 for one in src], batch_tokens // search.beam):
            numbers = [first_line + row for row in batch]
            found = self._batch([src[row] for row in batch], [tgt[row] for row in batch], numbers, search)
            for row, hypotheses in zip(batch, found, strict=True):
                done[row] = [self._translation(one, search) for one in hypotheses]
        self.network.train(was_training)
        return done

    def _expect_room(self, ids: Sequence[Sequence[int]], first_line: int) -> None:
        known = self.network.longest("src").tokens
        for number, one in enumerate(ids, first_line):
            if len(one) + 1 > known:
                rule = f"has {len(one) + 1} tokens with eos, and the model knows {known} positions"
                raise DataError(Problem(f"sentence {number}", rule, help="split it"))

    def _batch(
        self, src: Sequence[list[int]], tgt: Sequence[list[int]], numbers: Sequence[int], search: Search
    ) -> list[list[Hypothesis]]:
        sources = {"src": self._padded([[*ids, EOS] for ids in src])}
        bounds = self._bounds(src, tgt, search)
        if search.beam > 1:
            penalty = PENALTIES[search.penalty](search.alpha)
            return beam_search(self.network, sources, bounds, beam=search.beam, penalty=penalty, nbest=search.nbest)
        if search.sampling:
            choose = search.sampling.chooser(numbers, int(bounds.longest_B.max()))
            return [[one] for one in one_by_one(self.network, sources, bounds, choose)]
        return [[one] for one in one_by_one(self.network, sources, bounds)]

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
        score = one.log_p / PENALTIES[search.penalty](search.alpha)(one.length)
        return Translation(self.tokenizer.decode(one.ids), one.log_p, score)


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
