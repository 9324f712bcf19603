"""The methods of a block besides `forward`, the decoding state that they carry, and base classes with such a state.

State belongs to the call. Recurrences, and convolutions over the last positions, have a state of fixed size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

SHORT_KERNEL, LONG_SEQUENCE = 4, 1024  # for longer sequences, training applies such kernels as shifts
RecurrentState = dict[str, Tensor]


class CacheShape(NamedTuple):
    """The shape of caches: one row per sentence, `length` target positions, and the dtype and device of `like`."""

    rows: int
    length: int
    like: Tensor

    def cache(self, heads: int, width: int) -> Tensor:
        """Allocate an uninitialised cache_BHTMK with one hypothesis per sentence."""
        return self.like.new_empty(self.rows, heads, self.length, 1, width)


@dataclass
class State:
    """The state of a call: tensors by name, rows first.

    `fixed` does not depend on the target: one row per sentence. `caches` are BHTMK, for M hypotheses per sentence,
    filled up to `position`. A search does not move them when it reorders hypotheses; `path_BMTM` records the ancestors:
    [b, m, t, k] is true if hypothesis k at position t is the ancestor of m. `moving` is all other state that a step
    changes: one row per hypothesis.
    """

    fixed: dict[str, Tensor] = field(default_factory=dict)
    caches: dict[str, Tensor] = field(default_factory=dict)
    moving: dict[str, Tensor] = field(default_factory=dict)
    position: int = 0
    hypotheses: int = 1
    path_BMTM: Tensor | None = None

    def fold_beams(self, x_R1D: Tensor) -> Tensor:
        """Fold the M hypotheses of a sentence into positions: x_BMD."""
        return x_R1D.view(-1, self.hypotheses, x_R1D.shape[2])

    def append(self, name: str, x_BHMK: Tensor, window: int | None = None, dilation: int = 1) -> Tensor:
        """Write to a cache at the current position; return the `past` positions of all hypotheses: x_BHNK."""
        self.caches[name][:, :, self.position] = x_BHMK
        return self.caches[name][:, :, self.past(window, dilation)].flatten(2, 3)

    def fill(self, **x_BHPK: Tensor) -> None:
        """Fill the caches from the first position on, for one hypothesis per sentence."""
        for name, value_BHPK in x_BHPK.items():
            self.caches[name][:, :, : value_BHPK.shape[2], 0] = value_BHPK

    def beam_mask(self, window: int | None = None, dilation: int = 1) -> Tensor | None:
        """Return a mask over the output of `append`, true at a hypothesis's own past: mask_B1MN; None if all is."""
        return None if self.path_BMTM is None else self.path_BMTM[:, :, self.past(window, dilation)].flatten(2)[:, None]

    def past(self, window: int | None = None, dilation: int = 1) -> slice:
        """Return the last `window` positions up to the current one, `dilation` apart."""
        count = self.position // dilation + 1
        return slice(self.position - dilation * (min(window or count, count) - 1), self.position + 1, dilation)


class Positional(nn.Module):
    """A block that decodes from the index of the next position alone: its state has nothing else."""

    def start(self, *, room: CacheShape) -> State:
        return State()

    def prefill(self, x_BPD: Tensor, state: State) -> tuple[Tensor, State]:
        return self(x_BPD), state


@runtime_checkable
class Initialises(Protocol):
    """A module that initialises its own parameters."""

    def initialise(self, name: str, generator: Generator) -> None:
        """Fill the module's own parameter `name` from `generator`; called once for each."""


@runtime_checkable
class Resets(Protocol):
    """A PyTorch module that fills all its parameters from the global generator."""

    def reset_parameters(self) -> None:
        """Fill all parameters; called for each parameter that the module owns."""


@runtime_checkable
class Shrinks(Protocol):
    """A module whose initial values deepnorm scales down."""

    def shrink(self, factor: float) -> None:
        """Multiply the initial values on the path to the residual by `factor`."""


@runtime_checkable
class MatchesBase(Protocol):
    """A module with constants that depend on widths, such as 1/√K, which a parametrisation changes."""

    def match_base(self, base: Self) -> None:
        """Set the constants so that learning does not depend on the widths; unchanged at the widths of `base`."""


@runtime_checkable
class Stepping(Protocol):
    """A block that decodes token by token."""

    def start(self, **inputs: Any) -> State:
        """Return the state before the first token, from the ports and masks that do not depend on the target."""

    def step(self, x_R1D: Tensor, state: State, **inputs: Any) -> tuple[Tensor, State]:
        """Return the output at the next position of each hypothesis, and the state."""


@runtime_checkable
class Prefilling(Protocol):
    """A block that reads the first target positions in one pass."""

    def prefill(self, x_BPD: Tensor, state: State, **inputs: Any) -> tuple[Tensor, State]:
        """Return the outputs of P steps, and the state after them."""


@runtime_checkable
class HasAttentionWeights(Protocol):
    """A block with attention weights."""

    def weights(self, **inputs: Any) -> Tensor:
        """Return the attention weights w_BHTS; each row sums to 1."""


@runtime_checkable
class HasComputedValues(Protocol):
    """A block that computes values which other libraries store, such as sinusoidal positions."""

    def computed_values(self, like: Tensor) -> Tensor:
        """Return the values that the tensor `like` should store, with the dtype and device of `like`."""


