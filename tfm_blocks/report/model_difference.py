"""`tfm diff`: how two models differ, their costs and weights, and their figures with marks where they differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from tfm_blocks.errors import listed, print_line
from tfm_blocks.figures.draw import Content
from tfm_blocks.figures.drawing import FigurePicture, Mark
from tfm_blocks.figures.figure import mark_nodes, picture_of, place_side_by_side
from tfm_blocks.language.difference import AlikeNodes, Change, find_changes
from tfm_blocks.language.outline import Outline, write_nodes
from tfm_blocks.language.pairing import pattern
from tfm_blocks.language.spec import TARGET, Spec
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.cost import axis_lengths, decoding_state, multiply_adds
from tfm_blocks.network.matching import WeightMatch, match_weights, rehashed_weights, weights_of
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.report.screen import print_table
from tfm_blocks.report.table import Table, texts

MOST_NAMES = 8  # of weights in a line


@dataclass(frozen=True)
class ModelDifference:
    """The changes from A to B, the costs of both by name, and the weights of A that load into B.

    `lengths` are the numbers of tokens of each axis, from which the costs of A and B are computed.
    """

    names: tuple[str, str]
    changes: list[Change]
    lengths: tuple[Mapping[str, int], Mapping[str, int]]
    costs: Mapping[str, Sequence[int]]
    weights: WeightMatch


def compare_models(names: tuple[str, str], a: Spec, b: Spec, requested: Mapping[str, int]) -> ModelDifference:
    """Compare two checked models. `requested` are the numbers of tokens of inputs by name, 32 for the others."""
    first, second = networks = network_without_values(a), network_without_values(b)
    lengths = axis_lengths(first, requested), axis_lengths(second, requested)
    pairs = list(zip(networks, lengths, strict=True))
    costs = {
        "parameters": [network.parameter_count for network in networks],
        "multiply-adds": [sum(multiply_adds(network, sizes).values()) for network, sizes in pairs],
        "floats of decoding state": [decoding_state(network, sizes) for network, sizes in pairs],
    }
    saved = {name: tensor.shape for name, tensor in weights_of(first).items()}
    weights = match_weights(second, _sizes(b), saved, _sizes(a), rehashed_weights(second, a))
    return ModelDifference(names, find_changes(a, b, REGISTRY), lengths, costs, weights)


def _sizes(spec: Spec) -> dict[str, int]:
    """Return the sizes of the vocabularies of sources and of the target."""
    size = int(str(spec.sink.shape[-1]))
    return {"src": next((node.arguments["vocab"] for node, name in spec.tables if name != TARGET), size), TARGET: size}


def model_difference_record(difference: ModelDifference) -> dict[str, object]:
    """Return the difference for JSON."""
    return {
        "models": list(difference.names),
        "changes": [asdict(change) for change in difference.changes],
        "lengths": [dict(lengths) for lengths in difference.lengths],
        "costs": difference.costs,
        "weights": {name: getattr(difference.weights, name) for name in ("loaded", "new", "unused")},
    }


def show_model_difference(difference: ModelDifference, a: Spec, b: Spec) -> None:
    """Print the changes as a table, then the costs and the weights."""
    if difference.changes:
        print_table(changes_table(difference))
    for line in summary_lines(difference, a, b):
        print_line(line)


def summary_lines(difference: ModelDifference, a: Spec, b: Spec) -> list[str]:
    """Return lines on the costs and the weights, or a single line if the models are the same."""
    if not difference.changes:
        return [f"{' and '.join(difference.names)} are the same model"]
    lines = []
    for name, (before, after) in difference.costs.items():
        relative = f", {(after - before) / before:+.2%}" if before else ""
        change = f"{before:,} → {after:,} ({after - before:+,}{relative})"
        lines.append(f"{name}: {f'{before:,} in both' if before == after else change}")
    lengths = {**difference.lengths[0], **difference.lengths[1]}
    lines.append(f"for one row with {', '.join(f'{axis} = {length}' for axis, length in lengths.items())}")
    weights, (first, second) = difference.weights, difference.names
    count = len(weights.loaded) + len(weights.new)
    lines.append(f"init_from: {len(weights.loaded)} of the {count} weights of {second} load from {first}")
    for text, names, spec in (("new", weights.new, b), ("unused", weights.unused, a)):
        lines += [f"init_from: {text}: {_names_text(names, spec)}"] if names else []
    return lines


def changes_table(difference: ModelDifference) -> Table:
    """Return a row for each change; equal changes of several nodes are one row."""
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for change in difference.changes:
        apart = change.where if change.kind in ("renamed", "moved") else ""
        rows[(change.kind, change.key, change.before, change.after, apart)].append(change.where)
    cells = [
        [f"{kind} {key}".strip(), ", ".join(where), before, after]
        for (kind, key, before, after, _), where in rows.items()
    ]
    return Table("", texts("change", "node", *difference.names), cells, keys=2)


def _names_text(names: Sequence[str], spec: Spec) -> str:
    """Return the modules of weights, with alike layers as one; only the first ones of many."""
    groups: dict[str, list[str]] = defaultdict(list)
    for module in dict.fromkeys(name.rpartition(".")[0] for name in names):
        groups[pattern(module)].append(module)
    layers = Outline(spec, REGISTRY).layers
    return listed([write_nodes(group, layers) for group in groups.values()], MOST_NAMES)


def difference_marks(a: Spec, b: Spec, difference: ModelDifference) -> list[dict[str, Mark]]:
    """Return the marks of both models: what was removed or changed in the first, and added or changed in the second."""
    changes = difference.changes
    return [_marks(a, ((one, one.old) for one in changes)), _marks(b, ((one, one.new) for one in changes))]


def difference_picture(a: Spec, b: Spec, difference: ModelDifference) -> FigurePicture:
    """Return both models next to each other with their marks."""
    marked = zip((a, b), difference_marks(a, b, difference), strict=True)
    first, second = (mark_nodes(picture_of(spec, REGISTRY, Content()), marks) for spec, marks in marked)
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
