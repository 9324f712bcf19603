"""A model as written, one object per node: keys and forms are valid, but nothing is resolved yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfm_blocks.language.references import Reference
from tfm_blocks.language.spec import Input, Path
from tfm_blocks.registry.blocks import BlockInfo

MODEL = ("model",)


@dataclass(frozen=True)
class Tree:
    """Base of all nodes. `reads` maps ports to references or inline blocks; the first port is under `in`."""

    name: str
    path: Path
    reads: Mapping[str, tuple[Reference | BlockTree, ...]]


@dataclass(frozen=True)
class BlockTree(Tree):
    """A registered block with its raw arguments, and `args`, of which it takes those that it has."""

    info: BlockInfo
    arguments: Mapping[str, Any]
    tie: Reference | None = None
    add_norm: Any = None
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SameTree(Tree):
    """Another call of the node named `of`."""

    of: Reference


@dataclass(frozen=True)
class JoinTree:
    """The block that joins branches, with its raw arguments."""

    path: Path
    info: BlockInfo
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ParallelTree(Tree):
    """The nodes of a graph as parallel branches, and their join."""

    join: JoinTree
    args: Mapping[str, Any]
    add_norm: Any
    graph: tuple[Tree, ...]


@dataclass(frozen=True)
class LayerTree(Tree):
    """A graph stacked `repeat` times, or in parallel with `join`; with `share`, all layers use the first one's weights.

    `changed` maps indices of `at`, which may be negative, to the graphs of single layers.
    """

    repeat: Any
    share: bool
    join: JoinTree | None
    args: Mapping[str, Any]
    add_norm: Any
    graph: tuple[Tree, ...]
    changed: Mapping[int, tuple[Tree, ...]]


@dataclass(frozen=True)
class ModelTree:
    """The key `model` of a composed config."""

    inputs: tuple[Input, ...]
    args: Mapping[str, Any]
    add_norm: Any
    graph: tuple[Tree, ...]
