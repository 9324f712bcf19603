"""The boxes of a node: the operations before its block, the block, and the operations after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfm_blocks.figures import labels
from tfm_blocks.figures.drawing import Box, Glyph
from tfm_blocks.language.spec import Node, Step
from tfm_blocks.registry.blocks import BlockInfo


@dataclass(frozen=True)
class NodeBoxes:
    """The boxes from below to above; `ports` is the box that other ports enter, `adding` the one of the residual."""

    boxes: tuple[Box, ...]
    ports: Box
    adding: Box | None


def node_boxes(
    node: Node, info: BlockInfo | None, notes: Sequence[str], words: Mapping[str, labels.InputWords]
) -> NodeBoxes:
    """Draw a node. `notes` are the lines of small text in the box of its block, and `words` those for inputs."""
    before = [_operation(steps) for steps in _grouped(node.pre)]
    groups = _grouped(node.post)
    after = [_operation(steps) for steps in groups]
    adding = next((box for box, steps in zip(after, groups, strict=True) if steps[0].kind == "add"), None)
    middle = [_block(node, info, notes, words)] if info else []
    if middle and middle[0].glyph == "plus" and after and after[0] is adding:
        middle = []  # the sum of branches and the residual are one sum
    if node.block == "none" and (before or after):
        middle = []
    drawn = [*before, *middle, *after] or [Box((), "other", ("Identity",))]
    return NodeBoxes(tuple(drawn), drawn[len(before)], adding)


def _grouped(steps: Sequence[Step]) -> list[list[Step]]:
    """Return the operations by box: a norm that follows `add` shares its box, and dropout is not drawn."""
    groups: list[list[Step]] = []
    for step in steps:
        if step.kind == "norm" and groups and groups[-1][-1].kind == "add":
            groups[-1].append(step)
        elif step.kind != "dropout":
            groups.append([step])
    return groups


def _operation(steps: Sequence[Step]) -> Box:
    title, note = labels.step_label(steps)
    if title == "Add" and not note:
        return Box((), "other", (), glyph="plus")
    return Box((), "norm", (title,), (note,) if note else ())


def _block(node: Node, info: BlockInfo, notes: Sequence[str], words: Mapping[str, labels.InputWords]) -> Box:
    if node.block == "sum" and not notes:
        return Box((), "other", (), glyph="plus")
    kind = labels.box_kind(info)
    forked = "attention" in info.name and "kv" not in node.reads
    glyph: Glyph = "wave" if node.block in labels.SIGNALS else "box"
    return Box((), kind, labels.title_of(node, words), tuple(notes), glyph, forked=forked)
