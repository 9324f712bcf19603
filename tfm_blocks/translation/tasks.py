"""What a translator is asked for, encoded, and which of it is computed together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Text = str | Sequence[str] | Mapping[str, str]
"""A sentence: its text, or the texts of several sources, in their order or by name."""


@dataclass(frozen=True)
class Task:
    """One output to make, of the sentence at `place`.

    `sources` are the ids of each source with eos; `before` is what stands before the output, bos last or at its begin;
    `prefix` is how the output begins; `tokens` are those of the sentence, eos included.
    """

    place: int
    sources: list[list[int]]
    before: list[int]
    prefix: list[int]
    tokens: int

    @property
    def begin(self) -> tuple[int, int]:
        """How much is read before the first token is chosen: in a batch as much of each."""
        return len(self.before), len(self.prefix)


def batches_of(tasks: Iterable[Task], batch_tokens: int) -> Iterator[list[Task]]:
    """Tasks that begin alike, from short to long, each batch at most `batch_tokens` with padding, or one task."""
    batch: list[Task] = []
    for task in sorted(tasks, key=lambda task: (task.begin, task.tokens)):
        full = (len(batch) + 1) * task.tokens > batch_tokens
        if batch and (full or task.begin != batch[0].begin):
            yield batch
            batch = []
        batch.append(task)
    if batch:
        yield batch


def texts_of(sentences: Iterable[Text], names: Sequence[str]) -> list[tuple[str, ...]]:
    """The texts of each sentence in the order of `names`. Raises TypeError for what is no text or not one for each."""
    if isinstance(sentences, str):
        raise TypeError("sentences are a list of texts, not one string")
    return [_texts_of(one, number, names) for number, one in enumerate(sentences, 1)]


def _texts_of(sentence: Text, number: int, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(sentence, Mapping):
        if set(sentence) != set(names):
            given = ", ".join(sentence) or "nothing"
            raise TypeError(f"sentence {number} has {given}, but the model reads {', '.join(names)}")
        texts = [sentence[name] for name in names]
    else:
        texts = [sentence] if isinstance(sentence, str) or not isinstance(sentence, Sequence) else list(sentence)
    if len(texts) != len(names):
        raise TypeError(f"sentence {number} has {len(texts)} texts, but the model reads {', '.join(names)}")
    return tuple(plain_texts(texts, f"the texts of sentence {number}"))


def plain_texts(texts: Sequence[object], what: str) -> list[str]:
    """The texts as they are. Raises TypeError where one is none."""
    if isinstance(texts, str):
        raise TypeError(f"{what} are a list of texts, not one string")
    found = []
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise TypeError(f"{what} are texts, but number {number} is {type(text).__name__}")
        found.append(text)
    return found
