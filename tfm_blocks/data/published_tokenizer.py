"""Tokenizers of published models: the files of their folder, and the order of the ids here.

The names of the files are a closed list, and no file keeps a key that names code.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Pieces
from tokenizers import models

from tfm_blocks.data.tokenizer import LARGEST_OF_RUN, SPECIAL, Tokenizer, expect_small, refusing_damage
from tfm_blocks.data.vocabulary import OTHERS, Vocabulary
from tfm_blocks.errors import DataError, Problem, RunError, shown

KEY = "published"
BEGIN = b'{"published": '
FAST = "tokenizer.json"
PAIR = ("source.spm", "target.spm", "vocab.json")  # Marian: a model for each side, and the ids of the subwords of both
SINGLE = ("spiece.model", "tokenizer.model")  # T5, Llama
CONFIG = "tokenizer_config.json"
COMPANIONS = (CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")  # export restores them
NAMES = (FAST, *PAIR, *SINGLE, *COMPANIONS)
SETTINGS = COMPANIONS[:2]  # files whose keys are arguments of transformers
CODE = re.compile(
    "_?auto_(map|class)|custom_(pipelines|generate)|trust_remote_code|code_revision"
    "|_?(attn|experts)_implementation(_internal)?|kernel_config|use_kernels|allow_all_kernels"
)
"""Matches the keys with which transformers loads code from a folder or a hub."""
SHOWING = 1000  # subwords that are read to find out whether decoding adds a space


class PublishedTokenizer(Tokenizer):
    """The tokenizer of a published model, with the ids of `Vocabulary`.

    `files` are the contents of its files by name. Special tokens that are written in a text are matched. The rules for
    special tokens around a text are not used, because the layout of the data adds bos and eos.
    """

    lossless = False  # it can normalise its text, or lack characters

    def __init__(self, vocabulary: Vocabulary, files: Mapping[str, bytes], where: str = "tokenizer") -> None:
        self.vocabulary, self.files = vocabulary, dict(files)
        with refusing_damage(where):
            self._expect_inert()
            self.config = dict(json.loads(self.files.get(CONFIG, b"{}")))
            self.open()
        largest = max(self.model_names.values(), default=0)
        if largest >= vocabulary.size:
            rule = f"has the id {largest}, but the vocabulary of the model has {vocabulary.size} ids"
            raise RunError(Problem(where, rule, help="use the tokenizer of this model"))
        self._beyond = {id: name for name, id in self.names.items() if id >= vocabulary.size}

    def _expect_inert(self) -> None:
        """Raise ValueError for a file of another name, a text that is not UTF-8, and a key that names code."""
        for name in self.files:
            if name not in NAMES:
                raise ValueError(f"{shown(name)} is not the name of a file of a tokenizer")
            if name.endswith((".json", ".jinja")):
                self.files[name].decode("utf-8")
            if name in SETTINGS and (keys := without_code(self.files[name])[1]):
                raise ValueError(f"{name} has {', '.join(keys)}, which names code")

    @abstractmethod
    def open(self) -> None:
        """Read the files."""

    @property
    @abstractmethod
    def names(self) -> dict[str, int]:
        """Return the published id of each subword."""

    @property
    def model_names(self) -> Mapping[str, int]:
        """Return the names without added tokens, which can have ids beyond the vocabulary of the model."""
        return self.names

    @property
    def special(self) -> Mapping[str, int]:
        """Return the published ids of names that can begin or end a sequence."""
        return self.names

    @property
    @abstractmethod
    def published_unknown(self) -> int | None:
        """Return the published id of text that is not in the vocabulary, or None if there is none."""

    @abstractmethod
    def published_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the published ids of each text."""

    @abstractmethod
    def text_of(self, published: Sequence[int]) -> str:
        """Return the text of published ids without special tokens."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.vocabulary, self.files)

    @property
    def size(self) -> int:
        return self.vocabulary.size_here

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.EOS, *self.vocabulary.to_here(self.vocabulary.stops))

    @cached_property
    def ids(self) -> dict[str, int]:
        """Return the id of each subword; ids without subword have a name with their number."""
        return {name: id for id, name in reversed(self._subwords.items())}  # the first of two ids with a name

    @cached_property
    def _subwords(self) -> dict[int, str]:
        names = dict(zip(self.vocabulary.to_here(list(self.names.values())), self.names, strict=True))
        names |= dict(enumerate(SPECIAL[:OTHERS]))
        return {id: names.get(id, f"<id {id}>") for id in range(self.size)}

    @property
    def text(self) -> str:
        """Return the tokenizer as JSON."""
        return stored_text(self.vocabulary, self.files)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with refusing_damage("tokenizer", "cannot encode this text"):
            rows = self.published_ids(texts)
        for id in (id for ids in rows for id in ids if id in self._beyond) if self._beyond else ():
            rule = f"has the token {self._beyond[id]} with the id {id}, but the model has {self.vocabulary.size} ids"
            raise DataError(Problem("text", rule, help="remove the token from the text"))
        return [self.vocabulary.to_here(ids) for ids in rows]

    @cached_property
    def unknown(self) -> int | None:
        return None if self.published_unknown is None else self.vocabulary.to_here([self.published_unknown])[0]

    def _decode(self, ids: Sequence[int]) -> str:
        with refusing_damage("tokenizer", "cannot decode these ids"):
            return self.text_of(self.vocabulary.to_published(ids))

    def piece(self, id: int) -> str:
        return self._subwords[id]

    @classmethod
    def load(cls, path: Path) -> PublishedTokenizer:
        expect_small(path, LARGEST_OF_RUN)
        with refusing_damage(str(path)):
            return cls.from_text(path.read_text("utf-8"), str(path))

    @staticmethod
    def from_text(text: str, where: str) -> PublishedTokenizer:
        """Return the tokenizer of a text of `stored_text`. Raises RunError."""
        with refusing_damage(where):
            content = json.loads(text)
            size, start, eos, *stops = content[KEY]
            files = {
                name: text.encode() if name.endswith(".json") else b64decode(text)
                for name, text in content["files"].items()
            }
        return published_tokenizer(Vocabulary(size, start, eos, tuple(stops)), files, where)


class FastTokenizer(PublishedTokenizer):
    """A tokenizer.json of the tokenizers library."""

    def open(self) -> None:
        Tokenizer.__init__(self, Pieces.from_str(self.files[FAST].decode()))
        self._pieces.encode_special_tokens = bool(self.config.get("split_special_tokens"))

    @cached_property
    def names(self) -> dict[str, int]:
        return self._pieces.get_vocab()

    @property
    def model_names(self) -> Mapping[str, int]:
        return self._pieces.get_vocab(with_added_tokens=False)

    @property
    def special(self) -> Mapping[str, int]:
        added = self._pieces.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special}

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


def stored_text(vocabulary: Vocabulary, files: Mapping[str, bytes]) -> str:
    """Return a tokenizer as JSON: the vocabulary, and the files, in base64 unless they are JSON.

    Raises UnicodeDecodeError for JSON that is not UTF-8.
    """
    texts = {
        name: content.decode() if name.endswith(".json") else b64encode(content).decode()
        for name, content in files.items()
    }
    return json.dumps(
        {KEY: [vocabulary.size, vocabulary.start, vocabulary.eos, *vocabulary.stops], "files": texts},
        ensure_ascii=False,
    )


def without_code(content: bytes) -> tuple[bytes, list[str]]:
    """Return a JSON file without the keys of CODE, and these keys. Without such a key, the bytes are unchanged.

    Raises ValueError if the file is not JSON in UTF-8.
    """
    keys: set[str] = set()
    try:
        value = _without_code(json.loads(content.decode("utf-8")), keys)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    return (f"{json.dumps(value, indent=2)}\n".encode() if keys else content), sorted(keys)


def _without_code(value: Any, keys: set[str]) -> Any:
    """Return plain data without the keys of CODE, which are added to `keys`."""
    if isinstance(value, list):
        return [_without_code(item, keys) for item in value]
    if not isinstance(value, dict):
        return value
    keys.update(filter(CODE.fullmatch, value))
    return {key: _without_code(inner, keys) for key, inner in value.items() if key not in keys}


def published_tokenizer(vocabulary: Vocabulary, files: Mapping[str, bytes], where: str) -> PublishedTokenizer:
    """Return the tokenizer for the files of a folder. Raises RunError if they are damaged or its library is missing."""
    if FAST in files:
        return FastTokenizer(vocabulary, files, where)
    from tfm_blocks.data.sentencepiece_tokenizer import SentencePieceTokenizer

    return SentencePieceTokenizer(vocabulary, files, where)


def is_published(path: Path) -> bool:
    """Return True if a file was written by a PublishedTokenizer."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(BEGIN)) == BEGIN
