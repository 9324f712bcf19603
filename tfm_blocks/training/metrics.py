"""What is counted in training and in scoring: torchmetrics metrics, whose sums are those of all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from tfm_blocks.scoring.corpus import metrics
from tfm_blocks.training.data import StepBatches


def perplexity_of_loss(nats: float) -> float:
    """Of so many nats a token."""
    return math.exp(nats) if nats < 700 else math.inf


class _Sums(Metric):
    """Sums in one float64 vector, so that ranks exchange one tensor and a row of metrics waits for the device once."""

    full_state_update = False
    sums: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(count, dtype=torch.float64), dist_reduce_fx="sum")

    def reset(self) -> None:
        """Zeros that training, which comes after a validation in inference mode, can add to."""
        with torch.inference_mode(False):
            super().reset()


class StepSums(_Sums):
    """Sums over the steps since the last row: of losses and -log p, of the tokens that they are over, and of padding.

    `last` holds what all ranks know alike: the norm of the last gradient that was taken, and how many steps of the run
    were skipped.
    """

    last: Tensor

    def __init__(self, losses: Sequence[str]) -> None:
        super().__init__(5 + len(losses))
        self.losses = losses
        self.add_state("last", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="max")

    def update(self, sums: Tensor, step: StepBatches, norm: Tensor, skipped: Tensor) -> None:
        """`sums` are the step's loss, its -log p and the added losses, over this rank's tokens; `skipped` is a bool."""
        padding, read = step.padding
        self.sums[:-3] += torch.where(skipped, 0.0, sums)
        self.sums[-3] += torch.where(skipped, 0, step.own_tokens)
        self.sums[-2] += padding
        self.sums[-1] += read
        self.last = torch.stack([torch.where(skipped, self.last[0], norm.double()), self.last[1] + skipped])

    def compute(self) -> Tensor:
        """Both vectors as one, for one look at the device."""
        return torch.cat([self.sums, self.last])

    def read(self) -> dict[str, float]:
        """The metrics since the last call, without losses where no step was taken; then counts anew."""
        loss, nll, *added, tokens, padding, read, norm, skipped = self.compute().tolist()
        last = self.last
        self.reset()
        self.last = last
        means = {}
        if tokens:
            means = {"loss": loss / tokens, "perplexity": perplexity_of_loss(nll / tokens)}
            means |= {f"aux_loss/{address}": one / tokens for address, one in zip(self.losses, added, strict=True)}
        return means | {"gradient_norm": norm, "padding": padding / read, "skipped": skipped}

    def kept(self) -> dict[str, Tensor]:
        """For a checkpoint: what all ranks have counted."""
        with self.sync_context():
            return {"sums": self.sums.cpu(), "last": self.last.cpu()}

    def restore(self, kept: Mapping[str, Tensor], rank: int) -> None:
        """From a checkpoint: the first rank goes on with the sums of all."""
        self.last = kept["last"].to(self.last.device)
        if rank == 0:
            self.sums = kept["sums"].to(self.sums.device)


class Throughput(_Sums):
    """Target tokens a second since the last `read`, and the share of the time in which this rank had no batch.

    `restart` leaves out the time of a validation.
    """

    def __init__(self) -> None:
        super().__init__(2)
        self.begun = time.perf_counter()

    def restart(self) -> None:
        """Counts anew."""
        self.reset()
        self.begun = time.perf_counter()

    def update(self, tokens: int, waited: float) -> None:
        """The tokens of a step that this rank reads, and the seconds that it waited for them."""
        self.sums[0] += tokens
        self.sums[1] += waited

    def compute(self) -> Tensor:
        """Tokens, and seconds of waiting, of all ranks."""
        return self.sums

    def read(self, world: int) -> dict[str, float]:
        """Then restarts."""
        tokens, waited = self.compute().tolist()
        seconds = max(time.perf_counter() - self.begun, 1e-9)
        self.restart()
        return {"tokens_per_second": tokens / seconds, "waiting": waited / world / seconds}


class TokenScores(_Sums):
    """Mean loss, perplexity e^(nll / tokens) and accuracy over target tokens, eos included."""

    def __init__(self) -> None:
        super().__init__(4)

    def update(self, loss: Tensor, nll: Tensor, correct: Tensor, tokens: int) -> None:
        """Sums over some tokens; `correct` counts those that the model ranks first."""
        self.sums[:3] += torch.stack([loss.double(), nll.double(), correct.double()])
        self.sums[3] += tokens

    def compute(self) -> dict[str, float]:
        """By name."""
        loss, nll, correct, tokens = self.sums.tolist()
        return {
            "loss": loss / tokens,
            "perplexity": perplexity_of_loss(nll / tokens),
            "token_accuracy": correct / tokens,
        }


class RowLosses(_Sums):
    """Sums over the tokens of each row of a split: loss, -log p and tokens."""

    def __init__(self, rows: int) -> None:
        super().__init__(3 * rows)

    def update(self, loss_N: Tensor, nll_N: Tensor, row_N: Tensor) -> None:
        """Add the losses of some tokens, each of which belongs to a row."""
        added_N3 = torch.stack([loss_N.double(), nll_N.double(), torch.ones_like(nll_N).double()], 1)
        self.sums.view(-1, 3).index_add_(0, row_N, added_N3)

    def compute(self) -> Tensor:
        """Return losses_N3."""
        return self.sums.view(-1, 3)


class ExactMatch(_Sums):
    """The share of translations that are their references, in total and in each of `groups`."""

    def __init__(self, groups: Sequence[str] = ()) -> None:
        self.groups = list(dict.fromkeys(groups))
        super().__init__(2 + 2 * len(self.groups))

    def update(self, outputs: Sequence[str], references: Sequence[str], groups: Sequence[str] = ()) -> None:
        """`groups` has the group of each line, or nothing."""
        counted = [0] * len(self.sums)
        for line, (output, reference) in enumerate(zip(outputs, references, strict=True)):
            for place in (0, 1 + self.groups.index(groups[line])) if groups else (0,):
                counted[2 * place] += output == reference
                counted[2 * place + 1] += 1
        self.sums += torch.tensor(counted, device=self.sums.device)

    def compute(self) -> dict[str, float]:
        """`exact_match`, and `exact_match/GROUP` for each that has lines."""
        counted = self.sums.tolist()
        names = ["exact_match", *(f"exact_match/{group}" for group in self.groups)]
        pairs = zip(names, counted[::2], counted[1::2], strict=True)
        return {name: equal / lines for name, equal, lines in pairs if lines}


class LengthRatio(_Sums):
    """Pieces of the translations a piece of their references: below 1 they are too short."""

    def __init__(self) -> None:
        super().__init__(2)

    def update(self, outputs: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> None:
        """The ids of each."""
        self.sums[0] += sum(map(len, outputs))
        self.sums[1] += sum(map(len, references))

    def compute(self) -> dict[str, float]:
        """By name; nothing without references."""
        outputs, references = self.sums.tolist()
        return {"length_ratio": outputs / references} if references else {}


def text_scores(outputs: Sequence[str], references: Sequence[str], tokenizer: str) -> dict[str, float]:
    """BLEU and chrF of the corpus by sacreBLEU, from 0 to 100. torchmetrics' chrF is another."""
    asked = metrics(tokenizer, tokenised=False)
    return {
        "bleu": asked["BLEU"].corpus_score(outputs, [references]).score,
        "chrf": asked["chrF"].corpus_score(outputs, [references]).score,
    }
