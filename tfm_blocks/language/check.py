"""The passes in order; each reports all of its problems together before the next begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.language.causality import Visibility
from tfm_blocks.language.depths import with_depths
from tfm_blocks.language.expand import Expander
from tfm_blocks.language.inputs import with_masks
from tfm_blocks.language.read import Reader
from tfm_blocks.language.shapes import ShapeInference
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Spec
from tfm_blocks.registry.blocks import Registry


def check(model: Mapping[str, Any], registry: Registry, sources: Sources | None = None) -> Spec:
    """The spec of a resolved mapping {inputs, args, add_norm, graph}; ConfigError with all problems of a pass."""
    sources = sources or Sources()
    reader = Reader(registry, sources)
    tree = reader.model(model)
    _raise(reader.problems)
    expander = Expander(registry, sources)
    expander.model(tree)
    _raise(expander.problems)
    inputs = with_masks(tree.inputs)
    shaper = ShapeInference(registry, sources, inputs)
    shaped = shaper.nodes(expander.nodes.values())
    shaper.layers(expander.layers)
    _raise(shaper.problems)
    sight = Visibility(registry, sources, inputs)
    nodes = sight.nodes(shaped)
    _raise(sight.problems)
    placed = with_depths(nodes, expander.stacks)
    return Spec(inputs, placed, model, sight.head(nodes), tuple(expander.warnings))


def _raise(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(problems)
