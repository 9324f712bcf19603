"""Tokenizers of published models: the files of their folder, and the order of the ids here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Pieces

from tfm_blocks.data.tokenizer import SPECIAL, Tokenizer, refusing_damage
from tfm_blocks.data.vocabulary import OTHERS, Vocabulary
from tfm_blocks.errors import Problem, RunError

KEY = "published"
BEGIN = b'{"published": '
FAST = "tokenizer.json"


class PublishedTokenizer(Tokenizer):
    """The tokenizer of a published model, with the ids of `Vocabulary`.

    `files` are the texts of its files by name. Their rules for special tokens around a text are not used: a model adds
    bos and eos by its layout.
    """

    def __init__(self, vocabulary: Vocabulary, files: Mapping[str, str], where: str = "tokenizer") -> None:
        self.vocabulary, self.files = vocabulary, dict(files)
        with refusing_damage(where):
            super().__init__(Pieces.from_str(files[FAST]))
        largest = max(self._pieces.get_vocab().values(), default=0)
        if largest >= vocabulary.size:
            rule = f"has the id {largest}, but the vocabulary of the model has {vocabulary.size} ids"
            raise RunError(Problem(where, rule, help="use the tokenizer of this model"))

    def __reduce__(self) -> tuple[Any, ...]:
        return PublishedTokenizer, (self.vocabulary, self.files)

    @property
    def size(self) -> int:
        return self.vocabulary.size_here

    @cached_property
    def ids(self) -> dict[str, int]:
        """Return the id of each subword; ids without subword have a name with their number."""
        published = self._pieces.get_vocab()
        names = dict(zip(self.vocabulary.to_here(list(published.values())), published, strict=True))
        unnamed = {id: f"<id {id}>" for id in range(OTHERS, self.size) if id not in names}
        special = dict(enumerate(SPECIAL[:OTHERS]))
        return {name: id for id, name in (unnamed | names | special).items()}

    @property
    def text(self) -> str:
        """Return the tokenizer as JSON: the vocabulary, and the files."""
        vocabulary = [self.vocabulary.size, self.vocabulary.start, self.vocabulary.eos]
        return json.dumps({KEY: vocabulary, "files": self.files}, ensure_ascii=False)

    def encode(self, text: str) -> list[int]:
        return self.vocabulary.to_here(self._pieces.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._pieces.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self.vocabulary.to_here(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._pieces.decode(self.vocabulary.to_published(ids), skip_special_tokens=True)

    def piece(self, id: int) -> str:
        return SPECIAL[id] if id < OTHERS else str(self._pieces.id_to_token(self.vocabulary.to_published([id])[0]))

    @classmethod
    def load(cls, path: Path) -> PublishedTokenizer:
        with refusing_damage(str(path)):
            content = json.loads(path.read_text("utf-8"))
            size, start, eos = content[KEY]
            return cls(Vocabulary(size, start, eos), content["files"], str(path))


def is_published(path: Path) -> bool:
    """Return True if a file was written by a PublishedTokenizer."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(BEGIN)) == BEGIN
