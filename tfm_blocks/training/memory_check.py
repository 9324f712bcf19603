"""Run the most expensive micro-batches of the plan before the first step, to detect insufficient memory early."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tfm_blocks.data.layout import Batch
from tfm_blocks.data.plan import Ranks
from tfm_blocks.devices import CPU, fork_generators, peak_memory, without_autocast
from tfm_blocks.errors import Problem, RunError
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import saved_weights
from tfm_blocks.training.data import PlannedCorpus
from tfm_blocks.training.fsdp2 import units_of
from tfm_blocks.training.groups import assign, count_state, count_trained
from tfm_blocks.training.objective import Objective
from tfm_blocks.training.settings import RunSettings

STATUS = Path("/proc/self/status")
ROUNDS = 6  # of bisection for the largest batch_tokens that fits
OF_THE_CPU = re.compile(r"DefaultCPUAllocator|could not create a primitive(?! descriptor)")
MARGIN = 0.9  # of the largest value that fits, because freed memory is fragmented


@dataclass(frozen=True)
class Copies:
    """The memory of a rank besides the weights and gradients of a step, in multiples of the trained weights.

    With `by_layer`, the gradients of a layer of a stack exist only until they are exchanged. `stepping` are the copies
    that exist only during the update.
    """

    held: float
    by_layer: bool = False
    stepping: float = 0.0


def copies_of(settings: RunSettings, network: Network, world: int) -> Copies:
    """Return the copies that `trainer.strategy` needs with `world` ranks.

    Both strategies hold the state of the optimizers. DDP also holds a buffer to exchange gradients. FSDP2 holds a shard
    of the state, the weights and the gradients. It needs all weights, which the check allocates, for a validation.
    """
    learned = assign(settings.optimizer, network)
    trained, state = count_trained(learned), count_state(learned)
    cautious = [one for one in learned if one.settings.get("cautious") and one.settings.get("weight_decay")]
    sizes = [one.weight.size for one in cautious]
    stepping = (sum(sizes) + 2 * max(sizes, default=0)) / trained  # the weights before a step, and two of the largest
    if world > 1 and settings.trainer.strategy == "fsdp2":
        weights = network.parameter_count
        return Copies((state + trained + weights) / trained / world, by_layer=True, stepping=stepping / world)
    averaged = sum(tensor.numel() for tensor in saved_weights(network).values()) if settings.trainer.ema else 0
    return Copies((state + averaged) / trained + (world > 1), stepping=stepping)


@dataclass(frozen=True)
class MemoryCheck:
    """Run micro-batches with a copy of the network, which shares its weights, so that the run itself does not change.

    The check allocates everything that a run holds when its last micro-batch begins: the weights, the gradients of the
    earlier micro-batches, and `copies`.
    """

    network: Network
    planned_corpus: PlannedCorpus
    objective: Objective
    ranks: Ranks
    device: torch.device
    precision: AbstractContextManager[None]
    copies: Copies

    def run(self, seed: int) -> str:
        """Return a line with the peak memory of the first epoch. Raises RunError if memory is insufficient."""
        cap = self.planned_corpus.settings.batch_tokens
        if self._fits(cap, seed):
            return f"memory: {_peak(self.device)} before step 1, with micro-batches of up to {cap:,} tokens"
        least = smallest_cap(self.planned_corpus)
        rule = f"is {cap}: the largest micro-batch of the plan does not fit in memory"
        if cap <= least or not self._fits(least, seed):
            help = f"lower the sizes of the model, or the longest row: not even {least} tokens fit"
            raise RunError(Problem("data.batch_tokens", rule, help=help))
        fits, fails = least, cap
        for _ in range(ROUNDS):
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if self._fits(middle, seed) else (fits, middle)
        fits = max(least, int(MARGIN * fits))
        help = f"data.batch_tokens={fits} fits; it changes results only through random draws such as dropout"
        raise RunError(Problem("data.batch_tokens", rule, help=help))

    def _fits(self, cap: int, seed: int) -> bool:
        """Return True if the largest micro-batches with at most `cap` tokens run forward and backward."""
        settings = self.planned_corpus.settings.model_copy(update={"batch_tokens": cap})
        try:
            self._try(worst(replace(self.planned_corpus, settings=settings), seed, self.ranks))
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return False
            raise
        return True

    def _try(self, batches: Iterable[Batch]) -> None:
        own = self.network.parameters()
        shared = {id(one): nn.Parameter(one.detach(), one.requires_grad) for one in own}  # without a second allocation
        network = deepcopy(self.network, shared).to(self.device)
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        held = _copies(trained, self.copies.held)
        units = units_of(network) if self.copies.by_layer else []
        layers = [[one for one in unit.parameters() if one.requires_grad] for unit in units]
        largest = max(layers, key=lambda layer: sum(one.nbytes for one in layer), default=[])
        held += _copies(largest, 2)  # gradients that are exchanged, and their buffer
        freed = set(chain.from_iterable(layers))
        for parameter in freed:
            parameter.register_post_accumulate_grad_hook(_free_gradient)  # type: ignore[no-untyped-call]
        kept = [parameter for parameter in trained if parameter not in freed]
        for parameter in kept:
            parameter.grad = torch.zeros_like(parameter)
        begun = ["model"]
        for call in network.all_calls:
            call.block.register_forward_pre_hook(lambda block, arguments, address=call.address: begun.append(address))
        objective = self.objective.with_network(network)
        for batch in batches:
            with self.precision, fork_generators(self.device):
                try:
                    loss, _ = objective.loss(batch.to(self.device))
                    with without_autocast(self.device):
                        loss.backward()  # type: ignore[no-untyped-call]
                except (NotImplementedError, TypeError) as error:
                    if self.device.type == CPU:
                        raise
                    rule = f"{self.device.type} lacks an operation of this node: {str(error).splitlines()[0]}"
                    help = "train on the CPU, trainer.accelerator=cpu, or change the node"
                    raise RunError(Problem(begun[-1], rule, help=help)) from error
        exchanged = [*_copies(kept, self.copies.by_layer), *_copies(trained, self.copies.stepping)]
        del held, exchanged


def smallest_cap(planned_corpus: PlannedCorpus) -> int:
    """Return the least `batch_tokens` that the settings allow: the tokens of the longest row."""
    settings, longest = planned_corpus.settings, int(planned_corpus.layout.longest_C(planned_corpus.corpus).sum())
    if settings.kind == "probe":
        return longest
    return max(longest, settings.context if settings.kind == "lm" else 2 * (settings.max_length + 1))


def _copies(parameters: Iterable[Tensor], count: float) -> list[Tensor]:
    """Allocate memory for `count` copies of the parameters."""
    return [parameter.new_zeros(math.ceil(count * parameter.numel())) for parameter in parameters]


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def worst(planned_corpus: PlannedCorpus, seed: int, ranks: Ranks) -> Iterator[Batch]:
    """Return the micro-batch of the first epoch with the most tokens, and the one with the most pairs of tokens.

    If they are the same micro-batch, it is returned once.
    """
    plan = planned_corpus.plan(seed=seed, epoch=0)
    largest = []
    for power in (1, 2):
        widths_KC = np.maximum.reduceat(plan.widths_NC[plan.rows_N], plan.bounds_K1[:-1]).astype(np.int64)
        rows_K = np.minimum(np.diff(plan.bounds_K1), np.maximum(1, plan.batch_tokens // widths_KC.sum(1)))
        group = int(np.argmax(rows_K * (widths_KC**power).sum(1)))
        step = int(np.flatnonzero(plan.order_K == group)[0])
        shares = plan[step].share(ranks)
        widths = [plan.widths_NC[rows_B].max(0).astype(np.int64) for rows_B in shares]
        costs = [len(rows_B) * (widths_C**power).sum() for rows_B, widths_C in zip(shares, widths, strict=True)]
        largest.append((step, int(np.argmax(costs))))
    return (planned_corpus.batches(plan[step], ranks)[part] for step, part in dict.fromkeys(largest))


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for errors of insufficient memory. On a CPU, torch and oneDNN raise a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or bool(OF_THE_CPU.search(str(error)))


def _peak(device: torch.device) -> str:
    if allocated := peak_memory(device):
        return f"peak {allocated / 1e9:.2f} GB of the device"
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    peak = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]  # in kB of 1,024 bytes
    return f"peak {peak[0] * 1024 / 1e9:.2f} GB of the process" if peak else "sufficient"
