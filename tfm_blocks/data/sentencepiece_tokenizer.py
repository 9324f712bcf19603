"""SentencePiece models of published folders, read by their own library, which is an extra."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

from tfm_blocks.data.published_tokenizer import PAIR, SINGLE, PublishedTokenizer
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.errors import Problem, RunError
from tfm_blocks.language.spec import TARGET

UNKNOWN = "<unk>"
LANGUAGE = re.compile(r">>.*?<<", re.DOTALL)  # in multilingual models of OPUS-MT, the first token of a source
SPECIAL_OF_PAIR = ("</s>", UNKNOWN, "<pad>")
SENTINELS = 100  # tokens <extra_id_0>, … of T5, from the last id downwards


class SentencePieceTokenizer(PublishedTokenizer):
    """One SentencePiece model, or Marian's pair of models, of which `column` chooses the one that splits a text."""

    def __init__(self, vocabulary: Vocabulary, files: Mapping[str, bytes], where: str = "tokenizer") -> None:
        self._column = "src"
        super().__init__(vocabulary, files, where)

    def open(self) -> None:
        models = [name for name in (*PAIR[:2], *SINGLE) if name in self.files]
        self._models = [_model(self.files[name]) for name in models]
        if "vocab.json" in self.files:
            names = json.loads(self.files["vocab.json"])
            self._names = {str(name): int(id) for name, id in names.items()}
            self._unknown = self._names[UNKNOWN]  # raises
        else:
            (model,) = self._models
            self._names = {model.id_to_piece(id): id for id in range(len(model))}
            self._unknown = model.unk_id()
        self._special = self._special_names()
        self._names |= self._special
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))))

    def _special_names(self) -> dict[str, int]:
        """Return the ids of the names that are matched in a text: control symbols, and the tokens that a config adds.

        Added tokens above the vocabulary of the model are left out.
        """
        if "vocab.json" in self.files:
            special = {name: self._names[name] for name in SPECIAL_OF_PAIR if name in self._names}
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

    def of(self, column: str) -> SentencePieceTokenizer:
        other = copy(self)
        other._column = column
        return other

    @property
    def names(self) -> dict[str, int]:
        return self._names

    @property
    def published_unknown(self) -> int:
        return self._unknown

    @property
    def _model(self) -> Any:
        return self._models[-1 if self._column == TARGET else 0]

    def published_ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._names.get(name, self._unknown) for name in self._split(text)] for text in texts]

    def _split(self, text: str) -> Iterator[str]:
        """Yield the subwords of a text, whose special tokens separate texts that the model splits."""
        end = 0
        for match in self._pattern.finditer(text):
            yield from self._subwords_of(text[end : match.start()])
            yield match[0]
            end = match.end()
        yield from self._subwords_of(text[end:])

    def _subwords_of(self, text: str) -> list[str]:
        language = LANGUAGE.match(text) if "vocab.json" in self.files else None
        begin = [language[0]] if language else []
        return [*begin, *self._model.encode(text[language.end() if language else 0 :], out_type=str)]

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {id: name for name, id in self._names.items()}

    def text_of(self, published: Sequence[int]) -> str:
        special = {*self.vocabulary.front, *self._special.values()}
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
