"""The table of `tfm show --plan`."""

from __future__ import annotations

from collections.abc import Sequence

from tfm_blocks.report.table import Cell, Column, Table, Value
from tfm_blocks.scaling.card import Card
from tfm_blocks.scaling.step_plan import StepPlan, StepSettings
from tfm_blocks.scaling.step_trace import Batching


def plan_table(model: str, plans: Sequence[StepPlan], batching: Batching, settings: StepSettings, card: Card) -> Table:
    """Return a row for each quantity and a column for each number of devices."""
    rows: dict[str, list[Value]] = {
        "weights": [_gigabytes(plan.weights) for plan in plans],
        "gradients": [_gigabytes(plan.gradients) for plan in plans],
        "moments of Adam": [_gigabytes(plan.optimizer) for plan in plans],
        "exchange of weights and gradients": [_exchanged(plan, _gigabytes(plan.exchange)) for plan in plans],
        "activations": [_gigabytes(plan.activations) for plan in plans],
        _of("peak memory", card.memory, "GB"): [_gigabytes(plan.peak) for plan in plans],
        "multiply-adds": [_number(plan.multiply_adds / 1e9, "{:,.0f} G") for plan in plans],
        "memory traffic": [_gigabytes(plan.traffic) for plan in plans],
        "sent": [_exchanged(plan, _gigabytes(plan.sent)) for plan in plans],
        _of("arithmetic", _rate(settings, card), "TFLOP/s"): [_time(plan.arithmetic_seconds) for plan in plans],
        _of("memory traffic", card.bandwidth, "GB/s"): [_time(plan.traffic_seconds) for plan in plans],
        "communication": [_exchanged(plan, _time(plan.communication_seconds)) for plan in plans],
        "step: the longest of these times": [_time(plan.step_seconds) for plan in plans],
        "tokens/s of all devices": [_speed(plan, batching) for plan in plans],
    }
    shown = [[name, *values] for name, values in rows.items() if any(value is not None for value in values)]
    columns = [Column("per device"), *(Column(f"{plan.devices} × {card.name}", "{}") for plan in plans)]
    return Table(f"a training step of {model}", columns, shown, note=_note(batching, settings))


def _note(batching: Batching, settings: StepSettings) -> str:
    lengths = ", ".join(f"{axis} = {length}" for axis, length in batching.lengths.items())
    checkpointing = ", activation checkpointing" if settings.activation_checkpointing else ""
    return (
        f"{batching.rows} rows with {lengths} for each device; {settings.precision}, {settings.strategy}{checkpointing}"
    )


def _rate(settings: StepSettings, card: Card) -> float | None:
    rate = card.bf16 if settings.precision == "bf16" else card.fp32
    return rate and rate * card.utilisation


def _of(name: str, figure: float | None, unit: str) -> str:
    """Return the name of a row with the figure of the card that limits it."""
    return f"{name}, {'of' if unit == 'GB' else 'at'} {figure:,.0f} {unit}" if figure else name


def _number(value: float, form: str) -> Cell:
    return Cell(form.format(value), value)


def _gigabytes(size: int) -> Cell:
    return _number(size / 1e9, "{:,.2f} GB")


def _time(seconds: float | None) -> Value:
    return None if seconds is None else _number(1e3 * seconds, "{:,.2f} ms")


def _speed(plan: StepPlan, batching: Batching) -> Value:
    if plan.step_seconds is None:
        return None
    tokens = plan.devices * batching.rows * batching.row_tokens
    return _number(tokens / plan.step_seconds, "{:,.0f}")


def _exchanged(plan: StepPlan, value: Value) -> Value:
    """Return the value, or None for a single device, which exchanges nothing."""
    return value if plan.devices > 1 else None
