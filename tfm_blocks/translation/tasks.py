"""Encoded inputs of a translator, and their batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfm_blocks.errors import counted, is_utf8, shown

Text = str | Sequence[str] | Mapping[str, str]
"""A sentence: its text, or the texts of several sources, in their order or by name."""


@dataclass(frozen=True)
class Task:
    """An output to generate, for the sentence with index `place`; `number` names it in errors and seeds its samples.

    `sources` are the ids of each source with eos. `before` are the ids before the output, with bos at the end or the
    start. `prefix` are the forced first ids of the output. `tokens` is the number of source tokens, eos included.
    `prompt` are the ids of the text that the output continues.
    """

    place: int
    number: int
    sources: list[list[int]]
    before: list[int]
    prefix: list[int]
    tokens: int
    prompt: Sequence[int] = ()

    @property
    def begin(self) -> tuple[int, int]:
        """Return the lengths of prompt and prefix, which are equal within a batch."""
        return len(self.before), len(self.prefix)


def batches_of(tasks: Iterable[Task], batch_tokens: int) -> Iterator[list[Task]]:
    """Yield batches of tasks with equal `begin`, short ones first: up to `batch_tokens` padded tokens or one task."""
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
    """Return the texts of each sentence in the order of `names`. Raises TypeError for a wrong type or number."""
    if isinstance(sentences, str):
        raise TypeError("sentences must be a list of texts, not a string")
    rows = []
    for number, sentence in enumerate(sentences, 1):
        if isinstance(sentence, Mapping):
            if set(sentence) != set(names):
                keys = ", ".join(sentence) or "nothing"
                raise TypeError(f"sentence {number} has {keys}, but the model reads {', '.join(names)}")
            texts = [sentence[name] for name in names]
        else:
            texts = [sentence] if isinstance(sentence, str) or not isinstance(sentence, Sequence) else list(sentence)
        if len(texts) != len(names):
            count = counted(len(texts), "text")
            raise TypeError(f"sentence {number} has {count}, but the model reads {', '.join(names)}")
        rows.append(tuple(plain_texts(texts, f"the texts of sentence {number}")))
    return rows


def plain_texts(texts: Sequence[object], name: str) -> list[str]:
    """Return the texts as a list. Raises TypeError if one is not a string, and ValueError for a lone surrogate."""
    if isinstance(texts, str):
        raise TypeError(f"{name} must be a list of texts, not a string")
    checked = []
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise TypeError(f"{name} must be texts, but number {number} is {type(text).__name__}")
        if not is_utf8(text):
            raise ValueError(f"{name} must be valid Unicode, but number {number} is {shown(text)}")
        checked.append(text)
    return checked
