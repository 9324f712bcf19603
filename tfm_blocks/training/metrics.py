"""Metrics of training and scoring, as torchmetrics metrics that sum over all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torchmetrics import Metric

from tfm_blocks.devices import sum_dtype
from tfm_blocks.metric_schema import BITS_PER_BYTE
from tfm_blocks.scoring.corpus import metrics
from tfm_blocks.training.data import StepBatches


def perplexity_of_loss(nats: float) -> float:
    """Return e^nats, or infinity if it overflows."""
    return math.exp(nats) if nats < 700 else math.inf


class _Sums(Metric):
    """Sums in one wide vector, so that ranks exchange one tensor and a row of metrics waits for the device once."""

    full_state_update = False
    sums: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(count, dtype=torch.float64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **options: Any) -> Self:
        """Move the sums, as float32 if the device has no float64."""

        def moved(sums: Tensor) -> Tensor:
            dtype = sum_dtype(fn(torch.empty(0, device=sums.device)).device)
            return fn(sums if dtype == torch.float64 else sums.to(dtype)).to(dtype)

        super()._apply(moved, *args, **options)
        return self

    def reset(self) -> None:
        """Reset to tensors that training can update in place, even after a validation in inference mode."""
        with torch.inference_mode(False):
            super().reset()


class StepSums(_Sums):
    """Sums over the steps since the last row: losses, -log p, target tokens, padding ids and all ids.

    `last` holds values that are equal on all ranks: the gradient norm of the last step that was not skipped, and the
    number of skipped steps of the run.
    """

    last: Tensor

    def __init__(self, losses: Sequence[str]) -> None:
        super().__init__(5 + len(losses))
        self.losses = losses
        self.add_state("last", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="max")

    def update(self, sums: Tensor, step: StepBatches, norm: Tensor, skipped: Tensor) -> None:
        """Add a step. `sums` are its loss, -log p and auxiliary losses over this rank's tokens; `skipped` is a bool."""
        padding, read = step.padding
        self.sums[:-3] += torch.where(skipped, 0.0, sums)
        self.sums[-3] += torch.where(skipped, 0, step.own_tokens)
        self.sums[-2] += padding
        self.sums[-1] += read
        self.last = torch.stack([torch.where(skipped, self.last[0], norm.to(self.last.dtype)), self.last[1] + skipped])

    def compute(self) -> Tensor:
        """Return both vectors as one tensor, so that reading it waits for the device once."""
        return torch.cat([self.sums, self.last])

    def read(self) -> dict[str, float]:
        """Return the metrics since the last call and reset. Losses are missing if all steps were skipped."""
        loss, nll, *auxiliary, tokens, padding, read, norm, skipped = self.compute().tolist()
        last = self.last
        self.reset()
        self.last = last
        means = {}
        if tokens:
            means = {"loss": loss / tokens, "perplexity": perplexity_of_loss(nll / tokens)}
            pairs = zip(self.losses, auxiliary, strict=True)
            means |= {f"aux_loss/{address}": total / tokens for address, total in pairs}
        return means | {"gradient_norm": norm, "padding": padding / read, "skipped": skipped}

    def kept(self) -> dict[str, Tensor]:
        """Return the sums of all ranks, for a checkpoint."""
        with self.sync_context():
            return {"sums": self.sums.cpu(), "last": self.last.cpu()}

    def restore(self, kept: Mapping[str, Tensor], rank: int) -> None:
        """Restore the sums of a checkpoint. Rank 0 takes the sums of all ranks."""
        self.last = kept["last"].to(self.last)
        if rank == 0:
            self.sums = kept["sums"].to(self.sums)


class Throughput(_Sums):
    """Target tokens per second since the last `read`, and the fraction of the time in which ranks waited for batches.

    Call `restart` after a validation to exclude its time.
    """

    def __init__(self) -> None:
        super().__init__(2)
        self.start = time.perf_counter()

    def restart(self) -> None:
        """Reset the counts and the time."""
        self.reset()
        self.start = time.perf_counter()

    def update(self, tokens: int, waited: float) -> None:
        """Add this rank's tokens of a step, and the seconds that it waited for them."""
        self.sums[0] += tokens
        self.sums[1] += waited

    def compute(self) -> Tensor:
        """Return the tokens and the seconds of waiting of all ranks."""
        return self.sums

    def read(self, world: int) -> dict[str, float]:
        """Return the metrics for `world` ranks, and restart."""
        tokens, waited = self.compute().tolist()
        seconds = max(time.perf_counter() - self.start, 1e-9)
        self.restart()
        return {"tokens_per_second": tokens / seconds, "waiting": waited / world / seconds}