@runtime_checkable
class Bounded(Protocol):
    """A block, or a position of attention, with a maximum sequence length, or None."""

    max_length: int | None


def max_length_of(block: nn.Module) -> int | None:
    """Return the maximum sequence length of a block and its parts, or None."""
    bounded = (part.max_length for part in block.modules() if isinstance(part, Bounded))
    return min((length for length in bounded if length is not None), default=None)


class Recurrence(nn.Module, ABC):
    """A block that reads x_BTD from left to right, and decodes from the memory of the earlier positions.

    Right padding cannot affect kept positions; other padding is skipped.
    """

    @abstractmethod
    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        """Return the memory before the first position, one row per sequence, with the device and dtype of `like`."""

    @abstractmethod
    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        """Return the outputs of the next T positions, which begin at `first`, and the memory after them."""

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Tensor:
        if right_padded_T:
            return self._read_all(x_BTD)
        order_BT = reading_order(keep_BT)
        return restore_order(self._read_all(apply_order(x_BTD, order_BT)), order_BT)

    def _read_all(self, x_BTD: Tensor) -> Tensor:
        return self.read(x_BTD, self.empty(x_BTD.shape[0], x_BTD), 0)[0]

    def start(self, *, room: CacheShape) -> State:
        return State(moving=self.empty(room.rows, room.like))

    def step(self, x_RND: Tensor, state: State) -> tuple[Tensor, State]:
        y_RND, state.moving = self.read(x_RND, state.moving, state.position)
        return y_RND, state

    prefill = step


def wide_zeros(like: Tensor, *sizes: int) -> Tensor:
    """Return zeros on the device of `like`, in float32 or wider, for a memory that sums over many positions."""
    return like.new_zeros(sizes, dtype=torch.promote_types(like.dtype, torch.float32))


def reading_order(keep_BT: Tensor, *, backward: bool = False) -> Tensor:
    """Return order_BT: the positions of each row that are not padding, from the left or the right, then the padding."""
    T = keep_BT.shape[1]
    place_T = torch.arange(T, device=keep_BT.device)
    return torch.where(keep_BT, place_T.flip(0) if backward else place_T, place_T + T).argsort(1)


def apply_order(x_BTD: Tensor, order_BT: Tensor) -> Tensor:
    """Return x_BTD with its positions in that order."""
    return x_BTD.gather(1, order_BT[:, :, None].expand_as(x_BTD))


def restore_order(y_BTD: Tensor, order_BT: Tensor) -> Tensor:
    return apply_order(y_BTD, order_BT.argsort(1))


def mean_of_kept(x_BNX: Tensor, keep_BN: Tensor) -> Tensor:
    """Return the mean over the positions that are not padding, or 0 if all are: x_BNX -> y_BX, for any axes X."""
    keep = keep_BN.view(*keep_BN.shape, *[1] * (x_BNX.ndim - 2)).to(x_BNX.dtype)
    return (x_BNX * keep).sum(1) / keep.sum(1).clamp(min=1)


def continue_from(past_RLD: Tensor, x_RND: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate the last L inputs and the next N: x_R(L+N)D. The second output is the new last L inputs."""
    x_RMD = torch.cat((past_RLD.to(x_RND.dtype), x_RND), 1)
    return x_RMD, x_RMD[:, x_RND.shape[1] :]


def convolve_channels(x_BLD: Tensor, weight_DK: Tensor, bias_D: Tensor | None = None, padding: int = 0) -> Tensor:
    """Convolve each channel with its own kernel of K positions: x_BLD -> y_BTD, with T = L - K + 1 + 2 · `padding`.

    `padding` zeros are added at both ends. The product is a conv2d of height 1: on CPUs, the backward pass of a
    depthwise conv1d takes four times as long. For short kernels and long sequences, training adds shifted inputs
    instead, in less than half of the time.
    """
    L, K = x_BLD.shape[1], weight_DK.shape[1]
    if torch.is_grad_enabled() and K <= SHORT_KERNEL and L > LONG_SEQUENCE:
        x_BLD = F.pad(x_BLD, (0, 0, padding, padding))
        T, y_BTD = L + 2 * padding - K + 1, x_BLD.new_zeros(()) if bias_D is None else bias_D
        for first, weight_D in enumerate(weight_DK.unbind(1)):
            y_BTD = torch.addcmul(y_BTD, x_BLD[:, first : first + T], weight_D)
        return y_BTD.to(x_BLD.dtype)
    x_BD1L, weight_D11K = x_BLD.mT[:, :, None], weight_DK[:, None, None]
    return F.conv2d(x_BD1L, weight_D11K, bias_D, padding=(0, padding), groups=len(weight_DK))[:, :, 0].mT


class SlidingKernel(Recurrence):
    """A convolution that decodes from the last `before` inputs of the width `channels`, initially 0."""

    before: int
    channels: int

    @abstractmethod
    def slide(self, x_BLD: Tensor) -> Tensor:
        """Return the outputs at positions where the whole kernel fits: x_BLD -> x_BTD."""

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        return {"past_RLD": like.new_zeros(rows, self.before, self.channels)}

    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        x_BMD, past_BLD = continue_from(memory["past_RLD"], x_BTD)
        return self.slide(x_BMD), {"past_RLD": past_BLD}
