"""Preparation of the data of a run: the tokenizer and the encoded corpora."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tfm_blocks.data.cache import cache_folder, cache_key, find_or_build
from tfm_blocks.data.corpus import FORMAT, Corpus
from tfm_blocks.data.dates import date_splits
from tfm_blocks.data.documents import find_document_splits
from tfm_blocks.data.encoding import LONGEST, NO_RULES, Tags, write_corpus, write_labelled, write_packed
from tfm_blocks.data.file_settings import CleanSettings, MixedDocuments, MixedPairs
from tfm_blocks.data.files import LINES
from tfm_blocks.data.mix import Mix, counts_of
from tfm_blocks.data.pair_settings import DatesSettings
from tfm_blocks.data.probe_corpora import probe_corpora
from tfm_blocks.data.probe_settings import ProbeSettings
from tfm_blocks.data.published_tokenizer import PublishedTokenizer
from tfm_blocks.data.settings import DataSettings, LabelsSettings, LmSettings, TextSettings, columns_of
from tfm_blocks.data.subword_dropout import WORDS, SubwordDropout, write_words
from tfm_blocks.data.text import Split, find_splits, join_splits, with_stored_splits
from tfm_blocks.data.tokenizer import Tokenizer, unknown_warning
from tfm_blocks.data.tokenizer_files import expect_special, load_tokenizer, read_tokenizer
from tfm_blocks.errors import ConfigError, DataError, Problem
from tfm_blocks.language.spec import TARGET

SAMPLE = 1_000_000  # maximum rows for training the tokenizer: more cost memory and change little
SAMPLE_CHARACTERS = 100 * SAMPLE  # approximate maximum, for long rows
LinesSettings = DatesSettings | TextSettings | LmSettings
Mixed = MixedPairs | MixedDocuments


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
    settings: DataSettings,
    vocab: int,
    tell: Callable[[str], None] = print,
    special: Sequence[str] = (),
    source_vocab: int | None = None,
) -> Prepared:
    """Return tokenizer and corpora, from the cache if possible; `tell` receives lines about sizes and skipped rows.

    `special` are tokens that the objective needs, besides each tokenizer's own. With `source_vocab`, the sources have
    a separate vocabulary of at most that size.

    Training rows with a blank column or above max_length are skipped. val and test keep every line, because scores
    cover all of them, but lines are truncated to LONGEST tokens. Plain text is packed without its blank lines. Raises
    ConfigError and DataError.
    """
    if isinstance(settings, ProbeSettings):
        tokenizer, probes = probe_corpora(settings, tell)
        return Prepared(tokenizer=tokenizer, **probes)
    cache = cache_folder(settings.cache)
    splits = _splits(cache, settings)
    tokenizer = _tokenizer(cache, splits, settings, vocab, special, source_vocab)
    mix, by_split = _mix_of(settings), dict[str, dict[str, Corpus]]()
    for name in ("val", "test", "train"):  # small splits first, so that their errors appear early
        for part, split in splits.get(name, {}).items():
            encoded = _corpus(cache / "corpora", split, tokenizer, settings, mix.get(part), training=name == "train")
            by_split.setdefault(name, {})[part] = encoded
    corpora: dict[str, Corpus] = {
        name: Mix(parts, _counts(parts, settings) if name == "train" else ()) if mix else parts[""]
        for name, parts in by_split.items()
    }
    if isinstance(settings, TextSettings) and settings.bpe_dropout:
        corpora["train"].dropout = _dropout(cache, by_split["train"].values(), tokenizer, settings)
    for name in splits:
        for part, encoded in by_split[name].items():
            tell(_report(name, encoded, settings, part, mix.get(part)))
    for line in _summary(corpora, tokenizer, settings, vocab, source_vocab):
        tell(line)
    return Prepared(tokenizer=tokenizer, **corpora)


def _summary(
    corpora: Mapping[str, Corpus], tokenizer: Tokenizer, settings: LinesSettings, vocab: int, source_vocab: int | None
) -> Iterator[str]:
    """Yield how an epoch reads a mix, the size of each vocabulary, and warnings of unknown tokens."""
    if isinstance(mix := corpora["train"], Mix):
        yield "\n".join(
            f"data: an epoch reads {count:,} rows of {name} ({count / len(mix):.1%} of {len(mix):,}), "
            f"each {count / len(part):.2f} times"
            for (name, part), count in zip(mix.parts.items(), mix.counts_P, strict=True)
        )
    sides = {"": (tokenizer, vocab)}
    if tokenizer.source:
        sides = {" for sources": (tokenizer.source, source_vocab or 0), " for the target": (tokenizer, vocab)}
    for side, (one, most) in sides.items():
        requested = f", {most:,} requested" if one.size < most and not settings.tokenizer else ""
        yield f"data: vocabulary of {one.size:,} subwords{side}{requested}"
    for name, corpus in corpora.items():
        for column, unknown in corpus.unknown.items():
            tokens = int(corpus.lengths_N(column).sum(dtype=np.int64))
            if warning := unknown_warning(f"the {column} text of {name}", tokens, unknown):
                yield f"warning: {warning}"


def vocabulary_sizes(
    settings: DataSettings, vocab: int, special: Sequence[str], source_vocab: int | None
) -> tuple[int, int | None]:
    """Return the number of tokens that a run has if it requests `vocab`, which may need to learn a tokenizer.

    The second number is the size of a separate vocabulary of sources, or None. Raises ConfigError and DataError.
    """
    if isinstance(settings, ProbeSettings):
        return settings.vocab, None
    cache = cache_folder(settings.cache)
    splits = {} if settings.tokenizer else _splits(cache, settings)
    return _tokenizer(cache, splits, settings, vocab, special, source_vocab).sizes


def with_saved_tokenizer(settings: DataSettings, run: Path) -> DataSettings:
    """Return the settings with the tokenizer that a run saved, so that none is learned or read elsewhere."""
    if isinstance(settings, ProbeSettings):
        return settings
    return settings.model_copy(update={"tokenizer": str(run)})


def _mix_of(settings: LinesSettings) -> Mapping[str, Mixed]:
    """Return the corpora of a mix by name, or nothing."""
    return {} if isinstance(settings, DatesSettings) else settings.mix or {}


def _splits(cache: Path, settings: LinesSettings) -> dict[str, dict[str, Split]]:
    """Return the splits by name, of each the corpora of a mix by name, or the single corpus ''."""
    parts: Mapping[str, LinesSettings | Mixed] = _mix_of(settings) or {"": settings}
    splits = dict[str, dict[str, Split]]()
    for corpus, part in parts.items():
        address = f"data.mix.{corpus}" if corpus else "data"
        if isinstance(part, DatesSettings):
            by_name = date_splits(part)
        elif isinstance(part, LmSettings | MixedDocuments):
            by_name = find_document_splits(with_stored_splits(part, address, cache), address)
        else:
            labelled = isinstance(settings, LabelsSettings)
            by_name = find_splits(with_stored_splits(part, address, cache), address, labelled=labelled)
        for name, split in by_name.items():
            splits.setdefault(name, {})[corpus] = split.first(part.first) if part.first else split
    return {name: splits[name] for name in ("train", "val", "test") if name in splits}


def _counts(parts: Mapping[str, Corpus], settings: LinesSettings) -> list[int]:
    """Return the rows that an epoch of a mix reads of each corpus. Raises ConfigError if it reads none of a corpus."""
    sizes, weights = [len(part) for part in parts.values()], [part.weight for part in _mix_of(settings).values()]
    temperature = 1.0 if isinstance(settings, DatesSettings) else settings.temperature
    by_size = [(size / max(sizes)) ** (1 / temperature) for size in sizes]  # a power of at most 1, which is finite
    counts = counts_of(sizes, [weight or 1.0 for weight in weights] if any(weights) else by_size)
    if unread := [name for name, count in zip(parts, counts, strict=True) if not count]:
        rule = f"an epoch of {sum(sizes):,} rows reads none of the {len(parts[unread[0]]):,} rows of {unread[0]}"
        help = "write weights that differ less" if any(weights) else "write a larger temperature"
        address = f"data.mix.{unread[0]}.weight" if any(weights) else "data.temperature"
        raise ConfigError(Problem(address, rule, help=f"{help}, or leave the corpus out"))
    return counts


def _dropout(cache: Path, corpora: Iterable[Corpus], tokenizer: Tokenizer, settings: TextSettings) -> SubwordDropout:
    """Write which tokens of the training text begin a word, and return what draws its subwords. Raises ConfigError."""
    sides = [one for one in (tokenizer, tokenizer.source) if one]
    if any(isinstance(one, PublishedTokenizer) or one.merges is None for one in sides):
        rule = f"is {settings.bpe_dropout:g}, but {settings.tokenizer} does not have the merges of a learned tokenizer"
        help = "write data.tokenizer=null to learn one, or data.bpe_dropout=0.0"
        raise ConfigError(Problem("data.bpe_dropout", rule, help=help))
    for corpus in corpora:
        key = cache_key("words", FORMAT, corpus.sha256, tokenizer.stored)
        corpus.words = find_or_build(cache / "corpora" / key, partial(write_words, corpus=corpus)) / WORDS
    return SubwordDropout(tokenizer=tokenizer, rate=settings.bpe_dropout, max_length=settings.max_length)


def _tags_of(part: Mixed | None, columns: Sequence[str]) -> Tags:
    """Return the tag of each column that has one."""
    target = part.target_tag if isinstance(part, MixedPairs) else part and part.tag
    tags = {column: target if column == TARGET else part and part.tag for column in columns}
    return {column: tag for column, tag in tags.items() if tag}


def _tokenizer(
    cache: Path,
    splits: Mapping[str, Mapping[str, Split]],
    settings: LinesSettings,
    vocab: int,
    special: Sequence[str],
    source_vocab: int | None,
) -> Tokenizer:
    """Read data.tokenizer, else learn a tokenizer of the training text, or with `source_vocab` one of each side."""
    columns = ("src",) if isinstance(settings, LabelsSettings) else columns_of(settings)
    if settings.tokenizer:
        tokenizer = read_tokenizer(settings.tokenizer)
        expect_special(tokenizer, str(settings.tokenizer), special, _text_tags(settings, columns))
        return tokenizer
    if source_vocab is None:
        return _learned(cache, splits, settings, columns, vocab, special)
    sources = [column for column in columns if column != TARGET]
    source = _learned(cache, splits, settings, sources, source_vocab, (), knob="source_vocab")
    return _learned(cache, splits, settings, [TARGET], vocab, special).with_source(source)


def _text_tags(settings: LinesSettings, columns: Sequence[str]) -> dict[str, bool]:
    """Return the tags of a mix in these columns: True for those that are part of a text."""
    return {
        tag: isinstance(part, MixedDocuments) or column != TARGET
        for part in _mix_of(settings).values()
        for column, tag in _tags_of(part, columns).items()
    }


def _learned(
    cache: Path,
    splits: Mapping[str, Mapping[str, Split]],
    settings: LinesSettings,
    learned: Sequence[str],
    vocab: int,
    special: Sequence[str],
    knob: str = "vocab",
) -> Tokenizer:
    """Learn a tokenizer of the training text of the `learned` columns, or read it from the cache.

    If the text is larger than a sample, it is trained on every Nth row. A sample has at most SAMPLE rows and about
    SAMPLE_CHARACTERS.
    """
    add_prefix_space = isinstance(settings, TextSettings) and settings.add_prefix_space
    train, tags = join_splits([*splits["train"].values()]), _text_tags(settings, learned)
    numbers = [train.columns.index(column) for column in learned]

    def build(folder: Path) -> None:
        # read all text once to detect its errors before the slow work
        samples = {name: _samples(join_splits([*parts.values()])) for name, parts in splits.items()}
        rows = islice(train.rows(), 0, None, samples["train"])
        texts = (row[number] for row in rows for number in numbers)
        tokenizer = Tokenizer.train(
            texts, vocab, add_prefix_space=add_prefix_space, special=special, tags=tags, knob=knob
        )
        tokenizer.save(folder / "tokenizer.json")

    parts: list[object] = [FORMAT, version("tokenizers"), (SAMPLE, SAMPLE_CHARACTERS), vocab, add_prefix_space]
    parts += [train.fingerprint, *([] if len(learned) == len(train.columns) else learned)]
    parts += [tags] if tags else []
    folder = find_or_build(cache / "tokenizers" / cache_key(*parts, *special), build)
    return load_tokenizer(folder / "tokenizer.json")


def _samples(split: Split) -> int:
    """Return the number of samples into which the rows of a split are divided, at least 1."""
    rows = characters = 0
    for texts in split.rows():
        rows += 1
        characters += sum(map(len, texts))
    return max(1, -(-rows // SAMPLE), -(-characters // SAMPLE_CHARACTERS))


def _corpus(
    cache: Path,
    split: Split,
    tokenizer: Tokenizer,
    settings: LinesSettings,
    part: Mixed | None,
    *,
    training: bool,
) -> Corpus:
    context = settings.context if isinstance(settings, LmSettings) else None
    max_length = None if isinstance(settings, LmSettings) or not training else settings.max_length
    clean = _clean_of(part or settings) if training else NO_RULES
    labels = settings.coder if isinstance(settings, LabelsSettings) else None
    tags, inside = _tags_of(part, split.columns), isinstance(settings, LmSettings) and settings.inside_documents
    options: dict[str, Any] = {"max_length": max_length, "clean": clean}

    def build(folder: Path) -> None:
        if context is not None:
            texts = (text for (text,) in split.rows())
            write_packed(folder, split.columns[0], texts, tokenizer, context=context, tags=tags, inside=inside)
        elif labels:
            write_labelled(folder, split.columns, split.rows(), tokenizer, labels, split.address, **options)
        else:
            write_corpus(folder, split.columns, split.rows(), tokenizer, tags=tags, **options)
        if not (folder / "ids.bin").stat().st_size:
            help = "the text is empty or blank" + (
                ", or every row is longer than data.max_length" if max_length else ""
            )
            if clean != NO_RULES:
                help += ", or breaks a rule of data.clean"
            raise DataError(Problem(split.address, "has no usable rows", help=help))

    rules: list[object] = [] if clean == NO_RULES else [clean.model_dump()]
    rules += [asdict(labels), 2] if labels else []  # 2: version of how the words of a text are read
    rules += [tags] if tags else []
    rules += ["inside"] if inside else []
    key = cache_key(FORMAT, split.columns, split.fingerprint, tokenizer.stored, max_length, context, *rules)
    return Corpus(find_or_build(cache / key, build), tokenizer, split.groups, labels)


def _clean_of(part: LinesSettings | Mixed) -> CleanSettings:
    return part.clean if isinstance(part, TextSettings | MixedPairs) else NO_RULES


def _report(split: str, corpus: Corpus, settings: LinesSettings, name: str, part: Mixed | None) -> str:
    """Format a line such as `data: 28,990 train pairs (skipped: 3 with a blank side, 7 longer than 128 tokens)`."""
    if isinstance(settings, LmSettings):
        most = "at most " if settings.inside_documents else ""
        label, reasons = f"{split} rows of {most}{settings.context} tokens", {"blank": "blank documents"}
        if (part if isinstance(part, MixedDocuments) else settings).documents == LINES:
            reasons = {"blank": "blank lines"}
    else:
        label = f"{split} {'texts' if corpus.labels else 'pairs' if len(corpus.columns) == 2 else 'rows'}"
        reasons = {"blank": "with a blank side", "long": f"longer than {settings.max_length} tokens"}
        clean = _clean_of(part or settings)
        reasons |= {
            "short": f"shorter than {clean.min_length} tokens",
            "ratio": f"with a side more than {clean.max_ratio or 1:g} times as long as another",
            "identical": "with identical sides",
            "letters": f"with fewer letters than {100 * (clean.min_letters or 0):g} %",
            "duplicate": "equal to an earlier one",
        }
    label += f" of {name}" if name else ""
    skipped = [f"{count:,} {label}" for reason, label in reasons.items() if (count := corpus.skipped.get(reason))]
    cut = f"cut: {corpus.cut:,} to {LONGEST:,} tokens a side" if corpus.cut else ""
    note = f"skipped: {', '.join(skipped)}" if skipped else cut  # held-out rows are never skipped, others never cut
    return f"data: {len(corpus):,} {label}" + (f" ({note})" if note else "")
