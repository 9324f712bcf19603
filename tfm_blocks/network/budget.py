"""Budgets under which models are compared: parameters, multiply-adds and decoding state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import count_parameters, network_without_values
from tfm_blocks.network.cost import axis_lengths, decoding_state, multiply_adds


@dataclass(frozen=True)
class Budget:
    """A cost that models can have in common.

    `unit` names it in messages. `within` is the largest relative difference that counts as equal. `measure` computes
    the cost for one sentence of LENGTH tokens per input.
    """

    unit: str
    within: float
    measure: Callable[[Spec], int]


def _multiply_adds(spec: Spec) -> int:
    network = network_without_values(spec)
    return sum(multiply_adds(network, axis_lengths(network, {})).values())


def _decoding_state(spec: Spec) -> int:
    network = network_without_values(spec)
    return decoding_state(network, axis_lengths(network, {}))


BUDGETS = {
    "parameters": Budget("parameters", 0.005, count_parameters),
    "multiply_adds": Budget("multiply-adds", 0.01, _multiply_adds),
    "decode_state": Budget("floats of decoding state", 0.01, _decoding_state),
}
