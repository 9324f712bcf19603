"""`tfm show`: the nodes of a model in execution order, with their inputs, shapes, parameters, cost and complexity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tfm_blocks.blocks.layers.decay import CHUNK
from tfm_blocks.language.pairing import pattern
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node, Spec, Step, format_shape
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.cost import axis_lengths, multiply_adds
from tfm_blocks.network.graph import Network
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.report.screen import print_table, screen
from tfm_blocks.report.table import COUNT, Cell, Table, Value, numbers, texts

NODE = texts("node", "block", "reads", "shape") + numbers(COUNT, "parameters", "multiply-adds")


class Complexity(NamedTuple):
    """Formulas in n positions, the width d and arguments of the block, each up to a constant factor.

    In attention, d is the width of all heads. E is the width of a second port, as in the signature, by default d.
    `layer` is the number of multiply-adds of the operation that mixes positions; as in the paper, it excludes the
    projections before and after it. `sequential` is the number of operations that cannot run in parallel. `path` is the
    number of operations between the first and the last of n positions, in as many layers as that takes.
    """

    layer: str
    sequential: str
    path: str


_ATTENTION = Complexity("n * n * d", "1", "1")
_RECURRENT = Complexity("n * d * d", "n", "n")
_CHUNKS = (f"n / {CHUNK}", f"n / {CHUNK}")
_LATENT = "heads * (d_head + d_turned + d_value)"

COMPLEXITY = {
    "attention": _ATTENTION,
    "memory_attention": Complexity("n * (n + memory) * d", "1", "1"),
    "shared_attention": _ATTENTION,
    "residual_attention": _ATTENTION,
    "talking_heads_attention": _ATTENTION,
    "differential_attention": _ATTENTION,
    "native_sparse_attention": _ATTENTION,
    "relative_attention": Complexity("n * (n + 2 * radius) * d", "1", "1"),
    "latent_attention": Complexity(f"n * n * {_LATENT}", "1", "1"),
    "latent_query_attention": Complexity(f"n * n * {_LATENT}", "1", "1"),
    "sparse_latent_attention": Complexity(f"n * n * ({_LATENT} + index_heads * d_index)", "1", "1"),
    "contextual_attention": Complexity("n * (n + positions) * d", "1", "1"),
    "disentangled_attention": Complexity("n * (n + rows) * d + rows * d * d", "1", "1"),
    "restricted_attention": Complexity("n * r * d", "1", "n / r"),
    "restricted_shared_attention": Complexity("n * r * d", "1", "n / r"),
    "restricted_global_attention": Complexity("n * (r + first) * d", "1", "1"),
    "dilated_attention": Complexity("n * r * d", "1", "n / (r * dilation)"),
    "segment_attention": Complexity("n * (segment + memory) * d", "1", "n / (segment + memory)"),
    "rnn": _RECURRENT,
    "gru": _RECURRENT,
    "lstm": _RECURRENT,
    "convolution": Complexity("n * kernel_size * d * d", "1", "n / (kernel_size * dilation)"),
    "depthwise_conv": Complexity("n * kernel_size * d", "1", "n / kernel_size"),
    "retention": Complexity(f"n * ({CHUNK} + d_head) * heads * d_head", *_CHUNKS),
    "gated_delta_rule": Complexity(
        f"n * steps * ({CHUNK} + d_key) * heads * d_value", f"n * steps / {CHUNK}", f"n * steps / {CHUNK}"
    ),
    "mlstm": Complexity(f"n * ({CHUNK} + d_key) * heads * d_value", *_CHUNKS),
    "rwkv7": Complexity(f"n * ({CHUNK} * (d + E) + d * E / heads)", *_CHUNKS),
    "mamba": Complexity("n * d_inner * d_state", "n", "n"),
    "rg_lru": Complexity("n * d * d / heads", "n", "n"),
    "mamba2": Complexity(f"n * ({CHUNK} + d_state) * d_inner", *_CHUNKS),
    "mamba3": Complexity(f"n * ({CHUNK} + d_state) * d_inner", *_CHUNKS),
}


def complexity(node: Node) -> Complexity | None:
    """Return the complexity of the node's block if it is known and the block mixes the positions of one sequence."""
    if node.block is None:
        return None
    info = REGISTRY.blocks[node.block]
    sequences = {node.axes[operand] for operand in info.signature.sequences if node.axes.get(operand)}
    return COMPLEXITY.get(info.name) if len(sequences) == 1 else None


def shortened(formula: str) -> str:
    """Return a formula in mathematical notation."""
    return formula.replace("n * n", "n²").replace("d * d", "d²").replace("*", "·")


@dataclass(frozen=True)
class NodeRow:
    """The displayed facts of a node. `parameters` is 0 if the node shares or ties its parameters."""

    node: Node
    block: str
    parameters: int
    multiply_adds: int
    file: str


