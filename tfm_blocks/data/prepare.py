"""Preparation of the data of a run: the tokenizer and the encoded corpora."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tfm_blocks.data.cache import cache_folder, cache_key, find_or_build
from tfm_blocks.data.corpus import FORMAT, LONGEST, NO_RULES, Corpus, write_corpus, write_labelled, write_packed
from tfm_blocks.data.dates import date_splits
from tfm_blocks.data.documents import find_document_splits
from tfm_blocks.data.files import LINES
from tfm_blocks.data.probe_corpora import probe_corpora
from tfm_blocks.data.probe_settings import ProbeSettings
from tfm_blocks.data.settings import DataSettings, DatesSettings, LabelsSettings, LmSettings, TextSettings
from tfm_blocks.data.text import Split, find_splits
from tfm_blocks.data.tokenizer import MASK, Tokenizer, unknown_warning
from tfm_blocks.data.tokenizer_files import read_tokenizer
from tfm_blocks.errors import ConfigError, DataError, Problem

SAMPLE = 1_000_000  # maximum rows for training the tokenizer: more cost memory and change little
SAMPLE_CHARACTERS = 100 * SAMPLE  # approximate maximum, for long rows
LinesSettings = DatesSettings | TextSettings | LmSettings


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The tokenizer and corpora of a run; the test set is optional."""

    tokenizer: Tokenizer
    train: Corpus
    val: Corpus
    test: Corpus | None = None

    @property
    def last_scored(self) -> tuple[str, Corpus]:
        """Return the name and corpus of the final evaluation: the test set, else the validation set."""
        return ("test", self.test) if self.test is not None else ("val", self.val)


def prepare(
    settings: DataSettings, vocab: int, tell: Callable[[str], None] = print, special: Sequence[str] = ()
) -> Prepared:
    """Return tokenizer and corpora, from the cache if possible; `tell` receives lines about sizes and skipped rows.

    `special` are tokens that the objective needs, besides those of each tokenizer.

    Training rows with a blank column or above max_length are skipped. val and test keep every line, because scores
    cover all of them, but lines are truncated to LONGEST tokens. Plain text is packed without its blank lines. Raises
    ConfigError and DataError.
    """
    if isinstance(settings, ProbeSettings):
        tokenizer, probes = probe_corpora(settings, tell)
        return Prepared(tokenizer=tokenizer, **probes)
    splits, cache = _splits(settings), cache_folder(settings.cache)
    tokenizer = _tokenizer(splits, settings, vocab, special)
    corpora: dict[str, Corpus] = {
        name: _corpus(cache / "corpora", splits[name], tokenizer, settings, training=name == "train")
        for name in ("val", "test", "train")  # small splits first, so that their errors appear early
        if name in splits
    }
    for name in splits:
        tell(_report(name, corpora[name], settings))
    requested = f", {vocab:,} requested" if tokenizer.size < vocab and not settings.tokenizer else ""
    tell(f"data: vocabulary of {tokenizer.size:,} subwords{requested}")
    for name, corpus in corpora.items():
        for column, unknown in corpus.unknown.items():
            tokens = int(corpus.lengths_N(column).sum(dtype=np.int64))
            if warning := unknown_warning(f"the {column} text of {name}", tokens, unknown):
                tell(f"warning: {warning}")
    return Prepared(tokenizer=tokenizer, **corpora)


def vocabulary_size(settings: DataSettings, vocab: int, special: Sequence[str] = ()) -> int:
    """Return the number of tokens that a run has if it requests `vocab`, which may need to learn a tokenizer.

    Raises ConfigError and DataError.
    """
    if isinstance(settings, ProbeSettings):
        return settings.vocab
    return _tokenizer({} if settings.tokenizer else _splits(settings), settings, vocab, special).size


def with_saved_tokenizer(settings: DataSettings, run: Path) -> DataSettings:
    """Return the settings with the tokenizer that a run saved, so that none is learned or read elsewhere."""
    if isinstance(settings, ProbeSettings):
        return settings
    return settings.model_copy(update={"tokenizer": str(run)})


def _splits(settings: LinesSettings) -> dict[str, Split]:
    if isinstance(settings, DatesSettings):
        splits = date_splits(settings)
    else:
        splits = find_document_splits(settings) if isinstance(settings, LmSettings) else find_splits(settings)
    first = settings.first
    return {name: split.first(first) for name, split in splits.items()} if first else splits


