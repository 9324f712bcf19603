"""From the settings to what training reads: a tokenizer and three encoded corpora."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

from tfm_blocks.data.cache import cache_folder, cached, key_of
from tfm_blocks.data.corpus import Corpus, write_corpus
from tfm_blocks.data.dates import date_splits
from tfm_blocks.data.settings import DataSettings, DatesSettings
from tfm_blocks.data.text import text_splits
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import DataError, Problem

FORMAT = 1  # of a cached corpus; a change of the format takes another number
SAMPLE = 1_000_000  # pairs that the tokenizer learns from at most: more cost memory and change little


class Split(Protocol):
    """Pairs of text that can be read again and again; `address` is its key in the config."""

    @property
    def address(self) -> str: ...

    @property
    def groups(self) -> Sequence[str]: ...

    def pairs(self) -> Iterator[tuple[str, str]]: ...

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a run reads."""

    tokenizer: Tokenizer
    train: Corpus
    val: Corpus
    test: Corpus


def prepare(settings: DataSettings, vocab: int, seed: int, tell: Callable[[str], None] = print) -> Prepared:
    """Tokenizer and corpora, from the cache where they are there; `tell` hears what was left out.

    Of train, pairs with a blank side or above max_length are skipped; val and test keep every line, since a score is
    over all of them. Raises ConfigError and DataError.
    """
    splits = date_splits(settings, seed) if isinstance(settings, DatesSettings) else text_splits(settings)
    cache = cache_folder(settings.cache)
    tokenizer = _tokenizer(cache / "tokenizers", splits, vocab)
    corpora = {
        name: _corpus(cache / "corpora", splits[name], tokenizer, settings.max_length if name == "train" else None)
        for name in ("val", "test", "train")  # the small ones first: a mistake in them is told before the long work
    }
    for name in splits:
        tell(_report(name, corpora[name], settings))
    asked = f", {vocab:,} asked for" if tokenizer.size < vocab else ""
    tell(f"data: vocabulary of {tokenizer.size:,} pieces{asked}")
    return Prepared(tokenizer=tokenizer, **corpora)


def _tokenizer(cache: Path, splits: Mapping[str, Split], vocab: int) -> Tokenizer:
    """Learned from the training text of both sides: from every Nth pair where there are more than SAMPLE."""

    def build(folder: Path) -> None:
        # all text is read once for its errors, before the long work
        sizes = {name: sum(1 for _ in split.pairs()) for name, split in splits.items()}
        pairs = islice(splits["train"].pairs(), 0, None, max(1, -(-sizes["train"] // SAMPLE)))
        Tokenizer.train(chain.from_iterable(pairs), vocab).save(folder / "tokenizer.json")

    key = key_of(FORMAT, version("tokenizers"), SAMPLE, vocab, splits["train"].fingerprint)
    return Tokenizer.load(cached(cache / key, build) / "tokenizer.json")


def _corpus(cache: Path, split: Split, tokenizer: Tokenizer, max_length: int | None) -> Corpus:
    def build(folder: Path) -> None:
        write_corpus(folder, split.pairs(), tokenizer, max_length=max_length)
        if not (folder / "ids.bin").stat().st_size:
            help = "its text is empty, or every pair is longer than data.max_length"
            raise DataError(Problem(split.address, "holds no pair to use", help=help))

    key = key_of(FORMAT, split.fingerprint, tokenizer.text, max_length)
    return Corpus(cached(cache / key, build), tokenizer, split.groups)


def _report(name: str, corpus: Corpus, settings: DataSettings) -> str:
    """`data: 28,990 train pairs (skipped: 3 with a blank side, 7 longer than 128 tokens)`."""
    reasons = {"blank": "with a blank side", "long": f"longer than {settings.max_length} tokens"}
    skipped = [f"{count:,} {reasons[reason]}" for reason, count in corpus.skipped.items() if count]
    return f"data: {len(corpus):,} {name} pairs" + (f" (skipped: {', '.join(skipped)})" if skipped else "")
