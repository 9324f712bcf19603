"""The ids of a published vocabulary here: padding, begin and end of a sequence first, then the others in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

OTHERS = 3  # the first id after padding, begin and end


@dataclass(frozen=True)
class Vocabulary:
    """A published vocabulary of `size` ids, with the ids that begin and end a sequence.

    A generated text ends at `eos`, which the data adds, or at an id of `stops`, such as the end of a turn. Padding has
    a new id without a row in any table of weights. If one id both begins and ends sequences, the begin has a new id
    too, which reads the row of the end.
    """

    size: int
    start: int
    eos: int
    stops: tuple[int, ...] = ()

    @cached_property
    def front(self) -> tuple[int, ...]:
        """Return the published ids that have the ids before OTHERS here, in their order."""
        return tuple(dict.fromkeys((self.start, self.eos)))

    @property
    def written_eos(self) -> int | list[int]:
        """Return the ids that end a text as config.json has them."""
        return [self.eos, *self.stops] if self.stops else self.eos

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
        return [moved[id] if id in moved else self._published(id - OTHERS) for id in ids if id]

    def _published(self, place: int) -> int:
        for id in sorted(self.front):
            place += place >= id
        return place


class OwnVocabulary(Vocabulary):
    """The vocabulary of a tokenizer that a run learned: the ids are the same in both, and each has a row."""

    @cached_property
    def front(self) -> tuple[int, ...]:
        return ()

    @property
    def first(self) -> int:
        return 0
