"""Signs in the figures of two models at the nodes in which the models differ."""

from __future__ import annotations

from collections.abc import Iterable

from tfm_blocks.figures.draw import Content
from tfm_blocks.figures.figure import picture_of
from tfm_blocks.figures.picture import FigurePicture, mark_nodes, place_side_by_side
from tfm_blocks.figures.themes import Mark
from tfm_blocks.language.difference import AlikeNodes, Change
from tfm_blocks.language.spec import Spec
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.report.model_difference import ModelDifference


def marks_of_first(spec: Spec, difference: ModelDifference) -> dict[str, Mark]:
    """Return the marks of the first model: what was removed or changed."""
    return _marks(spec, ((change, change.old) for change in difference.changes))


def marks_of_second(spec: Spec, difference: ModelDifference) -> dict[str, Mark]:
    """Return the marks of the second model: what was added or changed."""
    return _marks(spec, ((change, change.new) for change in difference.changes))


def difference_picture(a: Spec, b: Spec, difference: ModelDifference) -> FigurePicture:
    """Return both models next to each other with their marks."""
    first = mark_nodes(picture_of(a, REGISTRY, Content()), marks_of_first(a, difference))
    second = mark_nodes(picture_of(b, REGISTRY, Content()), marks_of_second(b, difference))
    return place_side_by_side((first, second), difference.names)


def _marks(spec: Spec, changes: Iterable[tuple[Change, AlikeNodes]]) -> dict[str, Mark]:
    marks: dict[str, Mark] = {}
    for change, nodes in changes:
        mark: Mark = change.kind if change.kind in ("added", "removed") else "changed"
        for address in nodes.addresses:
            marks |= dict.fromkeys([address, *_parts(address, change, spec)], mark)
    return marks


def _parts(address: str, change: Change, spec: Spec) -> list[str]:
    """Return the addresses within a stack or a parallel that a change concerns."""
    inner = [node.address for node in spec.nodes if node.address.startswith(f"{address}.")]
    layers = [f"{address}.{index}" for index in range(len(inner))]
    if change.kind in ("added", "removed"):
        return [*inner, *layers]
    if change.kind == "layers":
        return layers
    return [f"{address}.last"] if change.key == "last" else []
