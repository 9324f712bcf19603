"""Text in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import Problem, RunError
from tfm_blocks.language.causality import TARGET
from tfm_blocks.network.graph import Network
from tfm_blocks.runs.folder import TOKENIZER
from tfm_blocks.runs.model import read_network
from tfm_blocks.translation.search import EOS, PAD, greedy, longest_output


class Translator:
    """Translates with a network that reads `src` and `tgt`. Raises RunError for one that does not."""

    def __init__(self, network: Network, tokenizer: Tokenizer) -> None:
        names = {put.name for put in network.spec.inputs}
        if names != {"src", TARGET}:
            rule = f"translating needs the inputs src and {TARGET}, but the model reads {', '.join(sorted(names))}"
            raise RunError(Problem("model.inputs", rule))
        self.network = network
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, run: str | Path, *, device: str = "cpu", plugins: Sequence[str] = ()) -> Translator:
        """The translator of a run folder, with the plug-in modules that its model needs. Raises RunError."""
        network = read_network(Path(run), plugins)
        return cls(network.to(device), Tokenizer.load(Path(run) / TOKENIZER))

    def translate(self, sentences: Sequence[str], *, batch_tokens: int = 4096) -> list[str]:
        """Greedy translations in the order given, `batch_tokens` source tokens a batch; blank sentences stay blank."""
        ids = self.tokenizer.encode_batch(list(sentences))
        order = sorted((row for row, text in enumerate(sentences) if text.strip()), key=lambda row: len(ids[row]))
        done = ["" for _ in sentences]
        was_training = self.network.training
        self.network.eval()
        for rows in _batches(order, [len(one) + 1 for one in ids], batch_tokens):
            for row, text in zip(rows, self._batch([ids[row] for row in rows]), strict=True):
                done[row] = text
        self.network.train(was_training)
        return done

    def _batch(self, ids: Sequence[Sequence[int]]) -> list[str]:
        device = next(self.network.parameters()).device
        width = max(len(one) for one in ids) + 1
        padded = [[*one, EOS] + [PAD] * (width - len(one) - 1) for one in ids]
        src_BS = torch.tensor(padded, dtype=torch.int64, device=device)
        longest_B = torch.tensor([longest_output(len(one) + 1) for one in ids], device=device)
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
