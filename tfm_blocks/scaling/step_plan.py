"""Compute the memory, the communication and the time of a training step from its trace and the figures of a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import network_without_values
from tfm_blocks.scaling.card import Card
from tfm_blocks.scaling.step_trace import Batching, StepTrace, trace_step
from tfm_blocks.training.fsdp2 import units_of

FLOAT32 = 4  # bytes of a weight, of its gradient and of each moment; autocast changes none of them
MOMENTS = 2  # of Adam and AdamW
TRANSFERS = 7  # floats of Adam per weight: reads weight, gradient and moments; writes weight and moments


@dataclass(frozen=True)
class StepSettings:
    """The settings of `trainer` that change the cost of a step."""

    precision: Literal["bf16", "fp32"]
    strategy: Literal["ddp", "fsdp2"]
    activation_checkpointing: bool


@dataclass(frozen=True)
class Weights:
    """The bytes of all weights, of the weights outside of the layers of stacks, and of the largest layer."""

    all: int
    outside: int
    layer: int


@dataclass(frozen=True)
class StepPlan:
    """The cost of a step of one micro-batch for each device. Bytes and counts are per device; times are in seconds.

    `activations` are the bytes that the trunk keeps for the backward pass. `exchange` are gathered weights and the
    buffers of gradients. `peak` is the maximum of all bytes. It is not the sum of the parts: the gradients appear
    while the activations are freed, and the head computes with a chunk of logits. `step_seconds` is the longest of the
    three times, for a perfect overlap.
    """

    devices: int
    rows: int
    weights: int
    gradients: int
    optimizer: int
    exchange: int
    activations: int
    peak: int
    multiply_adds: int
    traffic: int
    sent: int
    arithmetic_seconds: float | None
    traffic_seconds: float | None
    communication_seconds: float | None
    step_seconds: float | None


def plan_steps(
    spec: Spec, batching: Batching, settings: StepSettings, card: Card, devices: list[int]
) -> list[StepPlan]:
    """Plan a step of a model for each number of devices. Raises ConfigError. Nothing is allocated."""
    for count in devices:
        if count > card.cards_per_node and count % card.cards_per_node and card.network:
            rule = f"must be at most {card.cards_per_node}, the cards of a node, or a multiple of it, but is {count}"
            full = count - count % card.cards_per_node
            raise ConfigError(Problem("--devices", rule, help=f"write --devices {full}"))
    bf16, recomputes = settings.precision == "bf16", settings.activation_checkpointing
    trace = trace_step(spec, batching, device=card.device, bf16=bf16, recomputes=recomputes)
    weights = _weights(spec)
    return [_plan(trace, weights, batching.rows, settings, card, count) for count in devices]


def _weights(spec: Spec) -> Weights:
    network = network_without_values(spec)
    layers = [sum(parameter.numel() for parameter in layer.parameters()) * FLOAT32 for layer in units_of(network)]
    every = sum(parameter.numel() for parameter in network.parameters()) * FLOAT32
    return Weights(every, every - sum(layers), max(layers, default=0))


def _plan(trace: StepTrace, weights: Weights, rows: int, settings: StepSettings, card: Card, devices: int) -> StepPlan:
    sharded = settings.strategy == "fsdp2" and devices > 1
    held = weights.all // devices if sharded else weights.all
    exchange = _exchange(weights, sharded) if devices > 1 else 0
    peak = 2 * held + trace.peak_besides if sharded else trace.peak
    traffic = trace.traffic + TRANSFERS * held
    sent = _sent(weights, sharded, devices)
    rate = card.bf16 if settings.precision == "bf16" else card.fp32
    times = (
        2 * trace.multiply_adds / (rate * 1e12 * card.utilisation) if rate else None,
        traffic / (card.bandwidth * 1e9) if card.bandwidth else None,
        _communication_seconds(sent, card, devices),
    )
    known = [time for time in times if time is not None]
    return StepPlan(
        devices, rows, held, held, MOMENTS * held, exchange, trace.kept, peak + MOMENTS * held + exchange,
        trace.multiply_adds, traffic, sent, *times, max(known) if len(known) == len(times) else None,
    )  # fmt: skip


def _exchange(weights: Weights, sharded: bool) -> int:
    """Return the bytes of buffers and gathered weights.

    DDP copies all gradients into buckets. FSDP2 gathers the weights outside of stacks and two layers, one of them in
    advance, and has the gradients of a layer twice: as they are computed, and in the buffer that is exchanged.
    """
    return weights.outside + 2 * weights.layer + 2 * weights.layer if sharded else weights.all


def _sent(weights: Weights, sharded: bool, devices: int) -> int:
    """Return the bytes that a device sends in a step, with the ring algorithms of NCCL.

    DDP reduces all gradients to all devices. FSDP2 gathers the layers for each of the two passes and the other weights
    once, and scatters the sums of the gradients.
    """
    gathered = 2 * (weights.all - weights.outside) + weights.outside
    total = gathered + weights.all if sharded else 2 * weights.all
    return total * (devices - 1) // devices


def _communication_seconds(sent: int, card: Card, devices: int) -> float | None:
    """Return the time at the slower of a card's link and the network of its node, which all its cards share."""
    if devices == 1:
        return 0.0
    speeds = [card.link]
    if devices > card.cards_per_node:
        speeds.append(card.network and card.network * card.cards_per_node)
    known = [speed for speed in speeds if speed]
    return sent / (min(known) * 1e9) if len(known) == len(speeds) else None
