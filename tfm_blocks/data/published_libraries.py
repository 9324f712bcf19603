"""Tokenizers of published models, read by their libraries: tokenizers, and sentencepiece, which is an extra."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

from tokenizers import Tokenizer as Pieces
from tokenizers import models

from tfm_blocks.data.published_tokenizer import (
    FAST,
    KEY,
    NO_CONVENTIONS,
    PAIR,
    SINGLE,
    TARGET_IDS,
    PublishedTokenizer,
)
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.tokenizer_format import refusing_damage
from tfm_blocks.data.vocabulary import Conventions, Vocabulary
from tfm_blocks.errors import Problem, RunError
from tfm_blocks.language.spec import TARGET

UNKNOWN = "<unk>"
LANGUAGE = re.compile(r">>.*?<<", re.DOTALL)  # in multilingual models of OPUS-MT, the first token of a source
SPECIAL_OF_PAIR = ("</s>", UNKNOWN, "<pad>")
SENTINELS = 100  # tokens <extra_id_0>, … of T5, from the last id downwards
SHOWING = 1000  # subwords that are read to find out whether decoding adds a space


class FastTokenizer(PublishedTokenizer):
    """A tokenizer.json of the tokenizers library."""

    def open(self) -> None:
        Tokenizer.__init__(self, Pieces.from_str(self.files[FAST].decode()))
        self._pieces.encode_special_tokens = bool(self.config.get("split_special_tokens"))
        self.names = self._pieces.get_vocab()
        self.largest = max(self._pieces.get_vocab(with_added_tokens=False).values(), default=0)
        added = self._pieces.get_added_tokens_decoder()
        self.special = {token.content: id for id, token in added.items() if token.special}
        self.published_special = frozenset(self.special.values())

    @cached_property
    def published_unknown(self) -> int | None:
        if isinstance(self._pieces.model, models.Unigram):
            id: int | None = json.loads(self.files[FAST])["model"]["unk_id"]
            return id
        return self.names.get(self._pieces.model.unk_token or "")

    def published_ids(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._pieces.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def text_of(self, published: Sequence[int]) -> str:
        return self._pieces.decode(list(published), skip_special_tokens=True).removeprefix(self._added_space)

    @cached_property
    def _added_space(self) -> str:
        """Return the space that decoding adds before every text, or ''; the first subwords that are texts show it."""
        for id in islice(sorted(self.names.values()), SHOWING):
            text = self._pieces.decode([id]).strip()
            restored = self._pieces.decode(self._pieces.encode(text, add_special_tokens=False).ids)
            if text and restored.strip() == text:
                return " " if restored == f" {text}" else ""
        return ""


class SentencePieceTokenizer(PublishedTokenizer):
    """One SentencePiece model, or Marian's pair of models; `column` chooses the model that splits a text.

    With separate vocabularies, each side of Marian is a tokenizer with one model and its own ids.
    """

    def open(self) -> None:
        models = [name for name in (*PAIR[:2], *SINGLE) if name in self.files]
        self._models = [_model(self.files[name]) for name in models]
        self._ids_file = next((name for name in (PAIR[2], TARGET_IDS) if name in self.files), None)
        if self._ids_file:
            self.names = {str(name): int(id) for name, id in json.loads(self.files[self._ids_file]).items()}
            self._unknown = self.names[UNKNOWN]  # raises
        else:
            (model,) = self._models
            self.names = {model.id_to_piece(id): id for id in range(len(model))}
            self._unknown = model.unk_id()
        self.matched = self._matched()
        self.names |= self.matched
        self.special, self.largest = self.names, max(self.names.values(), default=0)
        self.published_special = frozenset(self.matched.values())
        self._pattern = re.compile(f"({'|'.join(map(re.escape, sorted(self.matched, key=len, reverse=True)))})")

    def _matched(self) -> dict[str, int]:
        """Return the ids of the names that are matched in a text: control symbols, and the tokens that a config adds.

        Added tokens above the vocabulary of the model are left out.
        """
        if self._ids_file:
            special = {name: self.names[name] for name in SPECIAL_OF_PAIR if name in self.names}
        else:
            (model,) = self._models
            control = [id for id in range(len(model)) if model.is_control(id) or model.is_unknown(id)]
            special = {model.id_to_piece(id): id for id in control}
        added = {str(name): int(id) for name, id in json.loads(self.files.get("added_tokens.json", b"{}")).items()}
        for id, token in self.config.get("added_tokens_decoder", {}).items():
            added[str(token["content"])] = int(id)
        first = len(self._models[0])
        usual = SENTINELS if first + SENTINELS <= self.vocabulary.size <= first + 2 * SENTINELS else 0
        if "spiece.model" in self.files and not added:
            count = int(self.config.get("extra_ids", usual))
            added = {f"<extra_id_{number}>": first + count - 1 - number for number in range(count)}
        return special | {name: id for name, id in added.items() if id < self.vocabulary.size}

    @property
    def published_unknown(self) -> int:
        return self._unknown

    @property
    def subword_model(self) -> None:
        return None

    @property
    def _model(self) -> Any:
        return self._models[-1 if self.column == TARGET else 0]

    def published_ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self.names.get(name, self._unknown) for name in self._split(text)] for text in texts]

    def _split(self, text: str) -> Iterator[str]:
        """Yield the subwords of a text, whose special tokens separate texts that the model splits."""
        for place, part in enumerate(self._pattern.split(text)):
            yield from [part] if place % 2 else self._subwords_of(part)

    def _subwords_of(self, text: str) -> list[str]:
        language = LANGUAGE.match(text) if self._ids_file else None
        begin = [language[0]] if language else []
        return [*begin, *self._model.encode(text[language.end() if language else 0 :], out_type=str)]

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {id: name for name, id in self.names.items()}

    def text_of(self, published: Sequence[int]) -> str:
        special = {*self.vocabulary.front, *self.matched.values(), self._unknown}
        text: str = self._models[-1].decode([self._texts.get(id, "") for id in published if id not in special])
        return text.replace("▁", " ").strip()


def _model(content: bytes) -> Any:
    """Return the model of the library. Raises RunError if the library is missing."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        help = "pip install sentencepiece, or save the tokenizer as tokenizer.json"
        raise RunError(
            Problem("tokenizer", "a SentencePiece model needs the library sentencepiece", help=help)
        ) from None
    return SentencePieceProcessor(model_proto=content)