def _tokenizer(splits: Mapping[str, Split], settings: LinesSettings, vocab: int, special: Sequence[str]) -> Tokenizer:
    """Read data.tokenizer, else train a tokenizer on the training text of all columns.

    If the text is larger than a sample, it is trained on every Nth row. A sample has at most SAMPLE rows and about
    SAMPLE_CHARACTERS.
    """
    if settings.tokenizer:
        tokenizer = read_tokenizer(settings.tokenizer)
        _expect_special(tokenizer, settings.tokenizer, special)
        return tokenizer
    add_prefix_space = isinstance(settings, TextSettings) and settings.add_prefix_space

    def build(folder: Path) -> None:
        # read all text once to detect its errors before the slow work
        samples = {name: _samples(split) for name, split in splits.items()}
        rows = islice(splits["train"].rows(), 0, None, samples["train"])
        columns = splits["train"].columns
        learned = [columns.index("src")] if isinstance(settings, LabelsSettings) else range(len(columns))
        texts = (row[column] for row in rows for column in learned)
        tokenizer = Tokenizer.train(texts, vocab, add_prefix_space=add_prefix_space, special=special)
        tokenizer.save(folder / "tokenizer.json")

    sample = SAMPLE, SAMPLE_CHARACTERS
    parts = [FORMAT, version("tokenizers"), sample, vocab, add_prefix_space, splits["train"].fingerprint]
    parts += ["src"] if isinstance(settings, LabelsSettings) else []
    key = cache_key(*parts, *special)
    folder = find_or_build(cache_folder(settings.cache) / "tokenizers" / key, build)
    return Tokenizer.load(folder / "tokenizer.json")


def _expect_special(tokenizer: Tokenizer, path: str, special: Sequence[str]) -> None:
    """Raise ConfigError if a tokenizer that was not learned for the objective has no mask, or too few sentinels."""
    learn = "write data.tokenizer=null to learn one"
    if MASK in special and tokenizer.mask is None:
        rule = f"has no mask token, which the objective reads at hidden positions: {path}"
        raise ConfigError(Problem("data.tokenizer", rule, help=f"name a tokenizer with <mask> or [MASK], or {learn}"))
    needed, known = sum(name != MASK for name in special), len(tokenizer.sentinels)
    if known < needed:
        rule = f"has {known} of the {needed} sentinels <extra_id_0>, <extra_id_1>, … of the objective: {path}"
        help = f"write objective.sentinels={known}" if known else f"name a tokenizer of T5, or {learn}"
        raise ConfigError(Problem("data.tokenizer", rule, help=help))


def _samples(split: Split) -> int:
    """Return the number of samples into which the rows of a split are divided, at least 1."""
    rows = characters = 0
    for texts in split.rows():
        rows += 1
        characters += sum(map(len, texts))
    return max(1, -(-rows // SAMPLE), -(-characters // SAMPLE_CHARACTERS))


def _corpus(cache: Path, split: Split, tokenizer: Tokenizer, settings: LinesSettings, *, training: bool) -> Corpus:
    context = settings.context if isinstance(settings, LmSettings) else None
    max_length = None if isinstance(settings, LmSettings) or not training else settings.max_length
    clean = settings.clean if isinstance(settings, TextSettings) and training else NO_RULES
    labels = settings.coder if isinstance(settings, LabelsSettings) else None

    def build(folder: Path) -> None:
        if context is not None:
            write_packed(folder, split.columns[0], (text for (text,) in split.rows()), tokenizer, context=context)
        elif labels:
            options: dict[str, Any] = {"max_length": max_length, "clean": clean, "address": split.address}
            write_labelled(folder, split.rows(), tokenizer, labels, columns=split.columns, **options)
        else:
            write_corpus(folder, split.columns, split.rows(), tokenizer, max_length=max_length, clean=clean)
        if not (folder / "ids.bin").stat().st_size:
            help = "the text is empty, or every row is longer than data.max_length"
            if clean != NO_RULES:
                help += ", or breaks a rule of data.clean"
            raise DataError(Problem(split.address, "has no usable rows", help=help))

    rules: list[object] = [] if clean == NO_RULES else [clean.model_dump()]
    rules += [asdict(labels)] if labels else []
    key = cache_key(FORMAT, split.columns, split.fingerprint, tokenizer.text, max_length, context, *rules)
    return Corpus(find_or_build(cache / key, build), tokenizer, split.groups, labels)


def _report(name: str, corpus: Corpus, settings: LinesSettings) -> str:
    """Format a line such as `data: 28,990 train pairs (skipped: 3 with a blank side, 7 longer than 128 tokens)`."""
    if isinstance(settings, LmSettings):
        label, reasons = f"{name} rows of {settings.context} tokens", {"blank": "blank documents"}
        if settings.documents == LINES:
            reasons = {"blank": "blank lines"}
    else:
        label = f"{name} {'texts' if corpus.labels else 'pairs' if len(corpus.columns) == 2 else 'rows'}"
        reasons = {"blank": "with a blank side", "long": f"longer than {settings.max_length} tokens"}
        if isinstance(settings, TextSettings):
            reasons |= {
                "short": f"shorter than {settings.clean.min_length} tokens",
                "ratio": f"with a side more than {settings.clean.max_ratio or 1:g} times as long as another",
                "identical": "with identical sides",
                "letters": f"with fewer letters than {100 * (settings.clean.min_letters or 0):g} %",
                "duplicate": "equal to an earlier one",
            }
    skipped = [f"{count:,} {label}" for reason, label in reasons.items() if (count := corpus.skipped.get(reason))]
    cut = f"cut: {corpus.cut:,} to {LONGEST:,} tokens a side" if corpus.cut else ""
    note = f"skipped: {', '.join(skipped)}" if skipped else cut  # held-out rows are never skipped, others never cut
    return f"data: {len(corpus):,} {label}" + (f" ({note})" if note else "")
