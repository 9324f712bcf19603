"""Add & norm is data: presets, or lists of steps before and after every branch block and after the outermost stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tfm_blocks.errors import suggest

STEPS = ("dropout", "add", "norm")


@dataclass(frozen=True)
class AddNorm:
    """`pre` acts on a branch's first input, `post` on its output, `last` once after the outermost stack."""

    pre: tuple[str, ...] = ()
    post: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


PRESETS = {
    "post": AddNorm(post=("dropout", "add", "norm")),
    "pre": AddNorm(pre=("norm",), post=("dropout", "add"), last=("norm",)),
    "none": AddNorm(),
}


def read_add_norm(value: Any, inherited: AddNorm) -> AddNorm:
    """A preset's name, or a mapping whose lists replace the inherited ones. Raises ValueError with a sentence."""
    if isinstance(value, str):
        if value not in PRESETS:
            raise ValueError(f"{value!r} is no preset of add & norm; {suggest(value, PRESETS)}")
        return PRESETS[value]
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a preset ({', '.join(PRESETS)}) or a mapping of pre, post, last, but is {value!r}")
    unknown = sorted(set(value) - {"pre", "post", "last"})
    if unknown:
        raise ValueError(f"has no key {unknown[0]!r}; {suggest(str(unknown[0]), ['pre', 'post', 'last'])}")
    lists = {when: _read_steps(when, steps) for when, steps in value.items() if steps is not None}
    return replace(inherited, **lists)


def _read_steps(when: str, steps: Any) -> tuple[str, ...]:
    if not isinstance(steps, list):
        raise ValueError(f"{when} must be a list of steps ({', '.join(STEPS)}), but is {steps!r}")
    for step in steps:
        if step not in STEPS:
            raise ValueError(f"{when} has the unknown step {step!r}; {suggest(str(step), STEPS)}")
    if len(set(steps)) < len(steps):
        raise ValueError(f"{when} has a step twice: {steps}")
    if "add" in steps and when != "post":
        raise ValueError(f"{when} cannot add: the residual is added to a branch's output, in post")
    return tuple(steps)
