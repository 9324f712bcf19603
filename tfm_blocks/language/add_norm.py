"""Add & norm as data: presets, or lists of operations around every branch block and after the outermost stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from tfm_blocks.errors import shown, suggest
from tfm_blocks.language.arguments import Args, ArgumentError, RawValue
from tfm_blocks.language.spec import Path, Step
from tfm_blocks.registry.values import Kind

STEPS = ("dropout", "add", "norm", "scale", "gain", "droppath")
VALUED = {"scale": "scale: 0.5", "gain": "gain: 0.0", "droppath": "droppath: 0.1"}
PER = {"gain": ("channel", "branch"), "add": ("channel",)}  # operations with learned factors
NumberedStep = Literal["scale", "gain", "droppath", "add"]
KINDS = dict.fromkeys(("scale", "gain", "add"), Kind("float")) | dict.fromkeys(("droppath", "dropout"), Kind("rate"))


@dataclass(frozen=True)
class WrittenStep:
    """An operation of add & norm as written in the file: its kind, its raw number, and its path."""

    kind: str
    value: Any = None
    per_channel: bool = False
    path: Path = ()


@dataclass(frozen=True)
class AddNorm:
    """Operations of add & norm.

    `pre` acts on a branch's first input, `post` on its output, and `last` once after the outermost stack. With `deep`,
    the factor of `add` and the initial weights of the branches depend on the numbers of layers.
    """

    pre: tuple[WrittenStep, ...] = ()
    post: tuple[WrittenStep, ...] = ()
    last: tuple[WrittenStep, ...] = ()
    deep: bool = False

    @property
    def learned(self) -> list[str]:
        """Return the operations around a branch that have weights."""
        return [step.kind for step in (*self.pre, *self.post) if step.kind in ("norm", "gain") or step.per_channel]


NORM, ADD, DROPOUT = map(WrittenStep, ("norm", "add", "dropout"))
PRESETS = {
    "post": AddNorm(post=(DROPOUT, ADD, NORM)),
    "pre": AddNorm(pre=(NORM,), post=(DROPOUT, ADD), last=(NORM,)),
    "sandwich": AddNorm(pre=(NORM,), post=(NORM, DROPOUT, ADD), last=(NORM,)),
    "branch": AddNorm(post=(NORM, DROPOUT, ADD), last=(NORM,)),
    "deepnorm": AddNorm(post=(DROPOUT, ADD, NORM), deep=True),
    "rezero": AddNorm(post=(DROPOUT, WrittenStep("gain", 0.0), ADD)),
    "layerscale": AddNorm(pre=(NORM,), post=(DROPOUT, WrittenStep("gain", 1e-4, per_channel=True), ADD), last=(NORM,)),
    "none": AddNorm(),
}


def read_add_norm(value: Any, inherited: AddNorm, path: Path) -> AddNorm:
    """Read a preset's name, or a mapping whose lists replace the inherited ones. Raises ValueError."""
    if isinstance(value, str):
        if value not in PRESETS:
            raise ValueError(f"{shown(value)} is not an add & norm preset; {suggest(value, PRESETS)}")
        return PRESETS[value]
    if not isinstance(value, Mapping):
        raise ValueError(
            f"must be a preset ({', '.join(PRESETS)}) or a mapping of pre, post, last, but is {shown(value)}"
        )
    for key in value:
        if key not in ("pre", "post", "last"):
            raise ValueError(f"has no key {shown(key)}; {suggest(str(key), ['pre', 'post', 'last'])}")
    lists = {when: _read_steps(when, steps, path) for when, steps in value.items() if steps is not None}
    deep = inherited.deep and "post" not in lists
    return replace(inherited, deep=deep, **lists)


def _read_steps(when: str, steps: Any, path: Path) -> tuple[WrittenStep, ...]:
    if not isinstance(steps, list):
        raise ValueError(f"{when} must be a list of operations ({', '.join(STEPS)}), but is {shown(steps)}")
    read = [replace(_read_step(when, step), path=path) for step in steps]
    kinds = [step.kind for step in read]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"{when} lists an operation twice: {', '.join(kinds)}")
    if "add" in kinds and when != "post":
        raise ValueError(f"{when} cannot add: the residual is added to a branch's output, in post")
    return tuple(read)


def _read_step(when: str, step: Any) -> WrittenStep:
    """Read `norm`, `{scale: 0.5}`, `{add: 2.0}`, `{gain: 1e-4, per: channel}` or `{add: 1.0, per: channel}`."""
    if not isinstance(step, Mapping):
        if step not in STEPS:
            raise ValueError(f"{when} has the unknown operation {shown(step)}; {suggest(str(step), STEPS)}")
        if step in VALUED:
            raise ValueError(f"{when} has the operation {step} without its number: write {{{VALUED[step]}}}")
        return WrittenStep(step)
    kinds = [key for key in step if key != "per"]
    if len(kinds) != 1 or kinds[0] not in (*VALUED, "add"):
        raise ValueError(
            f"{when} has {shown(dict(step))}: an operation with a number is one of {', '.join(VALUED)}, add"
        )
    (kind,) = kinds
    if "per" in step and step["per"] not in PER.get(kind, ()):
        raise ValueError(
            f"{when} has {shown(dict(step))}: a gain is per channel or per branch, and the factor of add per channel"
        )
    return WrittenStep(kind, step[kind], step.get("per") == "channel")


def read_steps(
    written: Sequence[WrittenStep], path: Path, args: Args, problems: list[ArgumentError]
) -> tuple[Step, ...]:
    """Evaluate the operations. Errors in a number or in the norm are added to `problems`."""
    steps = []
    for step in written:
        try:
            if step.kind == "dropout":
                rate = args.find("dropout")
                steps.append(Step("dropout", args.convert(rate, KINDS["dropout"]) if rate else 0.0))
            elif step.kind == "norm":
                part = args.read_part(args.find("norm") or RawValue("layernorm", path), "norm")
                steps.append(Step("norm", block=part.block, arguments=part.arguments))
            elif step.kind == "add" and step.value is None:
                steps.append(Step("add", 1.0, per_channel=step.per_channel))
            else:
                number = args.convert(RawValue(step.value, (*step.path, step.kind)), KINDS[step.kind])
                steps.append(Step(cast(NumberedStep, step.kind), number, per_channel=step.per_channel))
        except ArgumentError as error:
            problems.append(error)
    return tuple(steps)
