"""Translation and generation of text with a trained network."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from tfm_blocks.data.layout import SOURCE, padded_rows, prompt
from tfm_blocks.data.published_tokenizer import with_sentinels
from tfm_blocks.data.tokenizer import Tokenizer, unknown_warning
from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.data.vocabulary import BOS
from tfm_blocks.devices import on_device
from tfm_blocks.errors import LimitError, Problem, RunError, run_error
from tfm_blocks.language.spec import TARGET, Spec, names
from tfm_blocks.network.graph import Network, evaluating
from tfm_blocks.network.packed import packed
from tfm_blocks.runs.folder import TOKENIZER
from tfm_blocks.runs.model import read_network
from tfm_blocks.runs.records import SavedModel
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.translation.beam import Penalty, beam_search, gnmt, last_cross_attention, plain, with_coverage
from tfm_blocks.translation.search import Bounds, Choose, Hypothesis, always, chooser, likeliest, one_by_one
from tfm_blocks.translation.settings import LengthPenalty, Search
from tfm_blocks.translation.tasks import Task, Text, batches_of, plain_texts, texts_of

PENALTIES: dict[LengthPenalty, Callable[[float], Penalty]] = {"gnmt": gnmt, "plain": plain}

TaskWatch = Callable[[Task, Sequence[int]], bool]


@dataclass(frozen=True)
class Translation:
    """An output text with its ids, the sum of its tokens' log probabilities, and its ranking score.

    The score is that sum divided by the length penalty, plus the weighted coverage.
    """

    text: str
    ids: tuple[int, ...]
    log_p: float
    score: float


BLANK = Translation("", (), 0.0, 0.0)


class Translator:
    """Translates with a network that reads `tgt`, and a tokenizer of the same vocabulary size.

    `columns` are the columns of the training text. `sources` names the texts of a sentence: the inputs of the network
    besides the target, or for a decoder-only model the columns before the target. Raises RunError for an unsuitable
    network or tokenizer.
    """

    def __init__(self, network: Network, tokenizer: Tokenizer, columns: Sequence[str] = ()) -> None:
        inputs = network.spec.inputs
        if TARGET not in names(inputs):
            rule = f"is not autoregressive: it does not read {TARGET}, the tokens translated so far"
            raise run_error("model", rule, "translate with a run whose model reads src and tgt")
        for input in inputs:
            if not input.tokens:
                rule = f"translation needs text inputs, but the input {input.name} has vectors"
                raise run_error("model.inputs", rule, "call the network directly, in Python")
        if network.spec.sink.shape[-1] != tokenizer.size:
            rule = f"has {tokenizer.size} subwords, but the model has {network.spec.sink.shape[-1]}"
            raise run_error("tokenizer", rule, "use the tokenizer of the model's run folder")
        expect_rows(network.spec, tokenizer)
        self._counts = Counter(tokens=0, unknown=0)
        self.network = network
        self.tokenizer, self.conventions = tokenizer, tokenizer.conventions
        self.inputs = tuple(names(network.spec.sources))
        self.sources = self.inputs or tuple(name for name in columns or ("src", TARGET) if name != TARGET)

    @classmethod
    def load(
        cls, run: str | Path, *, device: str = "cpu", plugins: Sequence[str] = (), checkpoint: str | int | None = None
    ) -> Translator:
        """Load the translator of a run folder, with the plug-in modules that its model needs. Raises RunError.

        `checkpoint` selects the weights of a validation instead of the final ones: `last`, `best` or a step. `device`
        is `auto` or a device name of torch.
        """
        run = Path(run)
        network = read_network(run, plugins, checkpoint)
        tokenizer = load_tokenizer(run / TOKENIZER)
        if "objective.sentinels" in SavedRun(run).settings:
            tokenizer = with_sentinels(tokenizer)
        return cls(on_device(network, device), tokenizer, SavedModel.read(run).columns)

    def expect_sources(self) -> None:
        """Raise RunError if the model has no sources to translate from."""
        if not self.sources:
            rule = "was trained on plain text, or to answer at positions of its input, so it cannot translate"
            help = "tfm generate RUN, or generate(prompts) in Python; tfm evaluate RUN --text FILE scores it"
            raise run_error("model", rule, help)

    def translate(self, sentences: Iterable[Text], *, batch_tokens: int = 4096, **settings: Any) -> list[str]:
        """Return the best translation of each sentence, in order; `settings` are fields of Search, such as beam=4."""
        search = Search(**settings)
        if search.nbest > 1:
            raise ValueError("translate returns only the best translation; use search(sentences, Search(nbest=…))")
        return [best[0].text for best in self.search(sentences, search, batch_tokens=batch_tokens)]

    def search(
        self,
        sentences: Iterable[Text],
        search: Search,
        *,
        prefixes: Iterable[str] = (),
        batch_tokens: int = 4096,
        first_line: int = 1,
        stop: Callable[[], object] = lambda: False,
    ) -> list[list[Translation]]:
        """Return the nbest translations of each sentence, best first, in order; blank sentences stay blank.

        A sentence is a text, or for several sources a mapping or a sequence of their texts. `prefixes`, one for each
        sentence, begin the translations. A batch has about `batch_tokens` source tokens over all hypotheses. Sentences
        are numbered from `first_line`; errors name these numbers, and sampling is seeded by them. `stop` is called
        before each batch; if it returns true, the remaining sentences stay blank. Raises LimitError for a sentence or
        prefix that is too long, RunError if the model's logits are not finite, TypeError for an input that is not text,
        and ValueError for a lone surrogate and for a wrong number of prefixes.
        """
        rows = sentences if isinstance(sentences, str) else list(sentences)
        tasks = self.translation_tasks(rows, search, prefixes=prefixes, first_line=first_line)
        return self._outputs(tasks, len(rows), search, batch_tokens, stop)

    def generate(
        self, prompts: Iterable[str], tokens: int, search: Search, *, batch_tokens: int = 4096, first_line: int = 1
    ) -> list[list[Translation]]:
        """Return the nbest continuations of each prompt, of at most `tokens` tokens; other arguments as in `search`.

        `tokens` takes the place of `search.max_tokens`. Raises RunError for a model that reads sources, and ValueError
        for a `search` with `longest`.
        """
        search = continuing(search, tokens)
        tasks = self.generation_tasks(list(prompts), search, first_line=first_line)
        return self._outputs(tasks, len(tasks), search, batch_tokens, lambda: False)

    def encode(self, texts: Sequence[str], column: str = SOURCE) -> list[list[int]]:
        """Return the ids of each text of a column, a target's after its tag, and count them for `warn_of_unknown`."""
        tokenizer = self.tokenizer.of(column)
        ids = tokenizer.encode_targets(texts) if column == TARGET else tokenizer.encode_batch(texts)
        self._counts.update(tokenizer.count_unknown(ids))
        return ids

    def warn_of_unknown(self) -> None:
        """Print a warning if many tokens of the texts encoded so far are unknown."""
        if warning := unknown_warning("the text", **self._counts):
            print(f"warning: {warning}", file=sys.stderr)

    def translation_tasks(
        self, sentences: Iterable[Text], search: Search, *, prefixes: Iterable[str] = (), first_line: int = 1
    ) -> list[Task]:
        """Return the task of each sentence that is not blank; arguments and errors as in `search`."""
        self.expect_sources()
        rows, begins = texts_of(sentences, self.sources), list(prefixes)
        if begins and len(begins) != len(rows):
            raise ValueError(f"there are {len(rows)} sentences, but {len(begins)} prefixes")
        encoded = iter(self.encode([text for row in rows for text in row]))
        encoded_starts = self.encode(plain_texts(begins, "prefixes"), TARGET) if begins else [[]] * len(rows)
        starts = [
            self.conventions.prefix(ids) if text else []
            for text, ids in zip(begins or [""] * len(rows), encoded_starts, strict=True)
        ]
        tasks = []
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            ids = [next(encoded) for _ in row]
            if any(text.strip() for text in row):
                before = [BOS] if self.inputs else prompt(ids).tolist()
                sources = [self.conventions.source(source) for source in ids] if self.inputs else []
                tasks.append(Task(index, first_line + index, sources, before, start, sum(map(len, ids)) + len(ids)))
        self._expect_possible(tasks, search)
        return tasks

    def generation_tasks(self, prompts: Sequence[str], search: Search, *, first_line: int = 1) -> list[Task]:
        """Return the task of each prompt; `search` is from `continuing`; raises the errors of `generate`."""
        if self.inputs:
            rule = f"reads {', '.join(self.inputs)} besides the target, so it translates and cannot continue text"
            raise run_error("model", rule, "tfm translate RUN")
        ids = self.encode(plain_texts(prompts, "prompts"))
        starts = [self.conventions.prompt(prompt_ids) for prompt_ids in ids]
        tasks = [
            Task(index, first_line + index, [], start, [], len(start), prompt_ids)
            for index, (start, prompt_ids) in enumerate(zip(starts, ids, strict=True))
        ]
        self._expect_possible(tasks, search)
        return tasks

    def run(
        self,
        tasks: Iterable[Task],
        search: Search,
        *,
        batch_tokens: int = 4096,
        stop: Callable[[], object] = lambda: False,
        watch: TaskWatch | None = None,
    ) -> Iterator[tuple[Task, list[Translation]]]:
        """Yield each task with its nbest outputs, batch by batch; `stop` and errors as in `search`.

        After each step, `watch` gets each unfinished task and the ids of its best hypothesis; if it returns False, the
        task ends, with undefined outputs. A task has no outputs if its logits are not finite.
        """
        with evaluating(self.network), packed(self.network):
            for batch in takewhile(lambda batch: not stop(), batches_of(tasks, batch_tokens // search.beam)):
                for task, hypotheses in zip(batch, self._batch(batch, search, watch), strict=True):
                    yield (
                        task,
                        [
                            Translation(
                                self.tokenizer.decode(hypothesis.ids, task.prompt),
                                tuple(hypothesis.ids),
                                hypothesis.log_p,
                                _score(hypothesis, search),
                            )
                            for hypothesis in hypotheses
                        ],
                    )

    def _outputs(
        self, tasks: Iterable[Task], count: int, search: Search, batch_tokens: int, stop: Callable[[], object]
    ) -> list[list[Translation]]:
        done = [[BLANK] for _ in range(count)]
        for task, outputs in self.run(tasks, search, batch_tokens=batch_tokens, stop=stop):
            if not outputs:
                raise RunError(not_finite(f"sentence {task.number}"))
            done[task.place] = outputs
        return done

    def _longest_output(self, task: Task) -> float:
        """Return the maximum number of output tokens: the prompt takes positions, the last output token does not."""
        return self.network.longest(TARGET).tokens - len(task.before) + 1

    def _expect_possible(self, tasks: Sequence[Task], search: Search) -> None:
        """Raise RunError for a coverage penalty without cross-attention, and LimitError for a task that is too long."""
        if search.coverage:
            last_cross_attention(self.network)
        for task in tasks:
            number, lengths = task.number, dict(zip(self.inputs, map(len, task.sources), strict=True))
            for name, length in lengths.items():
                bound = self.network.longest(name, lengths)
                if length > bound.tokens:
                    rule = f"has {length} tokens with eos, but the model has {bound.positions(name, lengths)}"
                    raise LimitError(Problem(f"sentence {number}", rule, help="split it"))
            most = min(search.max_tokens, self._longest_output(task))
            if most < 1:
                longest = self.network.longest(TARGET).tokens
                rule = f"has {len(task.before)} tokens, but the model has {longest} positions"
                raise LimitError(Problem(f"sentence {number}", rule, help="shorten it"))
            if len(task.prefix) + 1 > most:
                rule = f"has {len(task.prefix) + 1} tokens with eos, but a translation has at most {most}"
                raise LimitError(Problem(f"prefix {number}", rule, help="shorten it, or raise the maximum length"))

    def _batch(self, batch: Sequence[Task], search: Search, watch: TaskWatch | None) -> list[list[Hypothesis]]:
        columns, device = zip(*(task.sources for task in batch), strict=True), self.network.device
        sources = {name: padded_rows(rows).to(device) for name, rows in zip(self.inputs, columns, strict=False)}
        bounds, before_BN = self._bounds(batch, search), padded_rows([task.before for task in batch]).to(device)
        proceeds = (lambda sentence, ids: watch(batch[sentence], ids)) if watch else always
        if search.beam == 1:
            choose: Choose = likeliest
            if search.sampling:
                numbers = [task.number for task in batch]
                choose = chooser(search.sampling, numbers, int(bounds.longest_B.max()), device)
            hypotheses = one_by_one(self.network, sources, bounds, choose, before_BN, proceeds)
            return [[hypothesis] if math.isfinite(hypothesis.log_p) else [] for hypothesis in hypotheses]
        nbest = beam_search(
            self.network,
            sources,
            bounds,
            beam=search.beam,
            penalty=PENALTIES[search.penalty](search.alpha),
            nbest=search.beam if search.coverage else search.nbest,
            patient=search.patient,
            before_BN=before_BN,
            watch=proceeds,
        )
        if not search.coverage or not any(nbest):  # `watch` ended them all
            return nbest
        covered = with_coverage(self.network, sources, nbest)
        return [sorted(group, key=lambda one: -_score(one, search))[: search.nbest] for group in covered]

    def _bounds(self, batch: Sequence[Task], search: Search) -> Bounds:
        limits = self.conventions
        longest = [
            int(min(max(search.most(task.tokens, limits.longest), len(task.prefix) + 1), self._longest_output(task)))
            for task in batch
        ]
        device = self.network.device
        shortest = [search.fewest(task.tokens, limits.shortest) for task in batch]
        prefix_BP = padded_rows([task.prefix for task in batch]).to(device)
        shortest_B, longest_B = torch.tensor(shortest, device=device), torch.tensor(longest, device=device)
        return Bounds(shortest_B, longest_B, prefix_BP, self.tokenizer.ends, limits)


def expect_rows(spec: Spec, tokenizer: Tokenizer) -> None:
    """Raise RunError if a table of a model lacks rows for ids of the tokenizer."""
    for node, name in spec.tables:
        if node.arguments["vocab"] < (size := tokenizer.of(name).size):
            rule = f"has {size} subwords for {name}, but the model has {node.arguments['vocab']}"
            raise run_error("tokenizer", rule, "use the tokenizer with which the model was trained")


def not_finite(address: str) -> Problem:
    """Return the error of a text without outputs."""
    help = "use the weights of an earlier validation, and remove --precision bf16 if it is set"
    return Problem(address, "the model's logits are not finite", help=help)


def continuing(search: Search, tokens: int) -> Search:
    """Return the settings for continuations of at most `tokens` tokens. Raises ValueError if `longest` is set."""
    if search.longest is not None:
        raise ValueError(f"longest is {search.longest}, but tokens, {tokens}, limits a continuation: leave longest out")
    return replace(search, longest=(0.0, tokens), max_tokens=tokens)


def _score(hypothesis: Hypothesis, search: Search) -> float:
    penalty = PENALTIES[search.penalty](search.alpha)(hypothesis.length)
    return hypothesis.log_p / penalty + search.coverage * hypothesis.coverage
