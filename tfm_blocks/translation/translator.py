"""Text in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import DataError, Problem, RunError
from tfm_blocks.language.causality import TARGET
from tfm_blocks.network.graph import Network
from tfm_blocks.runs.folder import TOKENIZER
from tfm_blocks.runs.model import read_network
from tfm_blocks.translation.search import EOS, PAD, greedy, longest_output


class Translator:
    """Translates with a network that reads `src` and `tgt`, and a tokenizer with as many pieces as it; or RunError."""

    def __init__(self, network: Network, tokenizer: Tokenizer) -> None:
        names = {put.name for put in network.spec.inputs}
        if names != {"src", TARGET}:
            rule = f"translating needs the inputs src and {TARGET}, but the model reads {', '.join(sorted(names))}"
            raise RunError(Problem("model.inputs", rule))
        if network.spec.sink.shape[-1] != tokenizer.size:
            rule = f"has {tokenizer.size} pieces, but the model {network.spec.sink.shape[-1]}"
            raise RunError(Problem("tokenizer", rule, help="take the tokenizer of the model's own run folder"))
        self.network = network
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, run: str | Path, *, device: str = "cpu", plugins: Sequence[str] = ()) -> Translator:
        """The translator of a run folder, with the plug-in modules that its model needs. Raises RunError."""
        network = read_network(Path(run), plugins)
        tokenizer = Tokenizer.load(Path(run) / TOKENIZER)
        try:
            return cls(network.to(device), tokenizer)
        except (RuntimeError, AssertionError) as error:  # torch's answers to a device that it does not have
            raise RunError(
                Problem("device", f"{device!r}: {str(error).splitlines()[0]}", help="cpu, or cuda")
            ) from None

    def translate(self, sentences: Sequence[str], *, batch_tokens: int = 4096, first_line: int = 1) -> list[str]:
        """Greedy translations in the order given, `batch_tokens` source tokens a batch; blank sentences stay blank.

        Raises DataError for a sentence beyond the positions that the model knows; `first_line` is the number of the
        first sentence in it. Raises TypeError for a single string.
        """
        if isinstance(sentences, str):
            raise TypeError("translate takes a list of sentences, not one string")
        ids = self.tokenizer.encode_batch(list(sentences))
        self._expect_room(ids, first_line)
        order = sorted((row for row, text in enumerate(sentences) if text.strip()), key=lambda row: len(ids[row]))
        done = ["" for _ in sentences]
        was_training = self.network.training
        self.network.eval()
        for rows in _batches(order, [len(one) + 1 for one in ids], batch_tokens):
            for row, text in zip(rows, self._batch([ids[row] for row in rows]), strict=True):
                done[row] = text
        self.network.train(was_training)
        return done

    def _expect_room(self, ids: Sequence[Sequence[int]], first_line: int) -> None:
        known = self.network.longest("src").tokens
        for number, one in enumerate(ids, first_line):
            if len(one) + 1 > known:
                rule = f"has {len(one) + 1} tokens with eos, and the model knows {known} positions"
                raise DataError(Problem(f"sentence {number}", rule, help="split it"))

    def _batch(self, ids: Sequence[Sequence[int]]) -> list[str]:
        device = next(self.network.parameters()).device
        width = max(len(one) for one in ids) + 1
        padded = [[*one, EOS] + [PAD] * (width - len(one) - 1) for one in ids]
        src_BS = torch.tensor(padded, dtype=torch.int64, device=device)
        room = self.network.longest(TARGET).tokens
        longest_B = torch.tensor([min(longest_output(len(one) + 1), room) for one in ids], device=device)
        return [self.tokenizer.decode(out) for out in greedy(self.network, {"src": src_BS}, longest_B)]


def _batches(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows from short to long, each batch at most `batch_tokens` with padding, or one row."""
    batch: list[int] = []
    for row in order:
        if batch and (len(batch) + 1) * lengths[row] > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
