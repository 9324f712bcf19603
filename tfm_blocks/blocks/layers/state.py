"""The methods of a block besides `forward`, and the decoding state that they carry. State belongs to the call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Generator, Tensor, nn


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
class Bounded(Protocol):
    """A block with a maximum sequence length."""

    max_length: int
