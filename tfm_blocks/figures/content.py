"""What a figure shows of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tfm_blocks.figures.drawing import Fold


@dataclass(frozen=True)
class Cost:
    """Parameters and multiply-adds of a node."""

    parameters: int
    multiply_adds: int


@dataclass(frozen=True)
class Content:
    """What a figure shows: how far it folds, an address that it is limited to, shapes, and the cost of nodes.

    `closed` are stacks and parallels that are drawn as one box, with `*` in place of the numbers of layers.
    """

    fold: Fold = "layers"
    of: str = ""
    shapes: bool = False
    costs: Mapping[str, Cost] = field(default_factory=dict)
    closed: frozenset[str] = frozenset()
