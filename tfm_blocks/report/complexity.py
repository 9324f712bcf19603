"""Table 1 of the paper: cost, sequential operations and maximum path length of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tfm_blocks.blocks.linear_attention import CHUNK
from tfm_blocks.language.spec import Node
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.report.table import Table, texts


@dataclass(frozen=True)
class Complexity:
    """Formulas in n positions, the width d and arguments of the block, each up to a constant factor.

    `layer` is the number of multiply-adds of the operation that mixes positions; as in the paper, it excludes the
    projections before and after it. `sequential` is the number of operations that cannot run in parallel. `path` is the
    number of operations between the first and the last of n positions, in as many layers as that takes.
    """

    layer: str
    sequential: str
    path: str


_ATTENTION = Complexity("n * n * d", "1", "1")
_RECURRENT = Complexity("n * d * d", "n", "n")
_LINEAR = Complexity(f"n * ({CHUNK} + d / heads) * d", f"n / {CHUNK}", f"n / {CHUNK}")

COMPLEXITY = {
    "attention": _ATTENTION,
    "talking_heads_attention": _ATTENTION,
    "differential_attention": _ATTENTION,
    "restricted_attention": Complexity("n * r * d", "1", "n / r"),
    "dilated_attention": Complexity("n * r * d", "1", "n / (r * dilation)"),
    "rnn": _RECURRENT,
    "gru": _RECURRENT,
    "lstm": _RECURRENT,
    "convolution": Complexity("n * kernel_size * d * d", "1", "n / (kernel_size * dilation)"),
    "depthwise_conv": Complexity("n * kernel_size * d", "1", "n / kernel_size"),
    "retention": _LINEAR,
    "gated_delta_rule": _LINEAR,
}


def complexity(node: Node) -> Complexity | None:
    """Return the complexity of the node's block if it is known and the block mixes the positions of one sequence."""
    if node.block is None:
        return None
    info = REGISTRY.blocks[node.block]
    sequences = {node.axes[operand] for operand in info.signature.sequences if node.axes.get(operand)}
    return COMPLEXITY.get(info.name) if len(sequences) == 1 else None


def complexity_table(nodes: Iterable[Node]) -> Table:
    """Return a row for each of the nodes whose complexity is known."""
    columns = texts("node", "block", "multiply-adds a layer", "sequential", "longest path")
    known = [(node, found) for node in nodes if (found := complexity(node))]
    rows = [
        [node.address, node.block or "", *map(shortened, (cost.layer, cost.sequential, cost.path))]
        for node, cost in known
    ]
    return Table("of n positions, each of width d", columns, rows)


def shortened(formula: str) -> str:
    """Return a formula in mathematical notation."""
    return formula.replace("n * n", "n²").replace("d * d", "d²").replace("*", "·")
