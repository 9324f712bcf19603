"""Compute the memory, the communication and the time of a training step from its trace and the figures of a card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

from tfm_blocks.config.settings import Above0, Count, Settings, read_settings
from tfm_blocks.errors import config_error, counted, shown, suggest
from tfm_blocks.language.files import read_yaml_file
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.matching import saved_weights
from tfm_blocks.report.table import Cell, Column, Table, Value
from tfm_blocks.scaling.kernels import KERNELS
from tfm_blocks.scaling.step_trace import PLAIN_OBJECTIVE, Batching, PlannedObjective, StepTrace, trace_step
from tfm_blocks.training.fsdp2 import units_of
from tfm_blocks.training.groups import assign, count_state, count_trained, frozen_by_groups
from tfm_blocks.training.optimizer_settings import OptimizerSettings, read_optimizer

FOLDER = files("tfm_blocks.scaling") / "cards"
SUFFIX = ".yaml"
FLOAT32 = 4  # bytes of a weight, of its gradient and of each number of the optimizer; autocast changes none of them
EXCHANGED = ("exchange", "sent", "communication_seconds")  # empty for a single device, which exchanges nothing


class Card(Settings):
    """A device with its connections; a plan leaves out the times that an unknown figure would need.

    device: whose kernels the plan counts. memory: GB. bandwidth: of the memory, GB/s. bf16, fp32: TFLOP/s of products.
    utilisation: the fraction of them that training reaches. link: GB/s that a card sends within a node. network: GB/s
    that a card sends to other nodes. cards_per_node: cards that `link` connects.
    """

    name: str
    device: Literal[*KERNELS]  # type: ignore[valid-type]
    memory: Above0 | None = None
    bandwidth: Above0 | None = None
    bf16: Above0 | None = None
    fp32: Above0 | None = None
    utilisation: Above0 = 1.0
    link: Above0 | None = None
    network: Above0 | None = None
    cards_per_node: Count = 1


def card_names() -> list[str]:
    """Return the names of the shipped cards."""
    return sorted(file.name.removesuffix(SUFFIX) for file in FOLDER.iterdir() if file.name.endswith(SUFFIX))


def read_card(name: str) -> Card:
    """Read a shipped card by its name, or the file of another card by its path. Raises ConfigError."""
    is_path = name.endswith(SUFFIX)
    if not is_path and name not in card_names():
        help = f"{suggest(name, card_names())}; or the path of a {SUFFIX} file with the keys of h100{SUFFIX}"
        raise config_error("--card", f"must be a known card, but is {shown(name)}", help)
    try:
        values = read_yaml_file(Path(name if is_path else f"{FOLDER}/{name}{SUFFIX}")).value
    except OSError as error:
        rule = f"must be a YAML file, but {shown(name)} cannot be read: {type(error).__name__}"
        raise config_error("--card", rule, "check the path and the text of the file") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise config_error(name, "must be a mapping of figures", "write lines such as memory: 80")
    return read_settings(Card, values)


@dataclass(frozen=True)
class StepSettings:
    """The settings of `trainer` that change the cost of a step; `ema` is True if a mean of the weights is held too."""

    precision: Literal["bf16", "fp32"]
    strategy: Literal["ddp", "fsdp2"]
    activation_checkpointing: bool
    ema: bool = False


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
    spec: Spec,
    batching: Batching,
    settings: StepSettings,
    card: Card,
    devices: list[int],
    optimizer: OptimizerSettings | None = None,
    training: PlannedObjective = PLAIN_OBJECTIVE,
) -> list[StepPlan]:
    """Plan a step of a model for each number of devices. Raises ConfigError. Nothing is allocated.

    Without `optimizer`, it is Adam. Each device holds the whole teacher of `training`, and the mean of an `ema`.
    """
    for count in devices:
        if count > card.cards_per_node and count % card.cards_per_node and card.network:
            rule = f"must be at most {card.cards_per_node}, the cards of a node, or a multiple of it, but is {count}"
            full = count - count % card.cards_per_node
            raise config_error("--devices", rule, f"write --devices {full}")
    bf16, recomputes = settings.precision == "bf16", settings.activation_checkpointing
    network, teacher = training.networks(spec)
    learned = assign(optimizer or read_optimizer({"name": "adam"}), network)
    frozen = frozen_by_groups(learned)
    trace = trace_step(
        spec, batching, device=card.device, bf16=bf16, recomputes=recomputes, frozen=frozen, training=training
    )
    update = FLOAT32 * count_trained(learned), FLOAT32 * count_state(learned)
    weights, taught = (FLOAT32 * one.parameter_count if one else 0 for one in (network, teacher))
    layers = [sum(parameter.numel() for parameter in layer.parameters()) * FLOAT32 for layer in units_of(network)]
    plans = [_plan(trace, weights, layers, update, batching.rows, settings, card, count) for count in devices]
    mean = FLOAT32 * sum(weight.numel() for weight in saved_weights(network).values()) if settings.ema else 0
    return [replace(plan, weights=plan.weights + taught + mean, peak=plan.peak + mean) for plan in plans]


def _plan(
    trace: StepTrace,
    weights: int,
    layers: list[int],
    update: tuple[int, int],
    rows: int,
    settings: StepSettings,
    card: Card,
    devices: int,
) -> StepPlan:
    """Plan a step on this number of devices; `weights` and `layers` are the bytes of all weights and of each layer.

    `update` are the bytes of the gradients of all trained weights, and of the optimizer's state.

    DDP copies all gradients into buckets. FSDP2 gathers the weights outside of stacks and two layers, one of them in
    advance, and has the gradients of a layer twice: as they are computed, and in the buffer that is exchanged. With the
    ring algorithms of NCCL, DDP reduces all gradients to all devices. FSDP2 gathers the layers for each of the two
    passes and the other weights once, and scatters the sums of the gradients.
    """
    gradients, state = update
    held, exchange, sent, peak = weights, gradients, 2 * gradients, trace.peak
    if settings.strategy == "fsdp2" and devices > 1:
        outside = weights - sum(layers)
        held, gradients, state = (size // devices for size in (weights, gradients, state))
        exchange = outside + 4 * max(layers, default=0)
        sent, peak = 2 * sum(layers) + outside + update[0], held + gradients + trace.peak_besides
    exchange, sent = exchange if devices > 1 else 0, sent * (devices - 1) // devices
    traffic = trace.traffic + 3 * gradients + 2 * state  # reads weight, gradient, state; writes weight and state
    rate = card.bf16 if settings.precision == "bf16" else card.fp32
    times = (
        2 * trace.multiply_adds / (rate * 1e12 * card.utilisation) if rate else None,
        traffic / (card.bandwidth * 1e9) if card.bandwidth else None,
        _communication_seconds(sent, card, devices),
    )
    known = [time for time in times if time is not None]
    return StepPlan(
        devices, rows, held, gradients, state, exchange, trace.kept, peak + state + exchange,
        trace.multiply_adds, traffic, sent, *times, max(known) if len(known) == len(times) else None,
    )  # fmt: skip


def _communication_seconds(sent: int, card: Card, devices: int) -> float | None:
    """Return the time at the slower of a card's link and the network of its node, which all its cards share."""
    if devices == 1:
        return 0.0
    speeds = [card.link] if card.cards_per_node > 1 else []
    if devices > card.cards_per_node:
        speeds.append(card.network and card.network * card.cards_per_node)
    known = [speed for speed in speeds if speed]
    return sent / (min(known) * 1e9) if len(known) == len(speeds) else None


