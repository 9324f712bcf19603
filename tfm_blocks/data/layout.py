"""Layouts: how the rows of a corpus become the inputs and labels of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tfm_blocks.data.corpus import CHUNK, Corpus
from tfm_blocks.data.labels import LabelCoder, number_rows
from tfm_blocks.data.noise import Flat, Masking
from tfm_blocks.data.objectives import NEXT_TOKEN, LabelSettings, MaskedSettings, ObjectiveSettings
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.language.spec import TARGET

PAD, BOS, EOS = Tokenizer.PAD, Tokenizer.BOS, Tokenizer.EOS
Lengths = npt.NDArray[np.int32]
SOURCE = "src"  # the column of questions
Rows = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Int64 ids of every input by name, right-padded with 0, and the label of each target position.

    A label of 0 is ignored: padding, or a position before the target begins. `kept_N` are the flat indices of the other
    labels, computed on the CPU because it would synchronise an accelerator. `values_NC` are the numbers that the
    outputs at these positions should have, if labels are not classes.
    """

    inputs: dict[str, Tensor]
    labels_BT: Tensor
    kept_N: Tensor
    rows: tuple[int, ...] = ()  # indices in the corpus, if a whole corpus is scored
    values_NC: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Copy to the device asynchronously."""
        return self._each(lambda ids: ids.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copy to page-locked memory; called by torch's DataLoader."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        inputs = {name: change(ids) for name, ids in self.inputs.items()}
        values_NC = None if self.values_NC is None else change(self.values_NC)
        kept_N = change(self.kept_N)
        return replace(self, inputs=inputs, labels_BT=change(self.labels_BT), kept_N=kept_N, values_NC=values_NC)


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

    @abstractmethod
    def labels_N(self, corpus: Corpus) -> Lengths:
        """Return the number of predicted tokens of every row."""

    def tokens_N(self, corpus: Corpus) -> Lengths:
        """Return the number of tokens of every row that `step_tokens` limits, in each epoch the same."""
        return self.labels_N(corpus)

    def drawn(self, seed: int, epoch: int) -> Layout:
        """Return the layout of an epoch, if the objective draws what it hides from the seed, the epoch and the row."""
        return self

    @property
    def evaluating(self) -> Layout:
        """Return the layout for validation and test."""
        return self

    @abstractmethod
    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        """Return the batch of these rows; `empty` sets all labels to 0, for an idle rank."""


class Sides(Layout):
    """Encoder-decoder layout: each source is x + eos, the target bos + y, and y + eos is predicted.

    Without eos in the tokenizer's conventions, a source is x, or eos if x has no tokens.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self.inputs = (*sources, TARGET)

    def widths_NC(self, corpus: Corpus) -> Lengths:
        lengths_NC = np.stack([corpus.lengths_N(name) for name in self.inputs], 1)
        lengths_NC[:, :-1] += corpus.conventions.adds_eos
        lengths_NC[:, -1] += 1
        return np.maximum(lengths_NC, 1)

    def labels_N(self, corpus: Corpus) -> Lengths:
        return corpus.lengths_N(TARGET) + 1

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        *sources, target = ([corpus.ids(name, int(row)) for row in rows] for name in self.inputs)
        if corpus.conventions.adds_eos:
            inputs = {name: _padded(ids, after=[EOS]) for name, ids in zip(self.inputs, sources, strict=False)}
        else:
            whole = [[ids if len(ids) else np.array([EOS]) for ids in rows] for rows in sources]
            inputs = {name: _padded(ids) for name, ids in zip(self.inputs, whole, strict=False)}
        inputs[TARGET] = _padded(target, before=[BOS])
        labels_BT = _padded(target, after=[EOS])
        return batch_of(inputs, labels_BT, empty=empty)


class OneSequence(Layout):
    """Decoder-only layout: one sequence x + eos + bos + y, of which y + eos is predicted; each source ends in eos."""

    inputs = (TARGET,)

    def widths_NC(self, corpus: Corpus) -> Lengths:
        widths_NC: Lengths = (corpus.lengths_NC.sum(1, keepdims=True) + len(corpus.columns)).astype(np.int32)
        return widths_NC

    def labels_N(self, corpus: Corpus) -> Lengths:
        return corpus.lengths_N(TARGET) + 1

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        sources = [name for name in corpus.columns if name != TARGET]
        prompts = [prompt([corpus.ids(name, int(row)) for name in sources]) for row in rows]
        targets = [corpus.ids(TARGET, int(row)).astype(np.int64) for row in rows]
        sequences = [np.concatenate((before, ids)) for before, ids in zip(prompts, targets, strict=True)]
        labels = [
            np.concatenate((np.zeros(len(before) - 1, np.int64), ids, [EOS]))
            for before, ids in zip(prompts, targets, strict=True)
        ]
        labels_BT = _padded(labels)
        return batch_of({TARGET: _padded(sequences)}, labels_BT, empty=empty)