def published_tokenizer(
    vocabulary: Vocabulary, files: Mapping[str, bytes], where: str, conventions: Conventions = NO_CONVENTIONS
) -> PublishedTokenizer:
    """Return the tokenizer for the files of a folder. Raises RunError if they are damaged or its library is missing.

    With separate vocabularies, it has the tokenizer of sources, which reads the other files of Marian, or the same.
    """
    kind = FastTokenizer if FAST in files else SentencePieceTokenizer
    own, source = replace(vocabulary, source=None), vocabulary.source
    is_separate = {*PAIR, TARGET_IDS} <= files.keys()
    of_source, of_target = ((PAIR[0], PAIR[2]), (PAIR[1], TARGET_IDS)) if is_separate else ((), ())
    target = kind(own, {name: files[name] for name in files if name not in of_source}, where, conventions)
    if not is_separate and source is None:
        return target
    read = {name: files[name] for name in files if name not in of_target}
    return target.with_source(kind(source or own, read, where, conventions.around_texts))


def stored_tokenizer(text: str, where: str) -> PublishedTokenizer:
    """Return the tokenizer of a text of `stored_text`. Raises RunError."""
    with refusing_damage(where):
        content = json.loads(text)
        size, start, eos, *stops = content[KEY]
        files = {
            name: text.encode() if name.endswith(".json") else b64decode(text)
            for name, text in content["files"].items()
        }
        conventions = Conventions.from_json(content.get("conventions", {}))
    return published_tokenizer(Vocabulary(size, start, eos, tuple(stops)), files, where, conventions)
