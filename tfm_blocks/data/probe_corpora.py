"""The corpora of a probe task: generated examples, kept in the cache."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from tfm_blocks.data.cache import cache_folder, cache_key, find_or_build
from tfm_blocks.data.corpus import FORMAT, Corpus, write_examples
from tfm_blocks.data.probe_settings import ProbeSettings
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.probes.task import Example, ProbeTask


@dataclass(frozen=True)
class ProbeSplit:
    """The examples of a split: for each of `parts`, `count` examples whose lengths are drawn from its lengths."""

    task: ProbeTask
    seed: int
    name: str
    parts: Sequence[Sequence[int]]
    count: int

    @property
    def groups(self) -> list[str]:
        """Return the length of each row of a test set, else nothing."""
        single = self.name == "test" and all(len(lengths) == 1 for lengths in self.parts)
        return [str(*lengths) for lengths in self.parts for _ in range(self.count)] if single else []

    def examples(self) -> Iterator[Example]:
        """Generate the examples."""
        parts = (self.task.examples(self.seed, self.name, lengths, self.count) for lengths in self.parts)
        return chain.from_iterable(parts)

    @property
    def fingerprint(self) -> tuple[object, ...]:
        """Return everything that determines the examples, as JSON values."""
        name, settings = type(self.task).__name__, asdict(self.task)
        return (
            _code(type(self.task)),
            name,
            settings,
            self.seed,
            self.name,
            [list(part) for part in self.parts],
            self.count,
        )


def probe_corpora(settings: ProbeSettings, tell: Callable[[str], None]) -> tuple[Tokenizer, dict[str, Corpus]]:
    """Return the tokenizer, whose tokens are the alphabet of the task, and the corpus of each split."""
    task = settings.probe
    tokenizer = Tokenizer.of_words(task.alphabet)
    assert tokenizer.size == settings.vocab, "the names of an alphabet are unique"
    corpora = {}
    for split in _splits(settings):
        corpora[split.name] = corpus = _corpus(split, tokenizer, settings)
        lengths = f" of length {', '.join(dict.fromkeys(corpus.groups))}" if corpus.groups else ""
        tell(f"data: {settings.task}, {settings.size}: {len(corpus):,} {split.name} examples{lengths}")
    tell(f"data: vocabulary of {tokenizer.size:,} tokens")
    return tokenizer, corpora


def _splits(settings: ProbeSettings) -> Iterator[ProbeSplit]:
    lengths, counts = settings.lengths, settings.counts
    for name in ("val", "test", "train"):
        parts = [(length,) for length in lengths[name]] if name == "test" and lengths[name] else [lengths[name]]
        yield ProbeSplit(settings.probe, settings.seed, name, parts, counts[name])


def _corpus(split: ProbeSplit, tokenizer: Tokenizer, settings: ProbeSettings) -> Corpus:
    folder = cache_folder(settings.cache) / "probes" / cache_key(FORMAT, *split.fingerprint)
    built = find_or_build(folder, lambda folder: write_examples(folder, split.examples(), tokenizer))
    return Corpus(built, tokenizer, split.groups)


@cache
def _code(task: type[ProbeTask]) -> str:
    """Return a hash of the code that generates examples, so that a change of it makes new ones.

    The code is the module of the task and of each base class, with the other modules of its package.
    """
    files = set[Path]()
    for name in {base.__module__ for base in task.__mro__}:
        file = getattr(sys.modules[name], "__file__", None)
        if file and name not in sys.stdlib_module_names:
            files |= set(Path(file).parent.glob("*.py")) if sys.modules[name].__package__ else {Path(file)}
    ordered = sorted(files, key=lambda file: file.parts[-2:])
    return hashlib.sha256(b"".join(file.read_bytes() for file in ordered)).hexdigest()