class PlainText(Layout):
    """Language-model layout: bos and all tokens of a row but the last; every token of the row is predicted."""

    inputs = (TARGET,)

    def widths_NC(self, corpus: Corpus) -> Lengths:
        return corpus.lengths_NC

    def labels_N(self, corpus: Corpus) -> Lengths:
        return corpus.lengths_N(TARGET)

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        targets = [corpus.ids(TARGET, int(row)) for row in rows]
        labels_BT = _padded(targets)
        inputs = {TARGET: _padded([ids[:-1] for ids in targets], before=[BOS])}
        return batch_of(inputs, labels_BT, empty=empty)


class AtPositions(Layout):
    """Layout of a model with one input, which answers at positions of the question: x, without bos."""

    at_positions = True

    def __init__(self, input: str) -> None:
        self.inputs = (input,)

    def widths_NC(self, corpus: Corpus) -> Lengths:
        return corpus.lengths_N(SOURCE)[:, None]

    def labels_N(self, corpus: Corpus) -> Lengths:
        return corpus.lengths_N(TARGET)

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        ids_BT = _padded([corpus.ids(SOURCE, int(row)) for row in rows])
        labels_BT = torch.zeros_like(ids_BT)
        for labels_T, row in zip(labels_BT.numpy(), rows, strict=True):
            labels_T[corpus.positions(int(row))] = corpus.ids(TARGET, int(row))
        return batch_of({self.inputs[0]: ids_BT}, labels_BT, empty=empty)


class Appended(Layout):
    """Encoder-only layout: x + eos, then an empty position for each token of y, at which it is predicted."""

    at_positions = True
    EMPTY = BOS  # the decoder of other layouts also begins to predict at bos

    def __init__(self, input: str) -> None:
        self.inputs = (input,)

    def widths_NC(self, corpus: Corpus) -> Lengths:
        widths_NC: Lengths = corpus.lengths_NC.sum(1, dtype=np.int32, keepdims=True) + 1
        return widths_NC

    def labels_N(self, corpus: Corpus) -> Lengths:
        return corpus.lengths_N(TARGET)

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        pairs = [(corpus.ids(SOURCE, int(row)), corpus.ids(TARGET, int(row))) for row in rows]
        questions = [np.concatenate([source, [EOS], np.full(len(target), self.EMPTY)]) for source, target in pairs]
        labels = [np.concatenate([np.zeros(len(source) + 1, np.int64), target]) for source, target in pairs]
        return batch_of({self.inputs[0]: _padded(questions)}, _padded(labels), empty=empty)


class HiddenTokens(Layout):
    """Layout of objective=masked: the rows of a column, with some tokens hidden, which are predicted in their places.

    The rows of packed text are read as they are; other rows end in eos.
    """

    at_positions = True

    def __init__(self, input: str, column: str, settings: MaskedSettings, masking: Masking) -> None:
        self.inputs = (input,)
        self.column, self.settings, self.masking = column, settings, masking

    def drawn(self, seed: int, epoch: int) -> HiddenTokens:
        masking = replace(self.masking, draw=(seed, 0 if self.settings.static else epoch))
        return HiddenTokens(self.inputs[0], self.column, self.settings, masking)

    @property
    def evaluating(self) -> HiddenTokens:
        masking = replace(self.masking, rate=self.settings.eval_rate)
        return HiddenTokens(self.inputs[0], self.column, self.settings, masking)

    def widths_NC(self, corpus: Corpus) -> Lengths:
        return self.tokens_N(corpus)[:, None]

    def tokens_N(self, corpus: Corpus) -> Lengths:
        return np.maximum(corpus.lengths_N(self.column) + _adds_eos(corpus), 1)

    def labels_N(self, corpus: Corpus) -> Lengths:
        rows_N = np.arange(len(corpus))
        parts = (self._flat(corpus, rows_N[first : first + CHUNK]) for first in range(0, len(corpus), CHUNK))
        return np.concatenate([self.masking.labels_R(flat) for flat in parts]).astype(np.int32)

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        flat = self._flat(corpus, rows)
        hidden_L = self.masking.hidden_L(flat)
        ends = np.cumsum(np.bincount(flat.row_L))[:-1]
        read, labels = self.masking.read_L(flat, hidden_L), np.where(hidden_L, flat.ids_L, PAD)
        inputs = {self.inputs[0]: _padded(np.split(read, ends))}
        return batch_of(inputs, _padded(np.split(labels, ends)), empty=empty)

    def _flat(self, corpus: Corpus, rows: Rows) -> Flat:
        sequences = [corpus.ids(self.column, int(row)).astype(np.int64) for row in rows]
        eos = np.full(int(_adds_eos(corpus)), EOS)
        return Flat.of([np.append(ids, eos) if len(ids) else np.array([EOS]) for ids in sequences], np.asarray(rows))


