"""The axes of the inputs, and which of these decide what is padding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tfm_blocks.language.spec import Axis, Input, Shape

_WIDTH = re.compile(r"[1-9][0-9]{0,11}")


def read_axes(text: Any) -> Shape:
    """The shape that `B S` or `B P 768` writes; () where it writes none."""
    words = text.split() if isinstance(text, str) else []
    shape = tuple(int(word) if _WIDTH.fullmatch(word) else Axis(word) for word in words)
    letters = all(isinstance(axis, int) or (axis.name.isupper() and axis.name.isidentifier()) for axis in shape)
    right = letters and len(shape) > 1 and isinstance(shape[0], Axis) and len(set(words)) == len(words)
    return shape if right else ()


def with_masks(inputs: Sequence[Input]) -> tuple[Input, ...]:
    """Each sequence axis with the input that says which of its positions are padding: the first of token ids on it,
    otherwise the first.
    """
    decides: dict[str, str] = {}
    for one in sorted(inputs, key=lambda one: not one.tokens):
        for axis in one.sequences:
            decides.setdefault(axis.name, one.name)
    return tuple(
        replace(
            one,
            shape=tuple(
                Axis(axis.name, (decides[axis.name],)) if isinstance(axis, Axis) and axis in one.sequences else axis
                for axis in one.shape
            ),
        )
        for one in inputs
    )
