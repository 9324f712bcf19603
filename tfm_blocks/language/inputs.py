"""The axes of the inputs, and the inputs that define padding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tfm_blocks.language.spec import Axis, Input, Shape

_WIDTH = re.compile(r"[1-9][0-9]{0,11}")


def read_axes(text: Any) -> Shape:
    """Parse a shape such as `B S` or `B P 768`; return () if it is invalid."""
    words = text.split() if isinstance(text, str) else []
    shape = tuple(int(word) if _WIDTH.fullmatch(word) else Axis(word) for word in words)
    letters = all(isinstance(axis, int) or (axis.name.isupper() and axis.name.isidentifier()) for axis in shape)
    right = letters and len(shape) > 1 and isinstance(shape[0], Axis) and len(set(words)) == len(words)
    return shape if right else ()


def assign_masks(inputs: Sequence[Input]) -> tuple[Input, ...]:
    """Attach to each sequence axis the input that defines its padding.

    This is the first input of token ids with that axis, otherwise the first input with it.
    """
    decides: dict[str, str] = {}
    for tensor in sorted(inputs, key=lambda tensor: not tensor.tokens):
        for axis in tensor.sequences:
            decides.setdefault(axis.name, tensor.name)
    return tuple(
        replace(
            tensor,
            shape=tuple(
                Axis(axis.name, (decides[axis.name],)) if isinstance(axis, Axis) and axis in tensor.sequences else axis
                for axis in tensor.shape
            ),
        )
        for tensor in inputs
    )