class Labelled(Layout):
    """Layout of objective=label: the source, and its label at the first position, or of each word at its first token.

    A label that is not a class is marked by 1, and its numbers are `values_NC`.
    """

    at_positions = True

    def __init__(self, input: str, coder: LabelCoder) -> None:
        self.inputs = (input,)
        self.coder = coder

    def widths_NC(self, corpus: Corpus) -> Lengths:
        return self.tokens_N(corpus)[:, None]

    def tokens_N(self, corpus: Corpus) -> Lengths:
        return np.maximum(corpus.lengths_N(SOURCE) + corpus.conventions.adds_eos, 1)

    def labels_N(self, corpus: Corpus) -> Lengths:
        words = self.coder.predict == "words"
        return corpus.lengths_N(TARGET) if words else np.ones(len(corpus), np.int32)

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        sources = [corpus.conventions.source(corpus.ids(SOURCE, int(row)).tolist()) for row in rows]
        ids_BT = _padded([np.asarray(ids) for ids in sources])
        labels_BT, labels = torch.zeros_like(ids_BT), [corpus.ids(TARGET, int(row)).tolist() for row in rows]
        if self.coder.predict in ("several", "number"):
            labels_BT[:, 0] = 1
            values_NC = torch.from_numpy(number_rows(self.coder, [] if empty else labels))
            return replace(batch_of({self.inputs[0]: ids_BT}, labels_BT, empty=empty), values_NC=values_NC)
        for place, (row, ids) in enumerate(zip(rows, labels, strict=True)):
            positions = corpus.positions(int(row)).tolist() if corpus.positional else [0]
            labels_BT[place, positions] = torch.tensor(ids)
        return batch_of({self.inputs[0]: ids_BT}, labels_BT, empty=empty)


def _adds_eos(corpus: Corpus) -> bool:
    """Return True if eos follows the ids of a row; the documents of packed text, which has one column, have theirs."""
    return corpus.conventions.adds_eos and len(corpus.columns) > 1


def _hidden_tokens(corpus: Corpus, inputs: Sequence[str], settings: MaskedSettings) -> HiddenTokens:
    tokenizer, (input,) = corpus.tokenizer, inputs
    assert tokenizer.mask is not None, "the preparation of the data expects it"
    plain_V = np.ones(tokenizer.size, bool)
    plain_V[list(tokenizer.special_ids)] = False
    begins_V = tokenizer.word_begins() if settings.whole_words else None
    column = input if input in corpus.columns else TARGET
    masking = Masking(settings.rate, settings.mask, settings.random, tokenizer.mask, plain_V, begins_V)
    return HiddenTokens(input, column, settings, masking)


def layout_of(corpus: Corpus, inputs: Sequence[str], objective: ObjectiveSettings = NEXT_TOKEN) -> Layout:
    """Return the layout for a model with these inputs, a corpus and an objective."""
    if isinstance(objective, MaskedSettings):
        return _hidden_tokens(corpus, inputs, objective)
    if isinstance(objective, LabelSettings):
        assert corpus.labels is not None, "the check of the run expects data=labels"
        return Labelled(inputs[0], corpus.labels)
    sources = [name for name in inputs if name != TARGET]
    if sources and TARGET in inputs:
        return Sides(sources)
    if corpus.positional:
        return AtPositions(*inputs)
    if sources:
        return Appended(*sources)
    return OneSequence() if len(corpus.columns) > 1 else PlainText()


def prompt(sources: Sequence[Sequence[int] | npt.NDArray[np.integer]]) -> npt.NDArray[np.int64]:
    """Return the ids before the target in a decoder-only sequence: each source with eos, then bos."""
    parts: list[npt.NDArray[np.int64]] = [np.append(np.asarray(ids, np.int64), EOS) for ids in sources]
    return np.concatenate([*parts, np.array([BOS])])


def _padded(
    rows: Sequence[npt.NDArray[np.integer]], *, before: Sequence[int] = (), after: Sequence[int] = ()
) -> Tensor:
    """Pad rows of ids, with special ids before or after each row: ids_BN."""
    width = max(map(len, rows)) + len(before) + len(after)
    ids_BN = np.full((len(rows), width), PAD, dtype=np.int64)
    ids_BN[:, : len(before)] = before
    for row, ids in zip(ids_BN, rows, strict=True):
        end = len(before) + len(ids)
        row[len(before) : end] = ids
        row[end : end + len(after)] = after
    return torch.from_numpy(ids_BN)
