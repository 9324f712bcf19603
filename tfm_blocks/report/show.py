"""`tfm show`: the nodes of a model in running order, with what they read, their shapes and parameters."""

from __future__ import annotations

from rich.table import Table

from tfm_blocks.language.spec import Node, Spec
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.graph import Network
from tfm_blocks.report.screen import screen


def show_model(spec: Spec, name: str) -> None:
    """Prints the table; of the layers of a stack, the first stands for all that are like it."""
    network = network_without_values(spec)
    table = Table("node", "block", "reads", "shape", "parameters", title=f"model {name}", title_justify="left")
    table.columns[4].justify = "right"
    repeats = _repeats(spec)
    for node in spec.nodes:
        if ".".join(_layerless(node)) in repeats and not _first(node):
            continue
        times = repeats.get(".".join(_layerless(node)), 1)
        count = f"{_parameters(node, network):,}" + (f" × {times}" if times > 1 else "")
        shape = " ".join(map(str, node.shape))
        table.add_row(node.address, _form(node), ", ".join(node.reads.values()), shape, "–" if node.shares else count)
    console = screen()
    console.print(table)
    total = sum(parameter.numel() for parameter in network.parameters())
    console.print(f"{total:,} parameters, tied and shared ones counted once")


def _layerless(node: Node) -> list[str]:
    return [part for part in node.address.split(".") if not part.isdigit()]


def _first(node: Node) -> bool:
    return all(part == "0" for part in node.address.split(".") if part.isdigit())


def _repeats(spec: Spec) -> dict[str, int]:
    """How many layers have a node alike in all but the address."""
    alike: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for node in spec.nodes:
        key = ".".join(_layerless(node))
        alike.setdefault(key, set()).add(str((node.block, node.shape, node.arguments, node.pre, node.post)))
        counts[key] = counts.get(key, 0) + 1
    return {key: count for key, count in counts.items() if count > 1 and len(alike[key]) == 1}


def _form(node: Node) -> str:
    steps = " ".join(step.kind for step in node.post)
    if node.block is None:
        return steps
    before = " ".join(step.kind for step in node.pre)
    around = " → ".join(part for part in (before, node.block, steps) if part)
    return f"{around} (same as {node.owner})" if node.shares else around


def _parameters(node: Node, network: Network) -> int:
    own = network.get_submodule(node.owner).parameters()
    return 0 if node.tie else sum(parameter.numel() for parameter in own)
