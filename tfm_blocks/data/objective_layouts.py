"""Layouts of objectives: rows in which tokens are hidden, noisy pairs, and labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Self

import numpy as np
import torch

from tfm_blocks.data.corpus import POSITIONS, Corpus
from tfm_blocks.data.encoding import CHUNK_SIZE
from tfm_blocks.data.labels import LabelCoder
from tfm_blocks.data.layout import (
    EOS,
    PAD,
    SOURCE,
    Answering,
    Appended,
    AtPositions,
    Batch,
    Layout,
    OneSequence,
    Pairs,
    PlainText,
    Sides,
    batch_of,
    padded_rows,
    prompt,
    prompt_columns,
)
from tfm_blocks.data.noise import SAMPLE, Bools, Flat, Hiding, Integers, Noise
from tfm_blocks.data.objectives import (
    NEXT_TOKEN,
    LabelSettings,
    MaskedDiffusionSettings,
    ObjectiveSettings,
    ReplacedTokenSettings,
)
from tfm_blocks.data.pair_noise import PairNoise
from tfm_blocks.data.plan import Lengths, Rows
from tfm_blocks.language.spec import TARGET


class Noisy(Layout):
    """Layout of an objective that draws what it does to the rows of a column."""

    noise: Noise
    column: str

    def drawn(self, seed: int, epoch: int) -> Self:
        return self._with(self.noise.drawn(seed, epoch))

    @property
    def evaluating(self) -> Self:
        return self._with(self.noise.evaluating)

    def _with(self, noise: Noise) -> Self:
        other = copy(self)
        other.noise = noise
        return other

    def adds_eos(self, corpus: Corpus) -> bool:
        """Return True if eos follows the ids of a row."""
        return False

    def flat(self, corpus: Corpus, rows: Rows) -> Flat:
        """Return the ids of these rows, with eos if `adds_eos` is true or a row has no tokens."""
        sequences = [ids.astype(np.int64) for ids in corpus.sequences(self.column, rows)]
        eos = np.full(int(self.adds_eos(corpus)), EOS)
        return Flat.of([np.append(ids, eos) if len(ids) else np.array([EOS]) for ids in sequences], corpus.keys(rows))

    def parts(self, corpus: Corpus) -> Iterator[Flat]:
        """Yield the ids of all rows, in chunks of about CHUNK_SIZE tokens."""
        ends_N = np.cumsum(corpus.lengths_N(self.column), dtype=np.int64)
        for rows_N in np.split(np.arange(len(corpus)), np.flatnonzero(np.diff(ends_N // CHUNK_SIZE)) + 1):
            yield self.flat(corpus, rows_N)


class HiddenTokens(Noisy):
    """Layout of a model with one input, which predicts hidden tokens of a row in their places.

    The rows of packed text are read as they are; other rows end in eos. Before a row, the model reads the columns
    `sources`, of which no token is hidden, each with eos, and bos.
    """

    at_positions = True
    noise: Hiding

    def __init__(self, input: str, column: str, hiding: Hiding, sources: Sequence[str] = ()) -> None:
        self.inputs, self.column, self.noise, self.sources = (input,), column, hiding, sources

    def adds_eos(self, corpus: Corpus) -> bool:
        """Return True if eos follows the ids of a row. Packed text, which has one column, already contains it."""
        return corpus.conventions.adds_eos and len(corpus.columns) > 1

    def widths_NC(self, corpus: Corpus) -> Lengths:
        widths_N = self.tokens_N(corpus) + sum(corpus.lengths_N(name) + 1 for name in self.sources)
        return (widths_N + bool(self.sources))[:, None]

    def tokens_N(self, corpus: Corpus) -> Lengths:
        return np.maximum(corpus.lengths_N(self.column) + self.adds_eos(corpus), 1)

    def labels_N(self, corpus: Corpus) -> Lengths:
        return np.concatenate([self.noise.labels_R(flat) for flat in self.parts(corpus)]).astype(np.int32)

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        flat = self.flat(corpus, rows)
        prompts = [prompt([corpus.ids(name, int(row)) for name in self.sources]) for row in rows if self.sources]
        return self.hide(flat, self.noise.hidden_L(flat), prompts, empty=empty)

    def hide(self, flat: Flat, hidden_L: Bools, prompts: Sequence[Integers], *, empty: bool) -> Batch:
        """Return the batch of rows in which these tokens are hidden, each after its prompt, if there are prompts."""
        labels = flat.split(np.where(hidden_L, flat.ids_L, PAD))
        read = flat.split(self.noise.read_L(flat, hidden_L))
        if prompts:
            labels = [np.concatenate((PAD * before, ids)) for before, ids in zip(prompts, labels, strict=True)]
            read = list(map(np.concatenate, zip(prompts, read, strict=True)))
        batch = batch_of({self.inputs[0]: padded_rows(read)}, padded_rows(labels), empty=empty)
        weights_R = self.noise.weights_R(flat)
        if weights_R is None:
            return batch
        tokens_B = torch.from_numpy(self.noise.labels_R(flat) * (not empty))
        return replace(batch, weights_B=torch.from_numpy(weights_R).float(), tokens_B=tokens_B)


class ReplacedTokens(HiddenTokens):
    """Layout of objective=replaced_token: hidden tokens, and a draw for each, with which a generator replaces it.

    The loss of the model is a mean over all tokens of the rows. `weights_B` make the loss of hidden tokens a mean over
    all hidden tokens of the step.
    """

    ratio = 1.0  # tokens of the step for each hidden one

    def labels_N(self, corpus: Corpus) -> Lengths:
        return self.tokens_N(corpus)

    def for_step(self, corpus: Corpus, rows: Rows) -> Self:
        flat = self.flat(corpus, rows)
        other = copy(self)
        other.ratio = len(flat.ids_L) / int(self.noise.labels_R(flat).sum())
        return other

    def hide(self, flat: Flat, hidden_L: Bools, prompts: Sequence[Integers], *, empty: bool) -> Batch:
        batch, hidden_L = super().hide(flat, hidden_L, prompts, empty=empty), hidden_L & (not empty)
        uniforms_H = self.noise.uniforms(flat.rows_R[flat.row_L[hidden_L]], SAMPLE, flat.position_L[hidden_L])
        return replace(
            batch,
            weights_B=torch.full((len(flat.rows_R),), self.ratio),
            tokens_B=torch.from_numpy(flat.lengths_R * (not empty)),
            uniforms_N=torch.from_numpy(np.floor(uniforms_H * 2**24) / 2**24).float(),  # exact, and below 1
        )


class NoisyPairs(Noisy):
    """Layout of an objective that makes a source and a target of each row.

    The ends of documents in packed text are tokens like others.
    """

    noise: PairNoise

    def __init__(self, pairs: Pairs, column: str, noise: PairNoise) -> None:
        self.inputs, self.pairs, self.column, self.noise = pairs.inputs, pairs, column, noise
        self._known: tuple[Corpus, Lengths] | None = None  # of the last corpus, because a plan reads them twice

    def _with(self, noise: Noise) -> Self:
        other = super()._with(noise)
        other._known = None
        return other

    def widths_NC(self, corpus: Corpus) -> Lengths:
        return self.pairs.widths_of(self._lengths_N2(corpus))

    def tokens_N(self, corpus: Corpus) -> Lengths:
        return np.maximum(corpus.lengths_N(self.column), 1)

    def labels_N(self, corpus: Corpus) -> Lengths:
        return self._lengths_N2(corpus)[:, 1] + 1

    def longest_C(self, corpus: Corpus) -> Lengths:
        lengths_K2 = np.array(self.noise.longest(int(self.tokens_N(corpus).max())), np.int32)
        longest_C: Lengths = self.pairs.widths_of(lengths_K2).max(0)
        return longest_C

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        columns = [part.split(part.ids_L) for part in self.noise.pairs(self.flat(corpus, rows))]
        return self.pairs.join(columns, empty=empty)

    def _lengths_N2(self, corpus: Corpus) -> Lengths:
        if self._known is None or self._known[0] is not corpus:
            parts = [self.noise.lengths_R2(flat) for flat in self.parts(corpus)]
            self._known = corpus, np.concatenate(parts).astype(np.int32)
        return self._known[1]


class Labelled(Answering):
    """Layout of objective=label: the source, and its label at the first position, or of each word at its first token.

    A label that is not a class is marked by 1, and its numbers are `values_NC`.
    """

    def __init__(self, input: str, coder: LabelCoder) -> None:
        super().__init__(input)
        self.coder = coder

    def widths_NC(self, corpus: Corpus) -> Lengths:
        return self.tokens_N(corpus)[:, None]

    def tokens_N(self, corpus: Corpus) -> Lengths:
        return np.maximum(corpus.lengths_N(SOURCE) + corpus.conventions.adds_eos, 1)

    def labels_N(self, corpus: Corpus) -> Lengths:
        return corpus.lengths_N(TARGET) if self.coder.predict == "words" else np.ones(len(corpus), np.int32)

    def batch(self, corpus: Corpus, rows: Rows, *, empty: bool = False) -> Batch:
        ids_BT = padded_rows([corpus.conventions.source(ids.tolist()) for ids in corpus.sequences(SOURCE, rows)])
        labels_BT, labels = torch.zeros_like(ids_BT), [ids.tolist() for ids in corpus.sequences(TARGET, rows)]
        values_NC = None
        if self.coder.predict in ("several", "number"):
            labels_BT[:, 0] = 1
            numbers = [self.coder.numbers(ids) for ids in labels if not empty]
            values_NC = torch.tensor(numbers, dtype=torch.float32).view(-1, self.coder.outputs)
        else:
            for place, (row, ids) in enumerate(zip(rows, labels, strict=True)):
                positions = corpus.ids(POSITIONS, int(row)).tolist() if corpus.positional else [0]
                labels_BT[place, positions] = torch.tensor(ids)
        return replace(batch_of({self.inputs[0]: ids_BT}, labels_BT, empty=empty), values_NC=values_NC)


def visible_columns(objective: ObjectiveSettings | None, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns before the text of an objective that hides tokens, none of which are hidden."""
    return prompt_columns(columns) if isinstance(objective, MaskedDiffusionSettings) else ()


def layout_of(corpus: Corpus, inputs: Sequence[str], objective: ObjectiveSettings = NEXT_TOKEN) -> Layout:
    """Return the layout for a model with these inputs, a corpus and an objective."""
    if isinstance(objective, LabelSettings):
        assert corpus.labels is not None, "the check of the run expects data=labels"
        return Labelled(inputs[0], corpus.labels)
    sources = [name for name in inputs if name != TARGET]
    pairs = Sides(sources, adds_eos=corpus.conventions.adds_eos) if sources else OneSequence()
    column = inputs[-1] if inputs[-1] in corpus.columns else TARGET
    match objective.noise(corpus.tokenizer):
        case Hiding() as hiding:
            kind = ReplacedTokens if isinstance(objective, ReplacedTokenSettings) else HiddenTokens
            visible = visible_columns(objective, corpus.columns)
            return kind(inputs[0], TARGET if visible else column, hiding, visible)
        case PairNoise() as noise:
            return NoisyPairs(pairs, TARGET, noise)
    if sources and TARGET in inputs:
        return pairs
    if corpus.positional:
        return AtPositions(*inputs)
    if sources:
        return Appended(*sources)
    return pairs if len(corpus.columns) > 1 else PlainText()
