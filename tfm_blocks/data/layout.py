"""Layouts: how the rows of a corpus become the inputs and labels of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tfm_blocks.data.corpus import POSITIONS, Corpus
from tfm_blocks.data.plan import Lengths, Rows
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.language.spec import TARGET

PAD, BOS, EOS = Tokenizer.PAD, Tokenizer.BOS, Tokenizer.EOS
SOURCE = "src"  # the column of questions
Ids = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Batch:
    """Int64 ids of every input by name, right-padded with 0, and the label of each target position.

    A label of 0 is ignored: padding, or a position before the target begins. `kept_N` are the flat indices of the other
    labels, computed on the CPU because it would synchronise an accelerator. `values_NC` are the numbers that the
    outputs at these positions should have, if labels are not classes.

    `uniforms_N` are uniform in [0, 1), for an objective that samples tokens at these positions.

    If an objective has weights, `weights_B` are factors of the losses of each row, and the loss is a mean over
    `tokens_B` tokens of each row instead of the labels.
    """

    inputs: dict[str, Tensor]
    labels_BT: Tensor
    kept_N: Tensor
    rows: tuple[int, ...] = ()  # indices in the corpus, if a whole corpus is scored
    values_NC: Tensor | None = None
    weights_B: Tensor | None = None
    tokens_B: Tensor | None = None
    uniforms_N: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the loss is a mean over."""
        return len(self.kept_N) if self.tokens_B is None else int(self.tokens_B.sum())

    @property
    def counts_B(self) -> Tensor:
        """Return the number of tokens of each row that the loss is a mean over."""
        return (self.labels_BT != 0).sum(1) if self.tokens_B is None else self.tokens_B

    @property
    def weights_N(self) -> Tensor | None:
        """Return the factor of the loss of each label, or None if all are 1."""
        return None if self.weights_B is None else self.weights_B[self.kept_N // self.labels_BT.shape[1]]

    def kept(self, x_BT: Tensor) -> Tensor:
        """Return what `x_BT` has at the labels: x_BT -> x_N, x_BTD -> x_ND."""
        return x_BT.flatten(0, 1).index_select(0, self.kept_N)

    def to(self, device: torch.device) -> Batch:
        """Copy to the device asynchronously."""
        return self._each(lambda ids: ids.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copy to page-locked memory; called by torch's DataLoader."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        inputs = {name: change(ids) for name, ids in self.inputs.items()}
        others: dict[str, Any] = {name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, inputs=inputs, **others)


def batch_of(inputs: dict[str, Tensor], labels_BT: Tensor, *, empty: bool = False) -> Batch:
    """Return the batch; `empty` sets all labels to 0, for an idle rank."""
    labels_BT = torch.zeros_like(labels_BT) if empty else labels_BT
    return Batch(inputs, labels_BT, labels_BT.flatten().nonzero()[:, 0])


class Layout(ABC):
    """Maps the columns of a corpus to the inputs of a model. `inputs` names them, the target last.

    With `at_positions` the model predicts the target at positions of its input, in place of generating it.
    """

    inputs: tuple[str, ...]
    at_positions = False

    @abstractmethod
    def widths_NC(self, corpus: Corpus) -> Lengths:
        """Return the number of tokens of every row in each input."""

    def labels_N(self, corpus: Corpus) -> Lengths:
        """Return the number of predicted tokens of every row."""
        return corpus.lengths_N(TARGET)

    def tokens_N(self, corpus: Corpus) -> Lengths:
        """Return the number of tokens of every row that `step_tokens` limits, in each epoch the same."""
        return self.labels_N(corpus)

    def longest_C(self, corpus: Corpus) -> Lengths:
        """Return the largest number of tokens of a row in each input, over all epochs."""
        longest_C: Lengths = self.widths_NC(corpus).max(0)
        return longest_C

    def drawn(self, seed: int, epoch: int) -> Self:
        """Return the layout of an epoch, if the objective draws what it hides from the seed, the epoch and the row."""
        return self

    def for_step(self, corpus: Corpus, rows: Rows) -> Self:
        """Return the layout of a step with these rows, whose tokens a loss may be a mean over."""
        return self

    @property
    def evaluating(self) -> Self:
        """Return the layout for validation and test."""
        return self

    @abstractmethod
    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        """Return the batch of these rows; `empty` sets all labels to 0, for an idle rank."""


class Pairs(Layout):
    """Layout of sources and a target y; the model predicts y + eos."""

    @abstractmethod
    def columns_of(self, corpus: Corpus) -> Sequence[str]:
        """Return the columns that are read, the target last."""

    @abstractmethod
    def widths_of(self, lengths_NC: Lengths) -> Lengths:
        """Return the number of tokens in each input for these lengths of the columns."""

    @abstractmethod
    def join(self, columns: Sequence[Sequence[Ids]], *, empty: bool = False) -> Batch:
        """Return the batch of these rows of each column."""

    def widths_NC(self, corpus: Corpus) -> Lengths:
        return self.widths_of(np.stack([corpus.lengths_N(name) for name in self.columns_of(corpus)], 1))

    def labels_N(self, corpus: Corpus) -> Lengths:
        return corpus.lengths_N(TARGET) + 1

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        return self.join([corpus.sequences(name, rows) for name in self.columns_of(corpus)], empty=empty)


class Sides(Pairs):
    """Encoder-decoder layout: each source is x + eos, the target bos + y.

    Without eos in the tokenizer's conventions, a source is x, or eos if x has no tokens.
    """

    def __init__(self, sources: Sequence[str], *, adds_eos: bool = True) -> None:
        self.inputs, self.adds_eos = (*sources, TARGET), adds_eos

    def columns_of(self, corpus: Corpus) -> Sequence[str]:
        return self.inputs

    def widths_of(self, lengths_NC: Lengths) -> Lengths:
        added_C = np.array([self.adds_eos] * (len(self.inputs) - 1) + [True])
        widths_NC: Lengths = np.maximum(lengths_NC + added_C, 1).astype(np.int32)
        return widths_NC

    def join(self, columns: Sequence[Sequence[Ids]], *, empty: bool = False) -> Batch:
        *sources, target = columns
        if self.adds_eos:
            inputs = {name: padded_rows(ids, after=[EOS]) for name, ids in zip(self.inputs, sources, strict=False)}
        else:
            whole = [[ids if len(ids) else np.array([EOS]) for ids in rows] for rows in sources]
            inputs = {name: padded_rows(ids) for name, ids in zip(self.inputs, whole, strict=False)}
        inputs[TARGET] = padded_rows(target, before=[BOS])
        return batch_of(inputs, padded_rows(target, after=[EOS]), empty=empty)


class OneSequence(Pairs):
    """Decoder-only layout: one sequence x + eos + bos + y; each source ends in eos."""

    inputs = (TARGET,)

    def columns_of(self, corpus: Corpus) -> Sequence[str]:
        return [*prompt_columns(corpus.columns), TARGET]

    def widths_of(self, lengths_NC: Lengths) -> Lengths:
        widths_NC: Lengths = (lengths_NC.sum(1, keepdims=True) + lengths_NC.shape[1]).astype(np.int32)
        return widths_NC

    def join(self, columns: Sequence[Sequence[Ids]], *, empty: bool = False) -> Batch:
        *sources, targets = columns
        prompts = [prompt(parts) for parts in zip(*sources, strict=True)]
        pairs = list(zip(prompts, targets, strict=True))
        labels = [np.concatenate((np.zeros(len(before) - 1, np.int64), ids, [EOS])) for before, ids in pairs]
        inputs = {TARGET: padded_rows([np.concatenate(pair) for pair in pairs])}
        return batch_of(inputs, padded_rows(labels), empty=empty)


class PlainText(Layout):
    """Language-model layout: bos and all tokens of a row but the last; every token of the row but bos is predicted.

    A row contains bos only if a published tokenizer begins texts with it.
    """

    inputs = (TARGET,)

    def widths_NC(self, corpus: Corpus) -> Lengths:
        return corpus.lengths_NC

    def labels_N(self, corpus: Corpus) -> Lengths:
        return corpus.lengths_N(TARGET) - corpus.bos_N

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        targets = corpus.sequences(TARGET, rows)
        labels_BT = padded_rows(targets)
        labels_BT[labels_BT == BOS] = PAD
        inputs = {TARGET: padded_rows([ids[:-1] for ids in targets], before=[BOS])}
        return batch_of(inputs, labels_BT, empty=empty)


class Answering(Layout):
    """Layout of a model with one input, which answers at positions of this input."""

    at_positions = True

    def __init__(self, input: str) -> None:
        self.inputs = (input,)


class AtPositions(Answering):
    """Layout of answers at positions of the question: x, without bos."""

    def widths_NC(self, corpus: Corpus) -> Lengths:
        return corpus.lengths_N(SOURCE)[:, None]

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        ids_BT = padded_rows(corpus.sequences(SOURCE, rows))
        labels_BT = torch.zeros_like(ids_BT)
        for labels_T, row in zip(labels_BT.numpy(), rows, strict=True):
            labels_T[corpus.ids(POSITIONS, int(row))] = corpus.ids(TARGET, int(row))
        return batch_of({self.inputs[0]: ids_BT}, labels_BT, empty=empty)


class Appended(Answering):
    """Encoder-only layout: x + eos, then an empty position for each token of y, at which it is predicted."""

    EMPTY = BOS  # the decoder of other layouts also begins to predict at bos

    def widths_NC(self, corpus: Corpus) -> Lengths:
        widths_NC: Lengths = corpus.lengths_NC.sum(1, dtype=np.int32, keepdims=True) + 1
        return widths_NC

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        pairs = [(corpus.ids(SOURCE, int(row)), corpus.ids(TARGET, int(row))) for row in rows]
        questions = [np.concatenate([source, [EOS], np.full(len(target), self.EMPTY)]) for source, target in pairs]
        labels = [np.concatenate([np.zeros(len(source) + 1, np.int64), target]) for source, target in pairs]
        return batch_of({self.inputs[0]: padded_rows(questions)}, padded_rows(labels), empty=empty)


def prompt_columns(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns before the target in one sequence."""
    return tuple(name for name in columns if name != TARGET) if TARGET in columns else ()


def prompt(sources: Sequence[Sequence[int] | npt.NDArray[np.integer]]) -> npt.NDArray[np.int64]:
    """Return the ids before the target in a decoder-only sequence: each source with eos, then bos."""
    parts: list[npt.NDArray[np.int64]] = [np.append(np.asarray(ids, np.int64), EOS) for ids in sources]
    return np.concatenate([*parts, np.array([BOS])])


def padded_rows(
    rows: Sequence[Sequence[int] | Ids], *, before: Sequence[int] = (), after: Sequence[int] = ()
) -> Tensor:
    """Pad rows of ids, with special ids before or after each row: ids_BN."""
    start = len(before)
    ids_BN = np.full((len(rows), start + max(map(len, rows)) + len(after)), PAD, dtype=np.int64)
    ids_BN[:, :start] = before
    for row, ids in zip(ids_BN, rows, strict=True):
        end = start + len(ids)
        row[start:end] = ids
        row[end : end + len(after)] = after
    return torch.from_numpy(ids_BN)