class TokenScores(_Sums):
    """Mean loss, perplexity e^(nll / tokens) and accuracy over target tokens, eos included.

    If `bytes` counts the bytes of the text, its bits per byte are nll / (bytes · ln 2).
    """

    def __init__(self) -> None:
        super().__init__(5)
        self.bytes = 0

    def update(self, loss: Tensor, nll: Tensor, correct: Tensor, tokens: int, labels: int) -> None:
        """Add sums over `tokens` tokens; `correct` counts the `labels` that the model ranks first."""
        self.sums[:3] += torch.stack([value.to(self.sums.dtype) for value in (loss, nll, correct)])
        self.sums[3] += tokens
        self.sums[4] += labels

    def compute(self) -> dict[str, float]:
        """Return the metrics by name."""
        return token_means(*self.sums.tolist(), bytes=self.bytes)


def token_means(
    loss: float, nll: float, correct: float, tokens: float, labels: float, *, bytes: float = 0
) -> dict[str, float]:
    """Return the scores of these sums over tokens, and over the bytes of their text if there are any."""
    return {
        "loss": loss / tokens,
        "perplexity": perplexity_of_loss(nll / tokens),
        "token_accuracy": correct / max(labels, 1),
    } | ({BITS_PER_BYTE: nll / bytes / math.log(2)} if bytes else {})


class PartScores(_Sums):
    """The scores of TokenScores for each corpus of a mix, whose `bytes` are counted by name."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(5 * len(names))
        self.names = list(names)
        self.bytes: dict[str, int] = {}

    def update(self, values_N3: Tensor, part_N: Tensor, tokens_B: Tensor, part_B: Tensor) -> None:
        """Add the loss, -log p and correctness of some labels, and the tokens of rows, each of a corpus."""
        sums_P5 = self.sums.view(-1, 5)
        sums_P5[:, :3].index_add_(0, part_N, values_N3.to(self.sums.dtype))
        sums_P5[:, 3].index_add_(0, part_B, tokens_B.to(self.sums.dtype))
        sums_P5[:, 4].index_add_(0, part_N, torch.ones_like(part_N, dtype=self.sums.dtype))

    def compute(self) -> dict[str, float]:
        """Return the metrics of each corpus with tokens, such as `loss/NAME`."""
        scores: dict[str, float] = {}
        for name, sums in zip(self.names, self.sums.view(-1, 5).tolist(), strict=True):
            if sums[3]:
                means = token_means(*sums, bytes=self.bytes.get(name, 0))
                scores |= {f"{key}/{name}": value for key, value in means.items()}
        return scores


class RowSums(_Sums):
    """Sums over the tokens of each row of a split, of `width` values such as the loss, -log p and the tokens."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows * width)
        self.width = width

    def update(self, values_NK: Tensor, row_N: Tensor, first: int = 0) -> None:
        """Add values, with the row of each, to the sums from `first` on."""
        sums_RK = self.sums.view(-1, self.width)[:, first : first + values_NK.shape[1]]
        sums_RK.index_add_(0, row_N, values_NK.to(sums_RK.dtype))

    def compute(self) -> Tensor:
        """Return the sums_RK of the rows."""
        return self.sums.view(-1, self.width)


class ExactMatch(_Sums):
    """The fraction of translations that equal their references, in total and in each of `groups`."""

    def __init__(self, groups: Sequence[str] = ()) -> None:
        self.groups = list(dict.fromkeys(groups))
        super().__init__(2 + 2 * len(self.groups))

    def update(self, outputs: Sequence[str], references: Sequence[str], groups: Sequence[str] = ()) -> None:
        """Add translations. `groups` holds the group of each line, or is empty."""
        counted = [0] * len(self.sums)
        for line, (output, reference) in enumerate(zip(outputs, references, strict=True)):
            for index in (0, 1 + self.groups.index(groups[line])) if groups else (0,):
                counted[2 * index] += output == reference
                counted[2 * index + 1] += 1
        self.sums += torch.tensor(counted, device=self.sums.device)

    def compute(self) -> dict[str, float]:
        """Return `exact_match`, and `exact_match/GROUP` for each group with lines."""
        counted = self.sums.tolist()
        names = ["exact_match", *(f"exact_match/{group}" for group in self.groups)]
        pairs = zip(names, counted[::2], counted[1::2], strict=True)
        return {name: equal / lines for name, equal, lines in pairs if lines}


class LengthRatio(_Sums):
    """The tokens of the translations divided by the tokens of their references; below 1 they are too short."""

    def __init__(self) -> None:
        super().__init__(2)

    def update(self, outputs: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> None:
        """Add the ids of translations and references."""
        self.sums[0] += sum(map(len, outputs))
        self.sums[1] += sum(map(len, references))

    def compute(self) -> dict[str, float]:
        """Return the metric by name, or nothing without references."""
        outputs, references = self.sums.tolist()
        return {"length_ratio": outputs / references} if references else {}


def text_scores(outputs: Sequence[str], references: Sequence[str], tokenizer: str) -> dict[str, float]:
    """Return sacreBLEU's BLEU and chrF of the corpus, from 0 to 100. torchmetrics computes chrF differently."""
    corpus_metrics = metrics(tokenizer, tokenised=False)
    return {name.lower(): corpus_metrics[name].corpus_score(outputs, [references]).score for name in ("BLEU", "chrF")}
