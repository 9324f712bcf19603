"""Run the texts of requests through an encoder, in batches as a translator does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from tfm_blocks.network.graph import evaluating
from tfm_blocks.translation.classify import Classifier
from tfm_blocks.translation.encoder import Encoder, Pooling
from tfm_blocks.translation.fill import Filler
from tfm_blocks.translation.tasks import Task, batches_of
from tfm_blocks.translation.translator import TaskWatch


@dataclass(frozen=True)
class Reading:
    """The work on each text of a request. Requests with equal readings can share a batch."""

    action: Literal["classify", "embed", "fill"]
    pooling: Pooling = "mean"
    top: int = 1
    steps: int = 1
    beam: ClassVar[int] = 1

    def most(self, tokens: int, of_model: int = 0) -> int:
        """Return the maximum number of tokens that the steps after the first read, for a text of `tokens` tokens."""
        return tokens * (min(self.steps, tokens) - 1)


@dataclass(frozen=True)
class LineTask(Task):
    """A text to read, and the positions of its labels."""

    text: str = ""
    places: Sequence[int] = ()


class TextReader:
    """An encoder with the methods of a translator that a batcher calls."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.network, self.tokenizer = encoder, encoder.network, encoder.tokenizer
        self.sources = encoder.inputs

    def tasks(self, texts: Sequence[str], action: str) -> list[LineTask]:
        """Return the task of each text. Raises RunError for an unsuitable run, and DataError for an unsuitable text."""
        encoder, places = self.encoder, [[0] for _ in texts]
        if action == "classify":
            if not isinstance(encoder, Classifier):
                Classifier.refuse()
            rows, places = encoder.encode_labelled(texts, name="texts")
        elif action == "fill":
            if not isinstance(encoder, Filler):
                Filler.refuse()
            rows = encoder.encode_masked(texts, name="texts")
        else:
            rows = encoder.encode(texts, name="texts")
        return [
            LineTask(place, place + 1, [ids], [], [], len(ids), text=text, places=positions)
            for place, (text, ids, positions) in enumerate(zip(texts, rows, places, strict=True))
        ]

    def run(
        self, tasks: Iterable[Task], reading: Reading, *, batch_tokens: int, watch: TaskWatch
    ) -> Iterator[tuple[Task, list[Any]]]:
        """Yield each task with a list of its result as JSON, or an empty list if its outputs are not finite.

        Before each batch, and before each further step of `fill`, `watch` gets each task of the batch. If it returns
        False, the task ends: without a result if all tasks of its batch have ended, else with an undefined one.
        """
        for batch in batches_of(tasks, batch_tokens):
            lines = [task for task in batch if isinstance(task, LineTask) and watch(task, ())]
            if not lines:
                continue
            with evaluating(self.network), torch.inference_mode():
                results = list(self._results(lines, reading, watch))
            for task, result in zip(lines, results, strict=bool(results)):
                yield task, [result] if _is_finite(result) else []

    def _results(self, lines: Sequence[LineTask], reading: Reading, watch: TaskWatch) -> Iterator[Any]:
        """Yield the result of each line as JSON, or nothing if all their tasks have ended."""
        encoder, rows = self.encoder, [line.sources[0] for line in lines]
        if isinstance(encoder, Classifier) and reading.action == "classify":
            for one in encoder.labels(rows, [line.places for line in lines]):
                yield one.to_json(encoder.coder)
        elif isinstance(encoder, Filler) and reading.action == "fill":
            texts = [line.text for line in lines]
            for filled in encoder.filled(
                rows, texts, reading.top, reading.steps, lambda: True in [watch(line, ()) for line in lines]
            ):
                yield filled.to_json()
        else:
            yield from encoder.vectors(rows, reading.pooling).tolist()


def _is_finite(result: Any) -> bool:
    """Return True if all numbers of a JSON value are finite."""
    if isinstance(result, dict | list):
        return all(map(_is_finite, result.values() if isinstance(result, dict) else result))
    return not isinstance(result, float) or math.isfinite(result)
