"""The ids of a published vocabulary here: padding, begin and end of a sequence first, then the others in order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
MASK = "<mask>"  # of tokenizers that are learned for objectives that hide tokens
SENTINEL = re.compile(r"<extra_id_\d+>")  # of tokenizers that are learned for objective=span_corruption, as in T5
TAG = re.compile(r"<[!-;=?-~]+>")  # of tokenizers that are learned for a mix of corpora with tags
BOS, EOS = 1, 2
OTHERS = 3  # the first id after padding, begin and end


def sentinel(number: int) -> str:
    """Return the name of the token that stands for a span."""
    return f"<extra_id_{number}>"


@dataclass(frozen=True)
class Vocabulary:
    """A published vocabulary of `size` ids, with the ids that begin and end a sequence.

    A generated text ends at `eos`, which the data adds, or at an id of `stops`, such as the end of a turn. Padding has
    a new id without a row in any table of weights. If one id is both BOS and EOS, BOS has a new id
    too, which reads the row of the end. `source` is a separate vocabulary of sources.
    """

    size: int
    start: int
    eos: int
    stops: tuple[int, ...] = ()
    source: Vocabulary | None = None

    @cached_property
    def front(self) -> tuple[int, ...]:
        """Return the published ids that have the ids before OTHERS here, in their order."""
        return tuple(dict.fromkeys((self.start, self.eos)))

    @property
    def written_eos(self) -> int | list[int]:
        """Return the ids that end a text as config.json has them."""
        return [self.eos, *self.stops] if self.stops else self.eos

    @property
    def pad(self) -> int:
        """Return a published id for padding, which is masked."""
        return self.eos

    @property
    def first(self) -> int:
        """Return the first id with a row in the tables of weights."""
        return OTHERS - len(self.front)

    @property
    def size_here(self) -> int:
        return self.first + self.size

    def to_here(self, ids: Sequence[int]) -> list[int]:
        """Return our ids of published ids."""
        moved = {id: self.first + place for place, id in enumerate(self.front)}
        return [moved.get(id, OTHERS + id - sum(front < id for front in self.front)) for id in ids]

    def to_published(self, ids: Sequence[int]) -> list[int]:
        """Return the published ids of our ids; padding is left out."""
        moved = {1: self.start, 2: self.eos}
        published = []
        for id in filter(None, ids):
            place = id - OTHERS
            for front in sorted(self.front):
                place += place >= front
            published.append(moved.get(id, place))
        return published


@dataclass(frozen=True)
class Conventions:
    """How a model reads and writes texts, in the ids of this project. The defaults hold for models trained here.

    before, after: special tokens around every text; `after` does not include eos. of_targets: targets have them too.
    languages: the token of the sources' language in `before` or `after`, and the token in its place around targets.
    adds_eos: eos follows each source. adds_bos: bos precedes each prompt. refused: ids that outputs never contain.
    first: the forced first token of an output. last: an output of the maximum length is forced to end with eos.
    shortest, longest: the minimum of output tokens without eos and the maximum with eos, unless the search sets them.
    0 stands for none.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    of_targets: bool = True
    languages: tuple[int, ...] = ()
    adds_eos: bool = True
    adds_bos: bool = True
    refused: tuple[int, ...] = (0, 1)  # padding and bos
    first: int = 0
    last: bool = False
    shortest: int = 0
    longest: int = 0

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Conventions:
        """Return the conventions whose `vars` are the content of a JSON file. Raises ValueError."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in content.items()}
        for name, value in values.items():
            ids = value if isinstance(value, tuple) else (int(value),)
            if type(value) is not type(vars(cls())[name]) or any(type(id) is not int or id < 0 for id in ids):
                raise ValueError(f"conventions.{name} is damaged")
        if len(values.get("languages", ())) not in (0, 2):
            raise ValueError("conventions.languages is damaged")
        return cls(**values)

    @property
    def around_texts(self) -> Conventions:
        """Return the special tokens around texts, without the rules of outputs."""
        return Conventions(self.before, self.after, self.of_targets, self.languages, self.adds_eos, self.adds_bos)

    @property
    def around(self) -> tuple[int, ...]:
        """Return the special tokens around sources and targets, without eos."""
        return (*self.before, *self.after, *self.languages)

    @property
    def around_target(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the special tokens before and after a target, without eos."""
        if not self.of_targets:
            return (), ()
        other = {self.languages[0]: self.languages[1]} if self.languages else {}
        return tuple(other.get(id, id) for id in self.before), tuple(other.get(id, id) for id in self.after)

    def source(self, ids: Sequence[int]) -> list[int]:
        """Return the ids that an encoder reads for the ids of a text."""
        return [*ids, EOS] if self.adds_eos or not ids else list(ids)

    def prefix(self, ids: Sequence[int]) -> list[int]:
        """Return the first ids of an output that begins with the text of a target's ids; none if the text has none.

        They begin with the forced token, else with the tokens before a target, without the tokens after it.
        """
        before, text = self.around_target[0], self.text_of_target(ids)
        return [*((self.first,) if self.first else before), *text] if text else []

    def text_of_target(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the ids of a target without the special tokens around its text."""
        before, after = self.around_target
        return ids[len(before) : len(ids) - len(after)]

    def prompt(self, ids: Sequence[int]) -> list[int]:
        """Return the ids that a decoder continues for the ids of a text."""
        if self.adds_bos:
            return [BOS, *ids]
        return self.source(ids) if ids else [BOS]


class OwnVocabulary(Vocabulary):
    """The vocabulary of a tokenizer that a run learned: the ids are the same in both, and each has a row."""

    @cached_property
    def front(self) -> tuple[int, ...]:
        return ()

    @property
    def pad(self) -> int:
        return 0

    def to_here(self, ids: Sequence[int]) -> list[int]:
        return [*ids]

    to_published = to_here

    @property
    def first(self) -> int:
        return 0
