"""Optional methods of a block besides `forward`."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Generator, Tensor

from tfm_blocks.layers.state import State


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
