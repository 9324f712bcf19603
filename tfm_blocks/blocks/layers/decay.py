"""Memories that decay from position to position, in parallel within chunks of positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

CHUNK = 32  # positions computed in parallel; the memory is carried from chunk to chunk
DIRECT = 8  # positions whose decays are computed pair by pair
SLOWEST, FASTEST = 0.001, 0.1  # range of the initial step sizes
STRONGEST = 16.0  # maximum of the initial rates, which multiply the step sizes
ERASED = -104.0  # the logarithm of a decay that is 0 in float32


class Decay(NamedTuple):
    """Fractions of the memory that remain, for C positions of a chunk; leading axes equal the rates'.

    The last axis of the first three is the keys' width, or 1 if all channels of a head decay alike. `passed`_CK: the
    logarithm of `since_start`; `since_start`_CK: from before the chunk to each position; `until_end`_CK: from each
    position to the last; `whole`_K1: from before the chunk to the last.
    """

    passed: Tensor
    since_start: Tensor
    until_end: Tensor
    whole: Tensor

    def products(self, k_BHCK: Tensor, *queries: Tensor) -> Iterable[Tensor]:
        """Return the products of each q_BHCK (rows) with the decayed keys (columns): BHCC, 0 for later keys."""
        if self.passed.shape[-1] > 1:
            return products_by_halves(torch.stack(queries), k_BHCK, self.passed).unbind(0)
        between_BHCC = _between(self.passed)[..., 0]
        return [q_BHCK @ k_BHCK.mT * between_BHCC for q_BHCK in queries]


def decay(log_rate_CK: Tensor) -> Decay:
    """Return the decay of a memory whose row k position c multiplies by exp(log_rate_CK[c, k]) before it adds.

    Rates are bounded where their decay is 0, because a large sum would lose the digits of the rates after it.
    """
    passed_CK = log_rate_CK.clamp(min=ERASED).cumsum(-2)
    last_1K = passed_CK[..., -1:, :]
    return Decay(passed_CK, passed_CK.exp(), (last_1K - passed_CK).exp(), last_1K.mT.exp())


def _between(passed_CK: Tensor) -> Tensor:
    """Return the decay from a position (column) to itself or a later one (row), else 0: between_CCK."""
    later_CC1 = torch.ones_like(passed_CK[..., :1] * passed_CK[..., None, :, 0], dtype=torch.bool).triu(1)[..., None]
    return (passed_CK[..., :, None, :] - passed_CK[..., None, :, :]).masked_fill(later_CC1, -torch.inf).exp()


def products_by_channel(q_XBHCK: Tensor, k_BHCK: Tensor, passed_BHCK: Tensor) -> Tensor:
    """Compute `Decay.products` for channels with separate rates, pair by pair."""
    return (q_XBHCK[..., :, None, :] * (k_BHCK[..., None, :, :] * _between(passed_BHCK))).sum(-1)


def products_by_halves(q_XBHCK: Tensor, k_BHCK: Tensor, passed_BHCK: Tensor) -> Tensor:
    """Compute the same as `products_by_channel`, faster for long chunks.

    From the first half of the positions to the second, decays are products of the decays to and from the middle, none
    of which is above 1, so a product of matrices sums over channels. The halves are divided in the same way.
    """
    half = k_BHCK.shape[-2] // 2
    if half < DIRECT or torch.compiler.is_exporting():  # the number of positions would be fixed
        return products_by_channel(q_XBHCK, k_BHCK, passed_BHCK)
    q, k, passed = (x.tensor_split((half,), -2) for x in (q_XBHCK, k_BHCK, passed_BHCK))
    middle_BH1K = passed[0][..., -1:, :]
    across = (q[1] * (passed[1] - middle_BH1K).exp()) @ (k[0] * (middle_BH1K - passed[0]).exp()).mT
    first, second = map(products_by_halves, q, k, passed)
    return torch.cat((F.pad(first, (0, across.shape[-2])), torch.cat((across, second), -1)), -2)


def by_chunks(read: Callable[..., tuple[Tensor, Tensor]], memory_BHKV: Tensor, *x_BHT: Tensor) -> tuple[Tensor, Tensor]:
    """Apply `read(memory_BHKV, *chunk)` to each chunk in turn; return the outputs of all positions and the last memory.

    The tensors have their positions on the third axis, such as q_BHTK. Autocast is off: products with a float32 memory
    are float32. torch.export reads all positions as one chunk, because it would fix the number of chunks.
    """
    if torch.compiler.is_exporting():
        return read(memory_BHKV, *x_BHT)
    outputs = []
    device = "cpu" if memory_BHKV.is_meta else memory_BHKV.device.type  # the meta device has no autocast
    with torch.autocast(device, enabled=False):
        for chunk in zip(*(torch.split(x, CHUNK, 2) for x in x_BHT), strict=True):
            y_BHCV, memory_BHKV = read(memory_BHKV, *chunk)
            outputs.append(y_BHCV)
    return torch.cat(outputs, 2), memory_BHKV


def decayed_sum(
    memory_BHKV: Tensor, q_BHCK: Tensor, k_BHCK: Tensor, v_BHCV: Tensor, log_rate_BHCK: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one chunk of S_t = exp(log_rate_t) S_{t-1} + k_t^T v_t, y_t = q_t S_t: y and the last memory."""
    fade = decay(log_rate_BHCK)
    (of_queries_BHCC,) = fade.products(k_BHCK, q_BHCK)
    y_BHCV = of_queries_BHCC @ v_BHCV + (q_BHCK * fade.since_start) @ memory_BHKV
    return y_BHCV, memory_BHKV * fade.whole + (k_BHCK * fade.until_end).mT @ v_BHCV


def fill_log_rates(rate_H: Tensor, generator: Generator) -> None:
    """Fill with logarithms of rates that are uniform between 1 and 16, as in Mamba-2."""
    nn.init.uniform_(rate_H, 1.0, STRONGEST, generator=generator).log_()


def fill_step_biases(bias_H: Tensor, generator: Generator) -> None:
    """Fill with biases whose softplus is log-uniform between the smallest and the largest step size, as in Mamba."""
    nn.init.uniform_(bias_H, math.log(SLOWEST), math.log(FASTEST), generator=generator)
    bias_H.exp_().expm1_().log_()
