"""A model as it is written, one object a node: keys and forms are right, nothing is resolved yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfm_blocks.language.references import Reference
from tfm_blocks.language.spec import Input, Path
from tfm_blocks.registry.blocks import BlockInfo

MODEL = ("model",)
InputTree = "Reference | BlockTree"


@dataclass(frozen=True)
class Tree:
    """What every node has. `reads` maps ports to what they read; the first port is under `in`."""

    name: str
    path: Path
    reads: Mapping[str, tuple[Reference | BlockTree, ...]]


@dataclass(frozen=True)
class BlockTree(Tree):
    """A registered block with its raw arguments."""

    info: BlockInfo
    arguments: Mapping[str, Any]
    tie: Reference | None = None
    add_norm: Any = None


@dataclass(frozen=True)
class SameTree(Tree):
    """A further call of the node named `of`."""

    of: Reference


@dataclass(frozen=True)
class JoinTree:
    """The block that joins branches, with its raw arguments."""

    path: Path
    info: BlockInfo
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ParallelTree(Tree):
    """The nodes of a graph side by side, joined."""

    join: JoinTree
    args: Mapping[str, Any]
    add_norm: Any
    graph: tuple[Tree, ...]


@dataclass(frozen=True)
class LayerTree(Tree):
    """A graph, `repeat` times on top of itself; with `join` side by side, with `share` with the weights of the first.

    `changed` are the graphs of single layers, by the index that `at` gives, from either end.
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
