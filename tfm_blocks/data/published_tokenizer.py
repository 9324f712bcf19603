"""Tokenizers of published models: the files of their folder, and the order of the ids here.

The names of the files are a closed list, and no file keeps a key that names code.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from base64 import b64encode
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Pieces

from tfm_blocks.data.tokenizer import MASK, SPECIAL, Tokenizer, shown_bytes
from tfm_blocks.data.tokenizer_format import refusing_damage
from tfm_blocks.data.vocabulary import OTHERS, Conventions, Vocabulary, sentinel
from tfm_blocks.errors import DataError, Problem, RunError, shown
from tfm_blocks.language.spec import TARGET

KEY = "published"
FAST = "tokenizer.json"
NO_CONVENTIONS = Conventions()
PAIR = ("source.spm", "target.spm", "vocab.json")  # Marian: a model for each side, and the ids of the subwords of both
TARGET_IDS = "target_vocab.json"  # Marian with separate vocabularies: the ids of the target's subwords
SINGLE = ("spiece.model", "tokenizer.model")  # T5, Llama
CONFIG = "tokenizer_config.json"
COMPANIONS = (CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")  # export restores them
NAMES = (FAST, *PAIR, TARGET_IDS, *SINGLE, *COMPANIONS)
MASKS = (MASK, "[MASK]", "<|mask|>")  # usual names
SETTINGS = COMPANIONS[:2]  # files whose keys are arguments of transformers
CODE = re.compile(
    "_?auto_(map|class)|custom_(pipelines|generate)|trust_remote_code|code_revision"
    "|_?(attn|experts)_implementation(_internal)?|kernel_config|use_kernels|allow_all_kernels"
)
"""Matches the keys with which transformers loads code from a folder or a hub."""


class PublishedTokenizer(Tokenizer):
    """The tokenizer of a published model, with the ids of `Vocabulary`.

    `files` are the contents of its files by name. Special tokens that are written in a text are matched. `conventions`
    has the special tokens that it adds around a text.

    `names` has the published id of each subword, and `special` those that can begin or end a sequence. `largest` is
    the largest id without added tokens, which can have ids beyond the vocabulary of the model. `published_special` are
    the published ids that stand for no text.
    """

    lossless = False  # it can normalise its text, or lack characters
    encodes_bos = True  # as a special token around or in a text
    names: dict[str, int]
    largest: int
    special: Mapping[str, int]
    published_special: frozenset[int]

    def __init__(
        self,
        vocabulary: Vocabulary,
        files: Mapping[str, bytes],
        where: str = "tokenizer",
        conventions: Conventions = NO_CONVENTIONS,
    ) -> None:
        self.vocabulary, self.files, self.conventions, self.column = vocabulary, dict(files), conventions, "src"
        with refusing_damage(where):
            for name in self.files:
                if name not in NAMES:
                    raise ValueError(f"{shown(name)} is not the name of a file of a tokenizer")
                if name.endswith((".json", ".jinja")):
                    self.files[name].decode("utf-8")
                if name in SETTINGS and (keys := without_code(self.files[name])[1]):
                    raise ValueError(f"{name} has {', '.join(keys)}, which names code")
            self.config = dict(json.loads(self.files.get(CONFIG, b"{}")))
            self.open()
        if self.largest >= vocabulary.size:
            rule = f"has the id {self.largest}, but the vocabulary of the model has {vocabulary.size} ids"
            raise RunError(Problem(where, rule, help="use the tokenizer of this model"))
        if max(*conventions.around, *conventions.refused, conventions.first, 0) >= self.size:
            raise RunError(Problem(where, f"has conventions with ids above {self.size - 1}", help="repeat the import"))
        self._beyond = {id: name for name, id in self.names.items() if id >= vocabulary.size}

    @abstractmethod
    def open(self) -> None:
        """Read the files."""

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
        arguments = self.vocabulary, self.files, "tokenizer", self.conventions
        return type(self), arguments, {"source": self.source, "column": self.column}

    def of(self, column: str) -> Tokenizer:
        if self.source is not None and column != TARGET:
            return self.source.of(column)
        other = copy(self)
        other.column = column
        return other

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
        return stored_text(self.vocabulary, self.files, self.conventions)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        around, refused = self.conventions.around, self.conventions.refused
        unknown = () if self.unknown is None else (self.unknown,)
        special = self.vocabulary.to_here([id for id in self.published_special if id < self.vocabulary.size])
        return frozenset((*range(self.vocabulary.first), self.BOS, self.EOS, *around, *refused, *unknown, *special))

    @cached_property
    def mask(self) -> int | None:
        """Return the id of the mask token that the files name, else of a token with a usual name."""
        maps = [json.loads(self.files.get(name, b"{}")) for name in SETTINGS]
        named = [
            value.get("content") if isinstance(value, dict) else value for value in (m.get("mask_token") for m in maps)
        ]
        id = next((self.names[name] for name in (*named, *MASKS) if name in self.names), None)
        return self.vocabulary.to_here([id])[0] if id is not None and id in self.published_special else None

    def encode_masked(self, text: str) -> list[int]:
        assert self.mask is not None, "the tokenizer has a mask"
        return self.encode(text.replace(MASK, self.piece(self.mask)))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with refusing_damage("tokenizer", "cannot encode this text"):
            rows = self.published_ids(texts)
        for id in (id for ids in rows for id in ids if id in self._beyond) if self._beyond else ():
            rule = f"has the token {self._beyond[id]} with the id {id}, but the model has {self.vocabulary.size} ids"
            raise DataError(Problem("text", rule, help="remove the token from the text"))
        before, after = self.conventions.before, self.conventions.after
        if self.column == TARGET:
            before, after = self.conventions.around_target
        return [[*before, *self.vocabulary.to_here(ids), *after] for ids in rows]

    @cached_property
    def unknown(self) -> int | None:
        return None if self.published_unknown is None else self.vocabulary.to_here([self.published_unknown])[0]

    def _decode(self, ids: Sequence[int]) -> str:
        around = {self.BOS, self.EOS, *self.conventions.around}
        with refusing_damage("tokenizer", "cannot decode these ids"):
            return self.text_of(self.vocabulary.to_published([id for id in ids if id not in around]))

    def piece(self, id: int) -> str:
        return self._subwords[id]

    @cached_property
    def _target_tags(self) -> dict[str, int]:
        """Nothing, because special tokens are matched in each text."""
        return {}

    @cached_property
    def _is_byte_level(self) -> bool:
        """Return True if the characters of subwords stand for bytes."""
        return "ByteLevel" in json.dumps(json.loads(self.files.get(FAST, b"{}")).get("decoder"))

    def shown_piece(self, id: int) -> str:
        piece = shown_bytes(self.piece(id)) if self._is_byte_level else self.piece(id)
        return piece.replace("\n", "⏎").replace("<0x0A>", "⏎")


def stored_text(vocabulary: Vocabulary, files: Mapping[str, bytes], conventions: Conventions = NO_CONVENTIONS) -> str:
    """Return a tokenizer as JSON: the vocabulary, the conventions, and the files, in base64 unless they are JSON.

    Raises UnicodeDecodeError for JSON that is not UTF-8.
    """
    texts = {
        name: content.decode() if name.endswith(".json") else b64encode(content).decode()
        for name, content in files.items()
    }
    ids = [vocabulary.size, vocabulary.start, vocabulary.eos, *vocabulary.stops]
    stored = {name: value for name, value in vars(conventions).items() if value or name != "languages"}  # as before it
    return json.dumps({KEY: ids, "files": texts, "conventions": stored}, ensure_ascii=False)


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


class SentinelTokenizer(Tokenizer):
    """A learned tokenizer for which <extra_id_0>, <extra_id_1>, … in a text are sentinels.

    A sentinel stands for a span with the space before it, as in the training of objective=span_corruption.
    """

    @cached_property
    def _marks(self) -> dict[str, int]:
        return {sentinel(number): id for number, id in enumerate(self.sentinels)}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode_marked(text, self._marks) for text in texts]

    def _decode(self, ids: Sequence[int]) -> str:
        names = {id: name for name, id in self._marks.items()}
        places = [place for place, id in enumerate(ids) if id in names]
        text = super()._decode(ids[: places[0]] if places else ids)
        for place, end in zip(places, [*places, len(ids)][1:], strict=True):
            text += f"{' ' if text else ''}{names[ids[place]]}"
            text += self._continued.decode(list(ids[place + 1 : end]), skip_special_tokens=True)
        return text


def with_sentinels(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer that reads sentinels in a text. A published tokenizer does so by itself."""
    if isinstance(tokenizer, PublishedTokenizer):
        return tokenizer
    return SentinelTokenizer(Pieces.from_str(tokenizer.text))
