"""The tokenizer: one byte-level BPE for both languages, or one for each."""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Pieces

from tfm_blocks.data.tokenizer_format import has_known_settings, refusing_damage
from tfm_blocks.data.vocabulary import MASK as MASK
from tfm_blocks.data.vocabulary import SENTINEL, Conventions, sentinel
from tfm_blocks.data.vocabulary import SPECIAL as SPECIAL
from tfm_blocks.errors import ConfigError, Problem, RunError
from tfm_blocks.language.spec import TARGET

SMALLEST = len(SPECIAL) + 256  # one subword for each byte
LONGEST = 1024  # maximum bytes of a word in training; longer words are split
MOST_UNKNOWN = 0.01  # share of unknown tokens above which commands print a warning


class Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016 over bytes, as GPT-2): decode(encode(text)) == text for any text.

    All bytes are in the vocabulary, so `encode` never returns UNK; it exists because other tools expect it. The
    tokenizer of a probe task has a fixed alphabet instead, whose words are separated by spaces; others become UNK.
    A tag of a source is read at the beginning of a text; everywhere else, and for all other special tokens, its name is
    ordinary text. With separate vocabularies, `source` is the tokenizer of the sources, and this one of the targets.
    """

    PAD, BOS, EOS, UNK = range(4)
    conventions = Conventions()
    encodes_bos = False  # the ids of a text can contain bos
    source: Tokenizer | None = None

    def __init__(self, pieces: Pieces) -> None:
        pieces.encode_special_tokens = True  # "<eos>" in a sentence must not end it
        pieces.no_padding()  # a file could enable either
        pieces.no_truncation()
        pieces.post_processor = None  # `conventions` has the special tokens; an exported file adds them
        self._pieces = pieces

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        vocab: int,
        *,
        add_prefix_space: bool = False,
        special: Sequence[str] = (),
        tags: Mapping[str, bool] = MappingProxyType({}),
        knob: str = "vocab",
    ) -> Tokenizer:
        """Learn at most `vocab` subwords, special tokens included; each must occur at least twice.

        The ids of the tokens `special` follow the ids of SPECIAL, except sentinels, which have the last ids, in
        descending order. The ids of `tags` precede the sentinels. A tag is True if it is part of a text, such as a tag
        of sources, and False if a text neither contains nor shows it.

        With `add_prefix_space`, `encode` reads a space before the text and `decode` removes it, so that the first word
        of a text has the same subwords as elsewhere.

        Training is deterministic. The cost of learning a merge grows with the length of the words, so words are split
        at LONGEST bytes; `encode` is linear and splits nothing. Raises ConfigError if `vocab` has no room for the
        special tokens and all bytes, with the name of the `knob` that sets it.
        """
        if vocab < (smallest := SMALLEST + len(special) + len(tags)):
            rule = f"must have room for {smallest - 256} special tokens and 256 bytes, but is {vocab}"
            raise ConfigError(Problem(knob, rule, help=f"write {knob}={smallest} or more"))
        pieces, words = _bytes(add_prefix_space), pre_tokenizers.ByteLevel(add_prefix_space=False)
        bounded = pre_tokenizers.Split(Regex(f".{{{LONGEST}}}"), "isolated")
        pieces.pre_tokenizer = pre_tokenizers.Sequence([words, bounded])
        sentinels = list(filter(SENTINEL.fullmatch, special))
        first = [*SPECIAL, *(name for name in special if name not in sentinels)]
        size, alphabet = vocab - len(sentinels) - len(tags), sorted(pre_tokenizers.ByteLevel.alphabet())
        options: dict[str, Any] = {"special_tokens": first, "initial_alphabet": alphabet, "show_progress": False}
        pieces.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=size, min_frequency=2, **options))
        pieces.pre_tokenizer = words
        _add_tags(pieces, tags, add_prefix_space)
        pieces.add_special_tokens(sentinels[::-1])
        _return_freed_memory()
        return cls(pieces)

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Tokenizer:
        """Return the tokenizer of a fixed alphabet: the special tokens, then `words`."""
        ids = {name: id for id, name in enumerate([*SPECIAL, *words])}
        pieces = Pieces(models.WordLevel(ids, unk_token=SPECIAL[cls.UNK]))
        pieces.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        pieces.add_special_tokens(list(SPECIAL))
        return cls(pieces)

    @cached_property
    def lossless(self) -> bool:
        """Return True if decode(encode(text)) == text for any text."""
        return all(token.special for token in self._pieces.get_added_tokens_decoder().values())

    @property
    def size(self) -> int:
        """Return the number of ids, at most the requested `vocab`."""
        return self._pieces.get_vocab_size()

    @property
    def sizes(self) -> tuple[int, int | None]:
        """Return `size`, and the size of a separate vocabulary of sources, or None."""
        return self.size, self.source.size if self.source else None

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the ids that end a generated text."""
        return (self.EOS,)

    @property
    def ids(self) -> dict[str, int]:
        """Return the id of each subword, in its stored form."""
        return self._pieces.get_vocab()

    @property
    def unknown(self) -> int | None:
        """Return the id of text that is not in the vocabulary, or None if there is none."""
        return self.UNK

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids that stand for no text."""
        return frozenset(self._pieces.get_added_tokens_decoder())

    @property
    def mask(self) -> int | None:
        """Return the id of the token that hides another, or None if there is none."""
        return mask if (mask := self.ids.get(MASK)) in self.special_ids else None

    @property
    def sentinels(self) -> list[int]:
        """Return the ids of the tokens that stand for spans, in their order."""
        ids = self.ids
        return [ids[name] for name in takewhile(ids.__contains__, map(sentinel, count()))]

    @property
    def merges(self) -> list[list[str]] | None:
        """Return the pairs of subwords that BPE merges, the first ones first, or None for a fixed alphabet."""
        merges: list[list[str]] | None = json.loads(self.text)["model"].get("merges")
        return merges

    @property
    def text(self) -> str:
        """Return the tokenizer as JSON, in the format of the tokenizers library."""
        return self._pieces.to_str()

    def of(self, column: str) -> Tokenizer:
        """Return the tokenizer for the text of a column."""
        return self if self.source is None or column == TARGET else self.source

    def with_source(self, source: Tokenizer) -> Self:
        """Return this tokenizer of targets with another one for sources."""
        other = copy(self)
        other.source = source
        return other

    @property
    def stored(self) -> str:
        """Return the content of a run's file: `text`, or for separate vocabularies the texts of both, as JSON."""
        if self.source is None:
            return self.text
        return json.dumps({"source": self.source.text, "target": self.text}, ensure_ascii=False)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without the bos and the eos that `conventions` adds."""
        return self.encode_batch([text])[0]

    def encode_masked(self, text: str) -> list[int]:
        """Return the ids of a text in which MASK stands for a hidden token."""
        assert self.mask is not None, "the tokenizer has a mask"
        return self.encode_marked(text, {MASK: self.mask})

    def encode_marked(self, text: str, marks: Mapping[str, int]) -> list[int]:
        """Return the ids of a text in which the names of `marks` stand for their ids, with the space before them."""
        first, *rest = re.split(f"({'|'.join(map(re.escape, marks))})", text)
        head = first.removesuffix(" ") if rest else first
        ids = Tokenizer.encode_batch(self, [head])[0] if head.strip() or not rest else []
        for place in range(0, len(rest), 2):
            part = rest[place + 1]
            part = part.removesuffix(" ") if place + 2 < len(rest) else part
            ids += [marks[rest[place]], *self._continued.encode(part, add_special_tokens=False).ids]
        return ids

    @cached_property
    def _plain(self) -> Pieces:
        """The tokenizer of a text without a tag at its beginning."""
        if not self._tags:
            return self._pieces
        record = json.loads(self.text)
        for token in record["added_tokens"]:
            token["special"] = True
        pieces = Pieces.from_str(json.dumps(record))
        pieces.encode_special_tokens = True
        return pieces

    @cached_property
    def _continued(self) -> Pieces:
        """The tokenizer of a text after a mask, which no space precedes."""
        pieces = Pieces.from_str(self._plain.to_str())
        pieces.encode_special_tokens = True
        pieces.normalizer, pieces.decoder = None, decoders.ByteLevel()
        return pieces

    @cached_property
    def _tags(self) -> dict[str, int]:
        """The ids of the tags that are part of a text."""
        return {token.content: id for id, token in self._pieces.get_added_tokens_decoder().items() if not token.special}

    def _split_tags(self, texts: Sequence[str]) -> tuple[list[list[int]], list[str]]:
        """Return the id of the tag at the beginning of each text, if it has one, and the texts without them."""
        tags = [next(filter(text.startswith, self._tags), "") for text in texts]
        rests = [text[len(tag) :] for text, tag in zip(texts, tags, strict=True)]
        if self._pieces.normalizer:  # it reads a space before the text
            rests = [rest.lstrip() if tag else rest for rest, tag in zip(rests, tags, strict=True)]
        return [[self._tags[tag]] if tag else [] for tag in tags], rests

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, on all cores. No part stands for a special token except a tag at the beginning."""
        tags, rests = self._split_tags(texts)
        rows = self._plain.encode_batch_fast(rests)
        return [[*tag, *encoding.ids] for tag, encoding in zip(tags, rows, strict=True)]

    @cached_property
    def _target_tags(self) -> dict[str, int]:
        """The ids of the tags in front of targets, which are not part of a text."""
        added = self._pieces.get_added_tokens_decoder().items()
        names = {token.content: id for id, token in added if token.special and token.content not in (*SPECIAL, MASK)}
        return {name: id for name, id in names.items() if not SENTINEL.fullmatch(name)}

    def split_target_tag(self, text: str) -> tuple[list[int], str]:
        """Return the id of the tag of targets with which a text begins, if it does, and the text without it."""
        tag = next(filter(text.startswith, self._target_tags), "")
        return ([self._target_tags[tag]], text[len(tag) :].removeprefix(" ")) if tag else ([], text)

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text as the beginning of a target, in which a tag of targets may stand first."""
        parts = [self.split_target_tag(text) for text in texts]
        rows = self.encode_batch([text for _, text in parts])
        return [[*tag, *ids] for (tag, _), ids in zip(parts, rows, strict=True)]

    def words_of(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the number of the word of each id of each text; nothing is merged across words. A tag has -1."""
        tags, rests = self._split_tags(texts)
        rows = self._plain.encode_batch(rests)
        return [
            [-1] * len(tag) + [-1 if word is None else word for word in encoding.word_ids]
            for tag, encoding in zip(tags, rows, strict=True)
        ]

    def decode(self, ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """Return the text of `ids`, as it continues the text of `after`.

        Special ids are skipped, and invalid UTF-8 becomes U+FFFD.
        """
        return self._decode([*after, *ids])[len(self._decode(after)) if after else 0 :]

    def count_unknown(self, rows: Iterable[Sequence[int]]) -> Counter[str]:
        """Return the numbers of `tokens` and of `unknown` tokens in rows of ids."""
        counts = Counter(tokens=0, unknown=0)
        for ids in rows:
            counts.update(tokens=len(ids), unknown=0 if self.unknown is None else ids.count(self.unknown))
        return counts

    def _decode(self, ids: Sequence[int]) -> str:
        return self._pieces.decode(list(ids), skip_special_tokens=True)

    def piece(self, id: int) -> str:
        """Return a readable form of an id: ▁ is a space; an incomplete character keeps its stored form."""
        return shown_bytes(str(self._pieces.id_to_token(id)))

    def shown_piece(self, id: int) -> str:
        """Return `piece` with readable spaces, line breaks and characters also for a published tokenizer."""
        return self.piece(id)

    @property
    def subword_model(self) -> models.Model | None:
        """Return the model of the tokenizers library, or None if another library splits the text."""
        model: models.Model = self._pieces.model
        return model

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON."""
        path.write_text(self.stored, encoding="utf-8")

    @classmethod
    def of_text(cls, text: str, where: str) -> Tokenizer:
        """Return the tokenizer of a `text`. Raises RunError if it is damaged or another kind of tokenizer."""
        with refusing_damage(where):
            known = has_known_settings(json.loads(text))
            pieces = Pieces.from_str(text) if known else Pieces(models.WordLevel())  # refused below
        if not isinstance(pieces.model, (models.BPE, models.WordLevel)) or [
            pieces.token_to_id(name) for name in SPECIAL
        ] != [0, 1, 2, 3]:
            raise RunError(Problem(where, f"is another kind of tokenizer: it lacks {' '.join(SPECIAL)} as ids 0 to 3"))
        if sorted(pieces.get_vocab().values()) != list(range(pieces.get_vocab_size())):
            raise RunError(Problem(where, "is damaged: its ids are not 0, 1, 2, …", help="restore it"))
        return cls(pieces)


def shown_bytes(token: str) -> str:
    """Return a readable form of a subword of a byte-level tokenizer; see `Tokenizer.piece`."""
    text = decoders.ByteLevel().decode([token])
    return token if "\ufffd" in text else text.replace(" ", "▁").replace("\n", "⏎")


def unknown_warning(place: str, tokens: int, unknown: int) -> str:
    """Return a warning if more than MOST_UNKNOWN of the tokens of a text are unknown, else ''."""
    share = f"{100 * unknown / max(tokens, 1):.1f} % of the tokens of {place} are <unk>"
    help = "the tokenizer lacks their words or characters, so the model cannot read them"
    return f"{share}: {help}" if unknown > MOST_UNKNOWN * tokens else ""


def _bytes(add_prefix_space: bool) -> Pieces:
    """Return a byte-level BPE without merges."""
    pieces = Pieces(models.BPE())
    pieces.decoder = decoders.ByteLevel()
    if add_prefix_space:
        pieces.normalizer = normalizers.Prepend(" ")
        pieces.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return pieces


def _add_tags(pieces: Pieces, tags: Mapping[str, bool], add_prefix_space: bool) -> None:
    """Add tags, with marks by which a file of the tokenizer shows which are part of a text."""
    for tag, of_text in tags.items():
        strips = of_text and add_prefix_space
        token = AddedToken(tag, special=not of_text, normalized=False, rstrip=strips, single_word=not of_text)
        (pieces.add_tokens if of_text else pieces.add_special_tokens)([token])


def _return_freed_memory() -> None:
    """Return freed memory to the system; glibc would keep the 0.7 GB of training on a million pairs."""
    if os.name == "posix" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
