"""Recurrent layers, alternatives to self-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.state import Recurrence, RecurrentState, apply_order, reading_order, restore_order
from tfm_blocks.registry.blocks import block


class Direction(nn.Module):
    """The maps of a unidirectional layer from the input x_BTD and the previous state h_BF to all gates."""

    weight_roles: ClassVar = {"hidden.weight": "recurrent"}

    def __init__(self, D: int, F: int, gates: int, bias: bool) -> None:
        super().__init__()
        self.input = Linear(D, gates * F, parts=gates, bias=bias)
        self.hidden = Linear(F, gates * F, parts=gates, bias=bias)
        self.input.selectable = self.hidden.selectable = False

    @property
    def weights(self) -> list[Tensor]:
        """Return the weights in torch's order: both matrices, then both biases if there are any."""
        matrices = [self.input.weight, self.hidden.weight]
        return matrices if self.input.bias is None else [*matrices, self.input.bias, self.hidden.bias]


class Recurrent(Recurrence):
    """x_BTD -> h_BTD. With `mask: causal` h_t depends on x_t and h_{t-1}; the initial h is 0.

    Without a mask the layer is bidirectional: the states of two layers of half the width are concatenated. An odd width
    raises ValueError.
    """

    gates: ClassVar[int]
    kernel: ClassVar[Callable[..., tuple[Tensor, ...]]]
    states: ClassVar[tuple[str, ...]] = ("h_RD",)

    def __init__(self, D: int, *, mask: Literal["causal"] | None = None, bias: bool = True) -> None:
        super().__init__()
        if mask is None and D % 2:
            raise ValueError(f"without a mask each direction has half of the width, but D = {D} is odd")
        self.bias = bias
        self.width = D if mask else D // 2
        self.forwards = Direction(D, self.width, self.gates, bias)
        self.backwards = None if mask else Direction(D, self.width, self.gates, bias)

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        return {name: like.new_zeros(rows, self.width) for name in self.states}

    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        return self._run(self.forwards, x_BTD, memory)

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Tensor:
        h_BTF = super().forward(x_BTD, keep_BT=keep_BT, right_padded_T=right_padded_T)
        if self.backwards is None:
            return h_BTF
        order_BT = reading_order(keep_BT, backward=True)
        back_BTF, _ = self._run(self.backwards, apply_order(x_BTD, order_BT), self.empty(x_BTD.shape[0], x_BTD))
        return torch.cat([h_BTF, restore_order(back_BTF, order_BT)], 2)

    def _run(self, direction: Direction, x_BTD: Tensor, memory: RecurrentState) -> tuple[Tensor, RecurrentState]:
        before = [memory[name][None].to(x_BTD.dtype) for name in self.states]
        initial = before if len(before) > 1 else before[0]
        options = self.bias, 1, 0.0, self.training, False, True  # torch's layer returns h_BTF, then the states after
        h_BTF, *after = self.kernel(x_BTD, initial, direction.weights, *options)
        return h_BTF, {name: state_1BF[0] for name, state_1BF in zip(self.states, after, strict=True)}


@block("rnn", "x: B T D -> B T D", branch=True, sees={"x": "mask"}, source="Elman 1990")
class RNN(Recurrent):
    """h_t = tanh(W x_t + b + U h_{t-1} + c): x_BTD -> h_BTD.

    Without a mask it is bidirectional: the states of two layers of half the width are concatenated. Training reads
    position by position: linear cost in the length. Decoding carries h.

    Also known as: Elman network, simple recurrent network.
    Use: comparisons with attention.
    """

    gates = 1
    kernel = staticmethod(torch.rnn_tanh)


@block("gru", "x: B T D -> B T D", branch=True, sees={"x": "mask"}, source="Cho et al. 2014, equations 5 to 8")
class GRU(Recurrent):
    """h_t = (1 - z) n + z h_{t-1}, n = tanh(W x_t + b + r (U h_{t-1} + c)): x_BTD -> h_BTD.

    The gates r and z are sigmoids of maps of x_t and h_{t-1}. As in torch, r multiplies the map of h_{t-1}, not h_{t-1}
    itself. Without a mask it is bidirectional: the states of two layers of half the width are concatenated. Training
    reads position by position: linear cost in the length. Decoding carries h.

    Also known as: gated recurrent unit.
    Use: a recurrence without a separate memory cell.
    """

    gates = 3
    kernel = staticmethod(torch.gru)


@block(
    "lstm",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    source="Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000",
)
class LSTM(Recurrent):
    """c_t = f c_{t-1} + i tanh(W x_t + b + U h_{t-1} + c), h_t = o tanh(c_t): x_BTD -> h_BTD.

    The gates i, f and o are sigmoids of maps of x_t and h_{t-1}. Without a mask it is bidirectional: the states of two
    layers of half the width are concatenated. Training reads position by position: linear cost in the length. Decoding
    carries h and c.

    Also known as: long short-term memory.
    Use: the recurrence of models before attention; `model=recurrent`.
    """

    gates = 4
    states = ("h_RD", "c_RD")
    kernel = staticmethod(torch.lstm)
