"""Evaluate the operations of add & norm: rates, factors, and the norm set by the args."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from tfm_blocks.language.add_norm import WrittenStep
from tfm_blocks.language.arguments import Args, ArgumentError, RawValue
from tfm_blocks.language.spec import Path, Step
from tfm_blocks.registry.values import Kind

NumberedStep = Literal["scale", "gain", "droppath", "add"]
KINDS = {"scale": Kind("float"), "gain": Kind("float"), "add": Kind("float"), "droppath": Kind("rate")}


def read_steps(
    written: Sequence[WrittenStep], path: Path, args: Args, problems: list[ArgumentError]
) -> tuple[Step, ...]:
    """Evaluate the operations. Errors in a number or in the norm are added to `problems`."""
    steps = []
    for step in written:
        try:
            steps.append(_read(step, path, args))
        except ArgumentError as error:
            problems.append(error)
    return tuple(steps)


def _read(written: WrittenStep, path: Path, args: Args) -> Step:
    if written.kind == "dropout":
        rate = args.find("dropout")
        return Step("dropout", args.convert(rate, Kind("rate")) if rate else 0.0)
    if written.kind == "norm":
        part = args.read_part(args.find("norm") or RawValue("layernorm", path), "norm")
        return Step("norm", block=part.block, arguments=part.arguments)
    if written.kind == "add" and written.value is None:
        return Step("add", 1.0)
    number = args.convert(RawValue(written.value, (*written.path, written.kind)), KINDS[written.kind])
    return Step(cast(NumberedStep, written.kind), number, per_channel=written.per_channel)
