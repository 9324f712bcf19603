"""Run the passes of the checker. Each pass reports all its problems; the next pass runs only if there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.language.causality import Visibility
from tfm_blocks.language.depths import set_depths
from tfm_blocks.language.expand import Expander
from tfm_blocks.language.read import Reader
from tfm_blocks.language.replaced import Replacement
from tfm_blocks.language.shapes import ShapeInference
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Axis, Input, Spec
from tfm_blocks.language.tree import MODEL
from tfm_blocks.registry.blocks import Registry


def check(model: Mapping[str, Any], registry: Registry, sources: Sources | None = None) -> Spec:
    """Check a resolved mapping {inputs, args, add_norm, graph}. Raises ConfigError with all problems of a pass."""
    sources = sources or Sources()
    replacement = Replacement(registry, sources)
    if sources.files:
        model = replacement.clean(model, MODEL)
    reader = Reader(registry, sources)
    tree = reader.read_model(model)
    _raise(reader.problems)
    expander = Expander(registry, sources)
    expander.expand_model(tree)
    _raise(expander.problems)
    inputs = _assign_masks(tree.inputs)
    inference = ShapeInference(registry, sources, inputs)
    shaped = inference.infer(expander.nodes.values())
    inference.check_layers(expander.layers)
    _raise(inference.problems)
    visibility = Visibility(registry, sources, inputs)
    nodes = visibility.infer(shaped)
    _raise(visibility.problems)
    scaled = set_depths(nodes, expander.stacks)
    return Spec(inputs, scaled, model, visibility.count_head(nodes), tuple(expander.warnings), tuple(replacement.notes))


def _assign_masks(inputs: Sequence[Input]) -> tuple[Input, ...]:
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


def _raise(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(problems)
