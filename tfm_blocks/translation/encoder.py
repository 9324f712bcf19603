"""Read texts with a network that has one input of tokens and no target: an encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar

import torch
from torch import Tensor

from tfm_blocks.blocks.layers.state import mean_of_kept
from tfm_blocks.data.layout import padded_rows
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.devices import on_device
from tfm_blocks.errors import DataError, LimitError, Place, Problem, run_error
from tfm_blocks.language.spec import TARGET, names
from tfm_blocks.network.graph import Network, evaluating
from tfm_blocks.runs.folder import TOKENIZER
from tfm_blocks.runs.model import read_network

Pooling = Literal["mean", "first"]
T = TypeVar("T")


class Encoder:
    """A network that reads one text, with its tokenizer. Raises RunError for another network."""

    unfit: ClassVar = ("reads a target, so it is not an encoder", "name a run whose model has one input, without tgt")

    def __init__(self, network: Network, tokenizer: Tokenizer) -> None:
        self.network, self.tokenizer, self.inputs = network, tokenizer, names(network.spec.inputs)
        if TARGET in self.inputs or len(self.inputs) != 1 or not network.spec.inputs[0].tokens:
            self.refuse()
        self.input = self.inputs[0]

    @classmethod
    def refuse(cls) -> NoReturn:
        """Raise RunError for a run that is not made for this use."""
        rule, help = cls.unfit
        raise run_error("model", rule, help)

    @classmethod
    def load(
        cls, run: Path, *, device: str = "cpu", plugins: Sequence[str] = (), checkpoint: str | int | None = None
    ) -> Self:
        """Load the network and the tokenizer of a run folder. Raises RunError."""
        network = read_network(run, plugins, checkpoint)
        encoder = Encoder(on_device(network, device), load_tokenizer(run / TOKENIZER))
        return cls(encoder.network, encoder.tokenizer, *cls.further_arguments(run))

    @classmethod
    def further_arguments(cls, run: Path) -> tuple[Any, ...]:
        """Return the arguments of the class after the network and the tokenizer. Raises RunError."""
        return ()

    def encode(
        self,
        texts: Sequence[str],
        *,
        first: int = 1,
        name: str = "stdin",
        read: Callable[[str], list[int]] | None = None,
    ) -> list[list[int]]:
        """Return the ids that the network reads for each text; `read` returns them without eos.

        Lines count from `first`. Raises LimitError with the place `name` if a text is too long, and DataError if `read`
        raises ValueError.
        """
        longest, rows = self.network.longest(self.input).tokens, []
        for number, text in enumerate(texts, first):
            try:
                ids = self.tokenizer.conventions.source((read or self.tokenizer.encode)(text))
            except ValueError as error:
                rule = f"the line {error}"
                raise DataError(Problem(name, rule, Place(name, number), help="write other text")) from None
            if len(ids) > longest:
                rule = f"the line has {len(ids)} tokens with eos, but the model has {longest} positions"
                raise LimitError(Problem(name, rule, Place(name, number), help="split the line"))
            rows.append(ids)
        return rows

    def embed(
        self,
        texts: Sequence[str],
        *,
        pooling: Pooling = "mean",
        batch_tokens: int = 4096,
        first: int = 1,
        name: str = "stdin",
    ) -> Tensor:
        """Return a vector for each text, from the input of the output head: x_ND on the CPU.

        pooling: the mean of all positions, special tokens included, or the first position. Raises DataError, with a
        line of `name`, for a text that is too long; lines count from `first`.
        """
        rows = self.encode(texts, first=first, name=name)
        vectors: list[Tensor] = self.in_batches(rows, batch_tokens, lambda part: self.vectors(rows[part], pooling))
        return torch.stack(vectors) if vectors else torch.zeros(0, 0)

    def in_batches(
        self, rows: Sequence[Sequence[int]], batch_tokens: int, read: Callable[[slice], Iterable[T]]
    ) -> list[T]:
        """Return the results of all rows; `read` returns the results of a batch, which it gets as a slice."""
        with evaluating(self.network), torch.inference_mode():
            return [result for part in _batches(rows, batch_tokens) for result in read(part)]

    def vectors(self, rows: Sequence[Sequence[int]], pooling: Pooling) -> Tensor:
        """Return the vector of each row of a batch: x_BD on the CPU."""
        ids_BS = padded_rows(rows).to(self.network.device)
        x_BSD = self.network.trunk_with_losses({self.input: ids_BS})[0].float()
        axis = str(self.network.spec.sink.shape[1])
        mean_BD = mean_of_kept(x_BSD, self.network.keep_masks({self.input: ids_BS}).masks[axis])
        return (mean_BD if pooling == "mean" else x_BSD[:, 0]).cpu()


def _batches(rows: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[slice]:
    """Yield batches of at most `batch_tokens` padded tokens, or of one longer row."""
    start = widest = 0
    for end, ids in enumerate(rows):
        widest = max(widest, len(ids))
        if end > start and widest * (end + 1 - start) > batch_tokens:
            yield slice(start, end)
            start, widest = end, len(ids)
    if rows:
        yield slice(start, len(rows))
