"""Check, before a run, the nodes of a model that use a plug-in block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfm_blocks.errors import Problem
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Axis, Node, Spec
from tfm_blocks.network.contract.case import Case
from tfm_blocks.network.contract.rules import BEFORE_A_RUN, first_breach
from tfm_blocks.registry.blocks import REGISTRY, BlockInfo
from tfm_blocks.registry.signature import is_letter
from tfm_blocks.registry.values import Part, block_names


def plugin_problems(spec: Spec, sources: Sources) -> list[Problem]:
    """Return a problem for each kind of node that uses a plug-in block and breaks a rule."""
    kinds: dict[str, tuple[Node, Case, str]] = {}
    for node in spec.nodes:
        for case, plugged in _cases(node, spec):
            kinds.setdefault(str((case.info.name, case.arguments, case.ports)), (node, case, plugged))
    return [problem for kind in kinds.values() for problem in _problems(*kind, sources)]


def _problems(node: Node, case: Case, plugged: str, sources: Sources) -> Iterator[Problem]:
    breach = first_breach([case], BEFORE_A_RUN)
    if breach:
        module = REGISTRY.blocks[plugged].cls.__module__
        name = f"{case.info.name} with the {case.part} {plugged}" if case.part else plugged
        help = f"{breach.fix}; tfm blocks --test {module} checks every rule"
        yield sources.problem(node.path, f"{name} (plug-in {module}): {breach.measured}", help=help)


def _cases(node: Node, spec: Spec) -> Iterator[tuple[Case, str]]:
    """Yield the node's block, and the norms around it, if they use a plug-in; each with the plug-in block's name."""
    info = REGISTRY.blocks[node.block] if node.block else None
    if info and is_letter(info.signature.output[0]):
        plugged = _plugged([info.name, *block_names(list(node.arguments.values()))])
        if plugged:
            part = "" if plugged[0] == info.name else REGISTRY.blocks[plugged[0]].category
            yield Case(info, _written(node.arguments), _ports(node, info, spec), part), plugged[0]
    for step in (*node.pre, *node.post):
        if step.block and _plugged([step.block]):
            norm = REGISTRY.blocks[step.block]
            port = norm.signature.ports[0]
            axes = " ".join([*port.axes[:-1], str(step.width)])
            yield Case(norm, _written(step.arguments), {port.name: (axes,)}), step.block


def _plugged(names: Sequence[str]) -> list[str]:
    return [name for name in names if not REGISTRY.blocks[name].shipped]


def _written(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as a model file writes them."""
    return {name: _value(value) for name, value in arguments.items() if value is not None}


def _value(value: Any) -> Any:
    if isinstance(value, Part):
        return {"block": value.block, **_written(value.arguments)}
    return [_value(item) for item in value] if isinstance(value, list) else value


def _ports(node: Node, info: BlockInfo, spec: Spec) -> dict[str, tuple[str, ...]]:
    """Return the axes that each port reads in the model. Ports without a batch axis are omitted."""
    shapes = spec.shapes
    return {
        port.name: tuple(
            " ".join(
                str(size) if not isinstance(size, Axis) else f"{axis}{number}" if axis in port.sums else axis
                for axis, size in zip(port.axes, shapes[address], strict=True)
            )
            for number, address in enumerate(node.reads[port.name])
        )
        for port in info.signature.ports
        if port.name in node.reads and is_letter(port.axes[0])
    }
