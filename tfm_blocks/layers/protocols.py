"""What a block may offer beside `forward`."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Generator, Tensor

from tfm_blocks.layers.state import State


@runtime_checkable
class Initialises(Protocol):
    """Fills its own parameter `name` with starting values from `generator`."""

    def initialise(self, name: str, generator: Generator) -> None:
        """Called once for each parameter that the module owns."""


@runtime_checkable
class Resets(Protocol):
    """A module of PyTorch, which fills all its parameters from the global generator."""

    def reset_parameters(self) -> None:
        """Called for each parameter that the module owns."""


@runtime_checkable
class Shrinks(Protocol):
    """Has starting values that very deep models make smaller."""

    def shrink(self, factor: float) -> None:
        """Multiplies them."""


@runtime_checkable
class Stepping(Protocol):
    """Decodes token by token."""

    def start(self, **given: Any) -> State:
        """The state of one call before the first token, from the ports and masks that do not depend on the target."""

    def step(self, x_R1D: Tensor, state: State, **given: Any) -> tuple[Tensor, State]:
        """The output at the next position of each hypothesis."""


@runtime_checkable
class Prefilling(Protocol):
    """Reads many positions of the target at once, from the first on."""

    def prefill(self, x_BPD: Tensor, state: State, **given: Any) -> tuple[Tensor, State]:
        """What as many steps would give, and the state after them."""


@runtime_checkable
class HasAttentionWeights(Protocol):
    """Has attention weights."""

    def weights(self, **given: Any) -> Tensor:
        """How much each head of each position looks at what: w_BHTS, of which each row adds up to 1."""


@runtime_checkable
class Bounded(Protocol):
    """Knows a limited number of positions."""

    max_length: int