def plan_table(model: str, plans: Sequence[StepPlan], batching: Batching, settings: StepSettings, card: Card) -> Table:
    """Return a row for each quantity and a column for each number of devices."""
    rate = card.bf16 if settings.precision == "bf16" else card.fp32
    labels = {
        "weights": "weights",
        "gradients": "gradients",
        "optimizer": "optimizer state",
        "exchange": "exchange of weights and gradients",
        "activations": "activations",
        "peak": f"peak memory{f', of {card.memory:,.0f} GB' if card.memory else ''}",
        "multiply_adds": "multiply-adds",
        "traffic": "memory traffic",
        "sent": "sent",
        "arithmetic_seconds": f"arithmetic{f', at {rate * card.utilisation:,.0f} TFLOP/s' if rate else ''}",
        "traffic_seconds": f"memory traffic{f', at {card.bandwidth:,.0f} GB/s' if card.bandwidth else ''}",
        "communication_seconds": "communication",
        "step_seconds": "step: the longest of these times",
    }
    rows = [[label, *(_cell(plan, name) for plan in plans)] for name, label in labels.items()]
    tokens = batching.rows * batching.row_tokens
    speeds = [plan.devices * tokens / plan.step_seconds if plan.step_seconds else None for plan in plans]
    rows.append(["tokens/s of all devices", *(speed and Cell(f"{speed:,.0f}", speed) for speed in speeds)])
    columns = [Column("per device"), *(Column(f"{plan.devices} × {card.name}", "{}") for plan in plans)]
    shown = [row for row in rows if any(value is not None for value in row[1:])]
    lengths = ", ".join(f"{axis} = {length}" for axis, length in batching.lengths.items())
    note = f"{counted(batching.rows, 'row')} with {lengths} for each device; {settings.precision}, {settings.strategy}"
    note += ", activation checkpointing" if settings.activation_checkpointing else ""
    return Table(f"a training step of {model}", columns, shown, note=note)


def _cell(plan: StepPlan, name: str) -> Value:
    value = getattr(plan, name)
    if value is None or (plan.devices == 1 and name in EXCHANGED):
        return None
    if name.endswith("_seconds"):
        return Cell(f"{1e3 * value:,.2f} ms", 1e3 * value)
    return Cell(("{:,.0f} G" if name == "multiply_adds" else "{:,.2f} GB").format(value / 1e9), value / 1e9)
