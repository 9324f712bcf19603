"""SentencePiece models of published folders, read by their own library, which is an extra."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

from tfm_blocks.data.published_tokenizer import PAIR, SINGLE, PublishedTokenizer
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.errors import Problem, RunError
from tfm_blocks.language.spec import TARGET

UNKNOWN = "<unk>"
LANGUAGE = re.compile(r"(>>[^<>]+<<) *")  # in multilingual models of OPUS-MT, the first token of a source


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

    def of(self, column: str) -> SentencePieceTokenizer:
        other = copy(self)
        other._column = column
        return other

    @property
    def names(self) -> dict[str, int]:
        return self._names

    @property
    def _model(self) -> Any:
        return self._models[-1 if self._column == TARGET else 0]

    def published_ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._names.get(name, self._unknown) for name in self._split(text)] for text in texts]

    def _split(self, text: str) -> list[str]:
        language = LANGUAGE.match(text)
        if language and language[1] in self._names:
            return [language[1], *self._model.encode(text[language.end() :], out_type=str)]
        return self._model.encode(text, out_type=str)  # type: ignore[no-any-return]

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {id: name for name, id in self._names.items()}

    def text_of(self, published: Sequence[int]) -> str:
        special = self.vocabulary.front
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
