"""`tfm show`: the nodes of a model in execution order, with their inputs, shapes, parameters and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node, Spec, Step, format_shape
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.cost import LENGTH, axis_lengths, multiply_adds
from tfm_blocks.network.graph import Network
from tfm_blocks.report.complexity import complexity, complexity_sheet
from tfm_blocks.report.screen import screen
from tfm_blocks.report.table import Cell, Sheet, print_sheet


@dataclass(frozen=True)
class NodeRow:
    """The displayed facts of a node. `parameters` is 0 if the node shares or ties its parameters."""

    node: Node
    block: str
    parameters: int
    multiply_adds: int
    file: str


def show_model(spec: Spec, name: str, sources: Sources, lengths: Mapping[str, int]) -> None:
    """Print the nodes. `lengths` are the numbers of tokens of inputs by name, from which the cost is computed."""
    _print(*_measured(spec, sources, lengths), name)


def model_record(spec: Spec, name: str, sources: Sources, lengths: Mapping[str, int]) -> dict[str, object]:
    """Return the facts that `show_model` prints, for JSON."""
    return _record(*_measured(spec, sources, lengths), name)


def _measured(spec: Spec, sources: Sources, lengths: Mapping[str, int]) -> tuple[list[NodeRow], int, dict[str, int]]:
    """Return the rows, the number of parameters, and the length of each axis."""
    network = network_without_values(spec)
    sizes = axis_lengths(spec, lengths, LENGTH)
    rows = _rows(spec, network, sources, multiply_adds(network, sizes))
    return rows, sum(parameter.numel() for parameter in network.parameters()), sizes


def nodes_sheet(spec: Spec, name: str) -> Sheet:
    """Return the nodes of a model, with similar layers of a stack in one row; the last row has the sums."""
    rows, total, sizes = _measured(spec, Sources(), {})
    cost = sum(row.multiply_adds for row in rows)
    lengths = ", ".join(f"{axis} = {length}" for axis, length in sizes.items())
    last = [
        Cell(f"all, with {lengths}"),
        Cell(""),
        Cell(""),
        Cell(""),
        Cell(f"{total:,}", total),
        Cell(f"{cost:,}", cost),
    ]
    columns = ("node", "block", "reads", "shape", "parameters", "multiply-adds")
    return Sheet(name, columns, [*map(_cells, _alike(rows)), last], 4)


def _cells(group: list[NodeRow]) -> list[Cell]:
    row, *others = group
    texts = _texts(row, others)
    numbers = (Cell(texts[4], row.parameters), Cell(texts[5], row.multiply_adds))
    return [*map(Cell, texts[:4]), *numbers]


def _rows(spec: Spec, network: Network, sources: Sources, costs: Mapping[str, int]) -> list[NodeRow]:
    rows = []
    for node in spec.nodes:
        place = sources.place(node.path)
        file = f"{place.file}:{place.line}" if place else ""
        rows.append(NodeRow(node, _form(node), _parameters(node, network), costs[node.address], file))
    return rows


def _print(rows: list[NodeRow], total: int, sizes: Mapping[str, int], name: str) -> None:
    """Print the table; one row stands for all similar layers of a stack."""
    columns = ("node", "block", "reads", "shape", "parameters", "multiply-adds", "file")
    groups = _alike(rows)
    cells = [[*_cells(group), Cell(group[0].file)] for group in groups]
    console = screen()
    print_sheet(console, Sheet(f"model {name}", columns, cells, 4))
    console.print(f"{total:,} parameters, tied and shared ones counted once")
    lengths = ", ".join(f"{axis} = {length}" for axis, length in sizes.items())
    console.print(f"{sum(row.multiply_adds for row in rows):,} multiply-adds for one row with {lengths}")
    growth = complexity_sheet(group[0].node for group in groups)
    if growth:
        print_sheet(console, growth)


def _texts(row: NodeRow, others: list[NodeRow]) -> tuple[str, ...]:
    """Return the texts of a row that also stands for `others`."""
    owners = sum(not other.node.shares for other in others) + 1
    parameters = "–" if row.node.shares else f"{row.parameters:,}{_times(owners)}"
    cost = f"{row.multiply_adds:,}{_times(1 + len(others))}"
    return row.node.address, row.block, ", ".join(row.node.read), format_shape(row.node.shape), parameters, cost


def _record(rows: list[NodeRow], total: int, sizes: Mapping[str, int], name: str) -> dict[str, object]:
    nodes = [
        {
            "address": row.node.address,
            "block": row.node.block,
            "form": row.block,
            "reads": {port: list(addresses) for port, addresses in row.node.reads.items()},
            "arguments": {key: str(value) if value is not None else None for key, value in row.node.arguments.items()},
            "shape": format_shape(row.node.shape),
            "parameters": row.parameters,
            "multiply_adds": row.multiply_adds,
            "complexity": asdict(known) if (known := complexity(row.node)) else None,
            "file": row.file,
        }
        for row in rows
    ]
    cost = sum(row.multiply_adds for row in rows)
    return {"model": name, "parameters": total, "multiply_adds": cost, "lengths": dict(sizes), "nodes": nodes}


def _times(count: int) -> str:
    return f" × {count}" if count > 1 else ""


def _alike(rows: list[NodeRow]) -> list[list[NodeRow]]:
    """Group nodes that differ only in their layer of a stack, in the order of the first node of each group."""
    groups: dict[str, list[NodeRow]] = {}
    for row in rows:
        node = row.node
        place = ".".join("i" if part.isdigit() else part for part in node.address.split("."))
        groups.setdefault(str((place, _steps(node), node.shape, node.arguments)), []).append(row)
    return list(groups.values())


def _form(node: Node) -> str:
    return f"{_steps(node)} (same as {node.owner})" if node.shares else _steps(node)


def _steps(node: Node) -> str:
    """Return the block with the operations before and after it."""
    parts = (" ".join(map(_step, node.pre)), node.block or "", " ".join(map(_step, node.post)))
    return " → ".join(part for part in parts if part)


def _step(step: Step) -> str:
    if step.kind in ("dropout", "norm") or (step.kind == "add" and step.value == 1):
        return step.kind
    return f"{step.kind} {step.value:g}"


def _parameters(node: Node, network: Network) -> int:
    if node.shares or node.tie:
        return 0
    module = network.get_submodule(node.owner)
    parts = [*(["pre"] if node.pre else []), "block", "post"] if node.block else [""]
    own = [module.get_submodule(part) for part in parts]
    return sum(parameter.numel() for part in own for parameter in part.parameters())
