"""Expectations on tensors, and rules on incremental decoding: each raises BreachError with a measurement and a fix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tfm_blocks.language.spec import TARGET
from tfm_blocks.network import incremental
from tfm_blocks.network.contract.case import BATCH, SOURCE, Case
from tfm_blocks.network.graph import Network

STEP = "return from step and prefill what forward returns for the tokens so far; store those tokens in State"
ORDER = "store all that differs between hypotheses in State.moving or by state.append, and nothing on the module"
LENGTH, FIRST = 6, 2  # target positions of the search, and how many of them prefill reads
CLOSE = 1e-5  # times the largest expected value, or times 1 if that is larger


class BreachError(Exception):
    """Raised if a block breaks a rule: `measured` completes a sentence that begins with its name, `fix` is a fix."""

    def __init__(self, measured: str, fix: str) -> None:
        super().__init__(f"{measured}; {fix}")
        self.measured = measured
        self.fix = fix


def differing(actual: Tensor, expected: Tensor) -> Tensor:
    """Return a mask of the elements that differ by more than rounding; NaN differs from everything."""
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return ~((actual - expected).abs() <= CLOSE * scale)


def expect_close(actual: Tensor, expected: Tensor, measured: str, fix: str) -> None:
    """Raise BreachError unless the tensors are equal to rounding; the largest difference is appended to `measured`."""
    if differing(actual, expected).any():
        raise BreachError(f"{measured} {largest_difference(actual, expected)}", fix)


def require_finite(actual: Tensor, measured: str, fix: str) -> None:
    """Raise BreachError if a value is NaN or infinite; `measured` names the condition."""
    wrong = int((~actual.isfinite()).sum())
    if wrong:
        raise BreachError(f"{wrong} of {actual.numel()} values of its output are NaN or infinite {measured}", fix)


def largest_difference(actual: Tensor, expected: Tensor) -> str:
    """Format the largest absolute difference."""
    largest = float(torch.max((actual - expected).abs()))
    return f"by up to {largest:.2g}" if math.isfinite(largest) else "to NaN or infinity"


@torch.no_grad()
def steps_as_it_reads(case: Case) -> None:
    """Check that a step equals the forward pass after a prefill of any length."""
    if case.decoder is None:
        return
    inputs = case.decoder_tensors()
    if SOURCE in inputs:
        inputs[SOURCE][1, 4:] = 0
    expect_steps(case.decoder, inputs, range(inputs[TARGET].shape[1]), case.fix(STEP))


def expect_steps(network: Network, inputs: Mapping[str, Tensor], prefixes: Iterable[int], fix: str = STEP) -> None:
    """Raise BreachError unless each step after a prefix of these lengths gives the logits of the forward pass."""
    whole_BTV, tgt_BT = network(**inputs), inputs[TARGET]
    sources = {name: value for name, value in inputs.items() if name != TARGET}
    for first in prefixes:
        decoding = incremental.start(network, sources, tgt_BT.shape[1], sentences=len(tgt_BT))
        if first:
            x_BPD, decoding = incremental.prefill(network, tgt_BT[:, :first], decoding)
            measured = f"the first {first} positions read at once differ from forward"
            expect_close(network.head(x_BPD), whole_BTV[:, :first], measured, fix)
        for position in range(first, tgt_BT.shape[1]):
            x_BD, decoding = incremental.step(network, tgt_BT[:, position], decoding)
            measured = f"step at position {position}, after {first} positions read at once, differs from forward"
            expect_close(network.head(x_BD), whole_BTV[:, position], measured, fix)


@torch.no_grad()
def steps_in_a_search(case: Case) -> None:
    """Check that a step equals the forward pass after a search reordered its hypotheses and dropped a sentence."""
    network = case.decoder
    if network is None or network.longest(TARGET).tokens < LENGTH:
        return
    sources = {name: value for name, value in case.decoder_tensors().items() if name == SOURCE}
    wide = {name: value.repeat_interleave(2, 0) for name, value in sources.items()}
    tgt_BMT = torch.randint(1, 11, (BATCH, 2, LENGTH), generator=torch.Generator().manual_seed(3))
    tgt_BMT[:, :, :FIRST] = tgt_BMT[:, :1, :FIRST]
    decoding = incremental.start(network, sources, LENGTH, sentences=BATCH)
    _, decoding = incremental.prefill(network, tgt_BMT[:, 0, :FIRST], decoding)
    decoding = incremental.spread(decoding, 2)
    for position in range(FIRST, LENGTH):
        x_RD, decoding = incremental.step(network, tgt_BMT[:, :, position].flatten(), decoding)
        whole_RTV = network(**wide, tgt=tgt_BMT[:, :, : position + 1].flatten(0, 1))
        measured = f"in a beam search, step at position {position} differs from forward"
        expect_close(network.head(x_RD), whole_RTV[:, -1], measured, case.fix(ORDER))
        if position == FIRST + 1:
            chosen = torch.tensor([2, 0])
            decoding, tgt_BMT = incremental.select(decoding, chosen), tgt_BMT[chosen]
            wide = {name: value[chosen].repeat_interleave(2, 0) for name, value in sources.items()}
        origin_BM = torch.tensor([[1, 0], [0, 0], [1, 1]])[: len(tgt_BMT)]
        incremental.reorder(decoding, origin_BM)
        tgt_BMT[:, :, : position + 1] = tgt_BMT[:, :, : position + 1].take_along_dim(origin_BM[:, :, None], 1)
