"""Fill in the hidden tokens of texts with a run of an objective that hides tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tfm_blocks.data.layout import padded_rows, prompt
from tfm_blocks.data.objective_layouts import visible_columns
from tfm_blocks.data.objectives import read_objective
from tfm_blocks.data.settings import columns_of, read_data
from tfm_blocks.data.tokenizer import MASK, Tokenizer
from tfm_blocks.errors import DataError, Place, Problem, counted
from tfm_blocks.language.spec import TARGET
from tfm_blocks.network.graph import Network
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.translation.encoder import Encoder


class Filled(NamedTuple):
    """A text with the most probable token in place of each mask, and the best tokens of each with their probability."""

    text: str
    masks: list[list[tuple[str, float]]]

    def to_json(self) -> dict[str, Any]:
        masks = [[{"token": token, "probability": round(p, 6)} for token, p in best] for best in self.masks]
        return {"text": self.text, "masks": masks}


def predicts_tokens(network: Network, tokenizer: Tokenizer) -> bool:
    """Return True if a network has an output for each token at each position of its input.

    A classifier, the discriminator of ELECTRA, and an encoder with learned tokens before its output have none.
    """
    shape = network.spec.sink.shape
    return int(str(shape[-1])) >= tokenizer.size and shape[:-1] == network.spec.inputs[0].shape


def visible_sources(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns that a run reads before a text with hidden tokens."""
    data = read_data(config.get("data"))
    return visible_columns(read_objective(config.get("objective")), columns_of(data) if data else ())


class Filler(Encoder):
    """Predicts the tokens at each mask of a text. Raises RunError if the run was not trained to do so.

    A mask is <mask>, or the name of the mask token of an imported tokenizer, such as [MASK].

    A text of a run of masked diffusion on pairs is its `sources` and the target, separated by tabs.
    """

    unfit = ("was not trained to predict hidden tokens", "name a run of objective=masked or masked_diffusion")

    def __init__(self, network: Network, tokenizer: Tokenizer, sources: Sequence[str] = ()) -> None:
        super().__init__(network, tokenizer)
        if tokenizer.mask is None or not predicts_tokens(network, tokenizer):
            self.refuse()
        self.mask, self.sources = tokenizer.mask, sources
        self._masks = re.compile("|".join(map(re.escape, {MASK, tokenizer.piece(self.mask)})))

    @classmethod
    def further_arguments(cls, run: Path) -> tuple[Any, ...]:
        return (visible_sources(SavedRun(run).config),)

    def fill(
        self,
        texts: Sequence[str],
        *,
        top: int = 1,
        steps: int = 1,
        batch_tokens: int = 4096,
        first: int = 1,
        name: str = "stdin",
    ) -> list[Filled]:
        """Return the filled texts; a text without a mask is unchanged. Raises DataError for one that is too long.

        Each of `steps` predictions fills an equal number of masks of a text, the most probable tokens first, which the
        next predictions read (Nie et al. 2025, low-confidence remasking). Lines of `name` count from
        `first`.
        """
        rows = self.encode_masked(texts, first=first, name=name)
        return self.in_batches(rows, batch_tokens, lambda part: self.filled(rows[part], texts[part], top, steps))

    def encode_masked(self, texts: Sequence[str], *, first: int = 1, name: str = "stdin") -> list[list[int]]:
        """Return the ids of each text with masks.

        Raises DataError as `encode`, for a wrong number of tabs, and for a mask that the tokenizer reads as text.
        """
        for number, text in enumerate(texts, first):
            if self.sources and text.count("\t") != len(self.sources):
                columns, parts = ", ".join((*self.sources, TARGET)), text.split("\t")
                rule = f"the line has {len(parts)} tab-separated texts, but the run reads {columns}"
                raise DataError(
                    Problem(name, rule, Place(name, number), help="separate them by tabs, as paste FILE1 FILE2 does")
                )
        return self.encode(texts, first=first, name=name, read=self._read)

    def _read(self, text: str) -> list[int]:
        *sources, target = text.split("\t") if self.sources else [text]
        encode = self.tokenizer.encode_masked
        tag, target = self.tokenizer.split_target_tag(target)
        ids = [*(prompt(list(map(encode, sources))).tolist() if sources else []), *tag, *encode(target)]
        if (read := ids.count(self.mask)) != (written := len(self._masks.findall(text))):
            raise ValueError(f"has {counted(written, 'mask')}, of which the tokenizer reads {read}")
        return ids

    def filled(
        self,
        rows: Sequence[list[int]],
        texts: Sequence[str],
        top: int = 1,
        steps: int = 1,
        proceed: Callable[[], bool] = lambda: True,
    ) -> Iterator[Filled]:
        """Yield the filled text of each row of a batch; arguments as in `fill`.

        `proceed` is called before each step but the first; if it returns False, no text is filled.
        """
        ids_BT, device = padded_rows(rows), self.network.device
        masks_B = (ids_BT == self.mask).sum(1)
        best: list[dict[int, list[tuple[str, float]]]] = [{} for _ in rows]  # by position
        for step in range(min(steps, max(1, int(masks_B.max())))):
            if step and not proceed():
                return
            row_N, position_N = (ids_BT == self.mask).nonzero(as_tuple=True)
            x_BTD = self.network.trunk_with_losses({self.input: ids_BT.to(device)})[0]
            logits_NV = self.network.head(x_BTD[(ids_BT == self.mask).to(device)]).float()
            logits_NV[:, sorted(self.tokenizer.special_ids)] = -torch.inf
            values = torch.softmax(logits_NV, 1).topk(min(top, logits_NV.shape[1]), 1)
            ids_NK, p_NK = values.indices.cpu(), values.values.cpu()
            for row in range(len(rows)):
                at_N = (row_N == row).nonzero()[:, 0]
                count = int(masks_B[row] // steps + (step < masks_B[row] % steps))
                for n in at_N[p_NK[at_N, 0].argsort(descending=True, stable=True)][:count].tolist():
                    ids_BT[row, position_N[n]] = ids_NK[n, 0]
                    tokens = zip(ids_NK[n].tolist(), p_NK[n].tolist(), strict=True)
                    best[row][int(position_N[n])] = [(self.tokenizer.piece(id), p) for id, p in tokens]
        for ids, whole_T, text, found in zip(rows, ids_BT, texts, best, strict=True):
            masks = [found[position] for position in sorted(found)]
            yield Filled(self._written(text, whole_T[: len(ids)].tolist(), sorted(found)), masks)

    def _written(self, text: str, ids: Sequence[int], places: Sequence[int]) -> str:
        """Return a text with the ids at `places` in place of its masks, without the tag of a target."""
        sources, tab, target = text.rpartition("\t") if self.sources else ("", "", text)
        written, *parts = self._masks.split(sources + tab + self.tokenizer.split_target_tag(target)[1])
        run: list[int] = []  # the ids of masks without text between them, which can share a character
        for number, part in enumerate(parts):
            run.append(ids[places[number]])
            part = part if number == len(parts) - 1 else part.removesuffix(" ")
            if part or number == len(parts) - 1:
                is_first = bool(self.sources) and written.endswith("\t")
                before = [] if is_first else ids[: places[number] - len(run) + 1]
                written = written.removesuffix(" ") + self.tokenizer.decode(run, before) + part
                run = []
        return written