@dataclass(frozen=True)
class ModelSize:
    """The nodes of a model, its number of parameters, and the length of each axis, from which its cost is computed.

    `trained` are the parameters of its adapters, or all if it has none.
    """

    rows: list[NodeRow]
    parameters: int
    trained: int
    lengths: dict[str, int]

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one row of these lengths."""
        return sum(row.multiply_adds for row in self.rows)

    @property
    def condition(self) -> str:
        """The lengths as text."""
        return ", ".join(f"{axis} = {length}" for axis, length in self.lengths.items())


def measure(spec: Spec, sources: Sources, lengths: Mapping[str, int]) -> ModelSize:
    """Measure a model. `lengths` are the numbers of tokens of inputs by name, from which the cost is computed."""
    network = network_without_values(spec)
    sizes = axis_lengths(network, lengths)
    costs, rows = multiply_adds(network, sizes), []
    for node in spec.nodes:
        place = sources.place(node.path)
        file = f"{place.file}:{place.line}" if place else ""
        form = f"{_steps(node)} (same as {node.owner})" if node.shares else _steps(node)
        rows.append(NodeRow(node, form, _parameters(node, network), costs[node.address], file))
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    return ModelSize(rows, network.parameter_count, trained, sizes)


def show_model(size: ModelSize, name: str) -> None:
    """Print the nodes, with similar layers of a stack in one row."""
    groups = _alike(size.rows)
    cells = [[*_cells(group), group[0].file] for group in groups]
    print_table(Table(f"model {name}", NODE + texts("file"), cells))
    console = screen()
    adapters = f", {size.trained:,} of them in adapters, the others frozen" * (size.trained < size.parameters)
    console.print(f"{size.parameters:,} parameters, tied and shared ones counted once{adapters}")
    console.print(f"{size.multiply_adds:,} multiply-adds for one row with {size.condition}")
    if rows := [
        [node.address, node.block or "", *map(shortened, cost)]
        for node in (group[0].node for group in groups)
        if (cost := complexity(node))
    ]:
        columns = texts("node", "block", "multiply-adds a layer", "sequential", "longest path")
        print_table(Table("cost of mixing n positions of width d", columns, rows))


def nodes_table(spec: Spec) -> Table:
    """Return the nodes of a model, with similar layers of a stack in one row; the last row has the sums."""
    size = measure(spec, Sources(), {})
    last: list[Value] = [f"all, with {size.condition}", "", "", "", size.parameters, size.multiply_adds]
    return Table("", NODE, [*map(_cells, _alike(size.rows)), last])


def _cells(group: list[NodeRow]) -> list[Value]:
    """Return the cells of a row that stands for all nodes of the group."""
    row, *others = group
    owners = sum(not other.node.shares for other in others) + 1
    parameters = "–" if row.node.shares else f"{row.parameters:,}{_times(owners)}"
    cost = Cell(f"{row.multiply_adds:,}{_times(1 + len(others))}", row.multiply_adds)
    reads, shape = ", ".join(row.node.read), format_shape(row.node.shape)
    return [row.node.address, row.block, reads, shape, Cell(parameters, row.parameters), cost]


def model_record(size: ModelSize, name: str) -> dict[str, object]:
    """Return the facts that `show_model` prints, for JSON."""
    nodes = [
        {
            "address": row.node.address,
            "block": row.node.block,
            "form": row.block,
            "reads": {port: list(addresses) for port, addresses in row.node.reads.items()},
            "arguments": {key: str(value) if value is not None else None for key, value in row.node.arguments.items()},
            "shape": format_shape(row.node.shape),
            "parameters": row.parameters,
            "adapters": row.node.adapter_text or None,
            "quantized": row.node.quantized_text or None,
            "multiply_adds": row.multiply_adds,
            "complexity": known._asdict() if (known := complexity(row.node)) else None,
            "file": row.file,
        }
        for row in size.rows
    ]
    counts = {"parameters": size.parameters, "trained_parameters": size.trained}
    return {"model": name, **counts, "multiply_adds": size.multiply_adds, "lengths": size.lengths, "nodes": nodes}


def _times(count: int) -> str:
    return f" × {count}" if count > 1 else ""


def _alike(rows: list[NodeRow]) -> list[list[NodeRow]]:
    """Group nodes that differ only in their layer of a stack, in the order of the first node of each group."""
    groups: dict[str, list[NodeRow]] = {}
    for row in rows:
        node = row.node
        groups.setdefault(str((pattern(node.address), _steps(node), node.shape, node.arguments)), []).append(row)
    return list(groups.values())


def _steps(node: Node) -> str:
    """Return the block with the operations before and after it."""
    ranks = dict.fromkeys(str(adapter.rank) for adapter in node.adapters.values())
    formats = dict.fromkeys(one.weights for one in node.quantized.values())
    block = f"{node.block} + rank {', '.join(ranks)}" if ranks else " ".join(filter(None, (*formats, node.block)))
    parts = (" ".join(map(_step, node.pre)), block, " ".join(map(_step, node.post)))
    return " → ".join(part for part in parts if part)


def _step(step: Step) -> str:
    if step.kind in ("dropout", "norm") or (step.kind == "add" and step.value == 1 and not step.per_channel):
        return step.kind
    return f"{step.kind} {step.value:g}"


def _parameters(node: Node, network: Network) -> int:
    if node.shares or node.tie:
        return 0
    module = network.get_submodule(node.owner)
    parts = [*(["pre"] if node.pre else []), "block", "post"] if node.block else [""]
    own = map(module.get_submodule, parts)
    return sum(parameter.numel() for part in own for parameter in part.parameters())
