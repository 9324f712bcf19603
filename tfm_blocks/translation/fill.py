"""Fill in the hidden tokens of texts with a run of objective=masked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import torch

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.network.graph import Network, evaluating
from tfm_blocks.translation.encoder import Encoder, batch_bounds


class Filled(NamedTuple):
    """A text with the most probable token in place of each mask, and the best tokens of each with their probability."""

    text: str
    masks: list[list[tuple[str, float]]]

    def to_json(self) -> dict[str, Any]:
        masks = [[{"token": token, "probability": round(p, 6)} for token, p in best] for best in self.masks]
        return {"text": self.text, "masks": masks}


class Filler(Encoder):
    """Predicts the tokens at each <mask> of a text. Raises RunError if the run was not trained to do so."""

    unfit = ("was not trained to predict hidden tokens", "name a run of objective=masked")

    def __init__(self, network: Network, tokenizer: Tokenizer) -> None:
        super().__init__(network, tokenizer)
        if tokenizer.mask is None:
            self.refuse()

    def fill(self, texts: Sequence[str], *, top: int = 1, batch_tokens: int = 4096, first: int = 1) -> list[Filled]:
        """Return the filled texts; a text without a mask is unchanged. Raises DataError for one that is too long.

        Each mask is filled on its own. Lines count from `first`.
        """
        rows = self.encode(texts, first=first, masked=True)
        filled: list[Filled] = []
        with evaluating(self.network), torch.inference_mode():
            for start, end in batch_bounds(rows, batch_tokens):
                filled += self._fill(rows[start:end], texts[start:end], top)
        return filled

    def _fill(self, rows: Sequence[list[int]], texts: Sequence[str], top: int) -> Iterator[Filled]:
        ids_BT = self.padded(rows)
        x_BTD = self.network.trunk_with_losses({self.input: ids_BT})[0]
        logits_NV = self.network.head(x_BTD[ids_BT == self.tokenizer.mask]).float()
        logits_NV[:, sorted(self.tokenizer.special_ids)] = -torch.inf
        values = torch.softmax(logits_NV, 1).topk(min(top, logits_NV.shape[1]), 1)
        best = iter(zip(values.indices.tolist(), values.values.tolist(), strict=True))
        mask = self.tokenizer.mask
        for ids, text in zip(rows, texts, strict=True):
            chosen = [next(best) for id in ids if id == mask]
            tokens = iter([tokens[0] for tokens, _ in chosen])
            whole = [next(tokens) if id == mask else id for id in ids]
            masks = [[(self.tokenizer.piece(id), p) for id, p in zip(tokens, ps, strict=True)] for tokens, ps in chosen]
            yield Filled(self.tokenizer.decode(whole) if chosen else text, masks)


def write_filled(filler: Filler, lines: Sequence[str], target: TextIO, *, top: int | None, **options: int) -> None:
    """Write the filled text of each line, or with `top` a JSON object with the best tokens of each mask."""
    for filled in filler.fill(lines, top=top or 1, **options):
        target.write(f"{json.dumps(filled.to_json(), ensure_ascii=False) if top else filled.text}\n")
    target.flush()
