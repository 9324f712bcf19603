"""The most expensive micro-batches of the plan are tried before the first step: memory runs out then, or never."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tfm_blocks.data.layout import Batch
from tfm_blocks.data.plan import EpochPlan, Ranks
from tfm_blocks.data.settings import LmSettings
from tfm_blocks.errors import Problem, RunError
from tfm_blocks.network.graph import Network
from tfm_blocks.training.data import PlannedCorpus
from tfm_blocks.training.fsdp2 import units_of
from tfm_blocks.training.objective import Objective
from tfm_blocks.training.settings import TrainerSettings

STATUS = Path("/proc/self/status")
ROUNDS = 6  # of halving the interval in which the largest cap lies
MARGIN = 0.9  # of it: memory that was taken and given back has gaps


@dataclass(frozen=True)
class Copies:
    """The memory that a rank needs besides the weights and gradients of a step, in copies of all weights.

    With `by_layer` the gradients of a layer of a stack exist only until they are exchanged.
    """

    held: float
    by_layer: bool = False


def copies_of(settings: TrainerSettings, world: int) -> Copies:
    """Return the copies that `trainer.strategy` needs in a world of this many ranks.

    Both strategies hold Adam's two moments. DDP also holds a buffer to exchange gradients. FSDP2 holds a shard of the
    moments, the weights and the gradients. All weights, which the trial has, it needs for a validation.
    """
    if world > 1 and settings.strategy == "fsdp2":
        return Copies(4 / world, by_layer=True)
    return Copies(2 + (world > 1) + bool(settings.ema))


@dataclass(frozen=True)
class MemoryCheck:
    """Tries micro-batches with a copy of the network, so that nothing of the run changes.

    A trial holds everything that a run holds when its last micro-batch begins: the weights, the gradients of the
    earlier micro-batches, and `copies`.
    """

    network: Network
    planned_corpus: PlannedCorpus
    smoothing: float
    ranks: Ranks
    device: torch.device
    precision: AbstractContextManager[None]
    copies: Copies

    def run(self, seed: int) -> str:
        """What the most expensive micro-batches of the first epoch take, for people. Raises RunError."""
        cap = self.planned_corpus.settings.batch_tokens
        if not self._fits(cap, seed):
            raise RunError(self._too_large(cap, seed))
        return f"memory: {_peak(self.device)} for micro-batches of up to {cap:,} tokens"

    def _too_large(self, cap: int, seed: int) -> Problem:
        settings = self.planned_corpus.settings
        least = settings.context if isinstance(settings, LmSettings) else 2 * (settings.max_length + 1)
        rule = f"is {cap}: memory does not hold the largest micro-batch of the plan"
        if cap == least or not self._fits(least, seed):
            help = f"lower the sizes of the model, or the longest row: not even {least} tokens fit"
            return Problem("data.batch_tokens", rule, help=help)
        fits, fails = least, cap
        for _ in range(ROUNDS):
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if self._fits(middle, seed) else (fits, middle)
        fits = max(least, int(MARGIN * fits))
        return Problem("data.batch_tokens", rule, help=f"data.batch_tokens={fits} fits; it changes no result")

    def _fits(self, cap: int, seed: int) -> bool:
        """Whether the largest micro-batches under the cap run forward and backward."""
        settings = self.planned_corpus.settings.model_copy(update={"batch_tokens": cap})
        try:
            self._try(worst(replace(self.planned_corpus, settings=settings), seed, self.ranks))
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return False
            raise
        return True

    def _try(self, batches: Iterable[Batch]) -> None:
        network = deepcopy(self.network).to(self.device)
        own = next(self.network.parameters()).device == self.device  # the run's weights are there beside the trial's
        held = _copies(network.parameters(), max(0, self.copies.held - own))
        layers = [list(unit.parameters()) for unit in units_of(network)] if self.copies.by_layer else []
        held += _copies(max(layers, key=_bytes, default=[]), 2)  # gradients that are exchanged, and their buffer
        kept = _keep_gradients(network, set(chain.from_iterable(layers)))
        for batch in batches:
            with self.precision, torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                loss, _ = Objective(network, self.smoothing).loss(batch.to(self.device))
                loss.backward()  # type: ignore[no-untyped-call]
        exchanged = _copies(kept, self.copies.by_layer)
        del held, exchanged


def _copies(parameters: Iterable[Tensor], count: float) -> list[Tensor]:
    """Allocate memory for `count` copies of the parameters."""
    return [one.new_zeros(math.ceil(count * one.numel())) for one in parameters]


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(one.nbytes for one in parameters)


def _keep_gradients(network: Network, freed: Set[nn.Parameter]) -> list[nn.Parameter]:
    """Allocate the gradients that micro-batches add to, but for `freed`. Return the parameters that have them."""
    for one in freed:
        one.register_post_accumulate_grad_hook(_free_gradient)  # type: ignore[no-untyped-call]
    kept = [one for one in network.parameters() if one not in freed]
    for one in kept:
        one.grad = torch.zeros_like(one)
    return kept


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def worst(planned_corpus: PlannedCorpus, seed: int, ranks: Ranks) -> Iterator[Batch]:
    """Of the first epoch the micro-batch of most tokens, and the one of most products between its tokens if another."""
    plan = planned_corpus.plan(seed=seed, epoch=0)
    found = []
    for power in (1, 2):
        place = _largest(plan, power)
        shares = plan[place].share(ranks.rank, ranks.world)
        widths = [plan.widths_NC[rows_B].max(0).astype(np.int64) for rows_B in shares]
        costs = [len(rows_B) * (widths_C**power).sum() for rows_B, widths_C in zip(shares, widths, strict=True)]
        found.append((place, int(np.argmax(costs))))
    return (planned_corpus.batches(plan[place], ranks)[part] for place, part in dict.fromkeys(found))


def _largest(plan: EpochPlan, power: int) -> int:
    """The step with the micro-batch that costs most: as many rows, of its largest widths, as the cap admits."""
    widths_KC = np.maximum.reduceat(plan.widths_NC[plan.rows_N], plan.bounds_K1[:-1]).astype(np.int64)
    rows_K = np.minimum(np.diff(plan.bounds_K1), np.maximum(1, plan.batch_tokens // widths_KC.sum(1)))
    place = int(np.argmax(rows_K * (widths_KC**power).sum(1)))
    return int(np.flatnonzero(plan.order_K == place)[0])


def is_out_of_memory(error: BaseException) -> bool:
    """torch's allocator for processors raises a RuntimeError that is told by its words alone."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def _peak(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB of the device"
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    peak = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]  # in kB of 1,024 bytes
    return f"the process has taken {peak[0] * 1024 / 1e9:.2f} GB at most" if peak else "there is enough"
