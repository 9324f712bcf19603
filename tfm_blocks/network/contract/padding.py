"""Rules on padding: the vectors at padded positions do not affect kept positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.language.spec import Axis
from tfm_blocks.network.contract.breach import expect_close, require_finite
from tfm_blocks.network.contract.case import PADDING, Case

GARBAGE = 1e3  # scale of the random vectors at padded positions
MASK = (
    "take the keep mask of the axis as a keyword-only parameter of forward, such as keep_BT for the axis T, "
    "and ignore the positions where it is false"
)
FINITE = "return finite values even if no position is kept, for example divide by keep.cumsum(1).clamp(min=1)"


@torch.no_grad()
def ignores_padding_that_comes_last(case: Case) -> None:
    """Check that garbage after the sequences does not change the output at kept positions."""
    if case.joins_sequences:
        return  # padding lies in the middle
    inputs, longer = case.tensors(), case.tensors(seed=5, longer=PADDING)
    alone = case.network(**inputs)
    padded = {name: _garbage(value) for name, value in longer.items()}
    for name, value in inputs.items():
        padded[name][:, : value.shape[1]] = value
    keep = {name: _first(padded[name], inputs[name].shape[1]) for name in inputs}
    output = case.network(keep=keep, **padded)
    require_finite(output, "with padding after the sequences", FINITE)
    expect_close(output[:, : alone.shape[1]], alone, "the content of padding changes kept positions", case.fix(MASK))


@torch.no_grad()
def ignores_padding_that_comes_first(case: Case) -> None:
    """Check that garbage before the sequences does not change the output at kept positions."""
    if case.joins_sequences:
        return
    inputs = case.tensors(longer=PADDING)
    lengths = {name: value.shape[1] for name, value in case.tensors().items()}
    keep = {name: _first(value, lengths[name]).flip(1) for name, value in inputs.items()}
    outputs = []
    for seed in (5, 6):
        garbage = {name: _garbage(value) for name, value in case.tensors(seed, PADDING).items()}
        mixed = {name: _where(keep[name], value, garbage[name]) for name, value in inputs.items()}
        outputs.append(case.network(keep=keep, **mixed))
        require_finite(outputs[-1], "with padding before the sequences", FINITE)
    axis = case.spec.sink.shape[1]
    kept = keep[axis.inputs[0]] if isinstance(axis, Axis) else slice(None)
    first, second = (output[kept] for output in outputs)
    expect_close(second, first, "the content of padding before the sequences changes kept positions", case.fix(MASK))


@torch.no_grad()
def ignores_padding_in_a_decoder(case: Case) -> None:
    """Check that padding with id 0 after the ids does not change the logits of a decoder."""
    if case.decoder is None:
        return
    network, ids, padded = case.decoder, case.decoder_tensors(), {}
    alone = network(**ids)
    for name, value in ids.items():
        added = int(min(PADDING, network.longest(name).tokens - value.shape[1]))
        padded[name] = F.pad(value, (0, added))
    output = network(**padded)
    require_finite(output, "with padding after the ids", FINITE)
    expect_close(output[:, : alone.shape[1]], alone, "in a decoder, padding changes kept positions", case.fix(MASK))


def _garbage(value: Tensor) -> Tensor:
    return value * GARBAGE if value.is_floating_point() else value


def _first(value: Tensor, length: int) -> Tensor:
    """Return a keep mask that is true at the first `length` positions."""
    return torch.arange(value.shape[1]).expand(value.shape[0], -1) < length


def _where(keep_BN: Tensor, value: Tensor, other: Tensor) -> Tensor:
    return torch.where(keep_BN.view(*keep_BN.shape, *[1] * (value.ndim - 2)), value, other)
