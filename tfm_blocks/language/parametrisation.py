"""Width and depth transfer: the base sizes of a model, and the depth of its stacks relative to the base."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from tfm_blocks.errors import ConfigError, Problem, config_error, expect_none, shown, suggest
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node, Path, Spec, Step
from tfm_blocks.language.tree import MODEL

Parametrisation = Literal["standard", "mup", "completep"]
NAMES: tuple[str, ...] = get_args(Parametrisation)
KEYS = ("parametrisation", "base")
WHERE = "where"  # in a resolved `base`: the values of the model that differ, by their paths
REPLACE_ADD = ("gru_gate", "write_streams")  # joins that take the place of residual connections
HELP = "use add_norm: pre there, or parametrisation: mup"
NO_BASE = "write the sizes of a small model, such as model.base.d_model=128"


def nested_scalars(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each scalar of a nested value with its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from nested_scalars(inner, (*path, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from nested_scalars(inner, (*path, str(index)))
    else:
        yield path, value


def _replaced(value: Any, changes: Mapping[str, Any], path: Path = ()) -> Any:
    """Return a copy of a nested value with other scalars at these dotted paths."""
    if isinstance(value, Mapping):
        return {key: _replaced(inner, changes, (*path, str(key))) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner, changes, (*path, str(index))) for index, inner in enumerate(value)]
    return changes.get(".".join(path), value)


def expect_standard(spec: Spec, format: str) -> None:
    """Raise ConfigError if the outputs of a model are scaled in a way that a format cannot express."""
    if spec.base is not None and spec.mapping["base"][WHERE]:
        rule = f"is {spec.parametrisation}, whose factors of embeddings, scores and logits {format} cannot express"
        help = "tfm export --to onnx writes such a model; or train with model.parametrisation=standard"
        raise config_error("model.parametrisation", rule, help)


def parametrise(spec: Spec, check: Callable[[Mapping[str, Any]], Spec], sources: Sources) -> Spec:
    """Return the spec with its parametrisation, its base, and the factors of its branches. Raises ConfigError.

    `check` checks a model's mapping. The base differs from the spec in its widths only. Under `completep`, a branch is
    multiplied by the base's number of layers, divided by the number of layers.
    """
    name, changes = _read(spec.mapping, sources)
    if name == "standard":
        return spec
    plain = {key: value for key, value in spec.mapping.items() if key not in KEYS}
    widths = {path: value for path, value in changes.items() if not _is_depth(path, plain, sources)}
    try:
        base, shallow = check(_replaced(plain, widths)), check(_replaced(plain, changes))
    except ConfigError as error:
        expect_valid_base(error.problems, sources)
        raise
    if [node.address for node in base.nodes] != [node.address for node in spec.nodes]:
        rule = "the widths of the base change the nodes of the model, so its weights cannot be compared"
        help = "choose the nodes without these knobs; write a depth as repeat: ${layers}, not as an arg"
        raise _base_error(sources, rule, help)
    nodes = spec.nodes
    if name == "completep":
        nodes = _scale_branches(spec.nodes, shallow.nodes, sources)
    return replace(spec, nodes=nodes, parametrisation=name, base=base)


def expect_valid_base(problems: Sequence[Problem], sources: Sources) -> None:
    """Raise ConfigError at `model.base` if the model with the sizes of the base has problems."""
    for problem in problems:
        rule = f"the model with these sizes is invalid: {problem.address}: {problem.rule}"
        raise _base_error(sources, rule, problem.help) from None


def _base_error(sources: Sources, rule: str, help: str) -> ConfigError:
    return ConfigError(sources.problem((*MODEL, "base"), rule, help=help))


def _read(model: Mapping[str, Any], sources: Sources) -> tuple[str, Mapping[str, Any]]:
    """Return the parametrisation, and the values of the base by their paths. Raises ConfigError."""
    name, base = model.get("parametrisation") or "standard", model.get("base")
    if name not in NAMES:
        rule = f"must be one of {', '.join(NAMES)}, but is {shown(name)}"
        raise ConfigError(sources.problem((*MODEL, "parametrisation"), rule, help=suggest(str(name), NAMES)))
    path = (*MODEL, "base")
    if name == "standard":
        typed = next((key for key in sources.overrides if key[: len(path)] == path), None)
        if base is not None and typed and not sources.is_typed((*MODEL, "parametrisation")):
            help = "write model.parametrisation=mup or completep, or leave it out"
            raise ConfigError(sources.problem(typed, "has no effect without a parametrisation", help=help))
        return name, {}
    if base is None:
        rule = f"{name} scales the weights relative to a base, which is missing"
        raise ConfigError(sources.problem((*MODEL, "parametrisation"), rule, blame=path, help=NO_BASE))
    if not isinstance(base, Mapping) or not isinstance(base.get(WHERE), Mapping):
        raise _base_error(sources, f"must have sizes by the names of knobs, but is {shown(base)}", NO_BASE)
    return name, base[WHERE]


def _is_depth(path: str, model: Mapping[str, Any], sources: Sources) -> bool:
    """Return True if a path is the number of layers of a stack. Raises ConfigError for copies, and without a stack."""
    parts = path.removesuffix(".times").split(".")
    if parts[0] != "graph" or parts[-1] != "repeat":
        return False
    stack: Any = model
    for part in parts[:-1]:
        inner = stack.items() if isinstance(stack, Mapping) else ()
        stack = next((value for key, value in inner if str(key) == part), None)
    if not isinstance(stack, Mapping):
        raise _base_error(sources, f"has a size at {shown(path)}, but the model has no such layers", NO_BASE)
    if stack.get("join") is not None:
        rule = "no rule is known for copies that are side by side (join) and differ in number from the base"
        help = "take the knob of their number out of model.base"
        raise ConfigError(sources.problem((*MODEL, *parts), rule, help=help))
    return True


def _scale_branches(nodes: Sequence[Node], base: Sequence[Node], sources: Sources) -> tuple[Node, ...]:
    """Return the nodes with their depth relative to the base, which multiplies their branches. Raises ConfigError."""
    layers, base_layers = _count_layers(nodes), _count_layers(base)
    if missing := sorted(layers.keys() - base_layers.keys()):
        rule = f"has no layers {missing[0]}, so the depths cannot be compared"
        help = "write parametrisation: mup, or keep at least the layers with this stack in the base"
        raise _base_error(sources, rule, help)
    problems: list[Problem] = []
    scaled, residual = [], set[str]()
    for node in nodes:
        stacks = [*_stacks(node.address)]
        deeper = math.prod(layers[stack] / base_layers[stack] for stack in stacks)
        adds = any(step.kind == "add" for step in node.post)
        replaces = node.block in REPLACE_ADD and not adds
        residual.update(stacks if adds or replaces else ())
        if deeper != 1 and (replaces or node.deep):
            part = node.block if replaces else "deepnorm"
            rule = f"no rule is known for {part} under completep with {deeper:g} times the layers of the base"
            problems.append(sources.problem(node.path, rule, help=HELP))
        elif deeper != 1:
            node = replace(node, deeper=deeper, post=_divided(node.post, deeper) if adds else node.post)
        scaled.append(node)
    for node in nodes:
        for stack in _stacks(node.address):
            if stack not in residual and layers[stack] != base_layers[stack]:
                residual.add(stack)  # is reported once
                rule = f"no rule is known for a stack without residual connections, {stack}, under completep"
                problems.append(sources.problem(node.path, rule, help=HELP))
    expect_none(list({(problem.address, problem.rule): problem for problem in problems}.values()))
    return tuple(scaled)


def _divided(steps: tuple[Step, ...], factor: float) -> tuple[Step, ...]:
    """Return the operations after a block, whose output is divided by `factor` before it is added."""
    add = next(place for place, step in enumerate(steps) if step.kind == "add")
    return (*steps[:add], Step("depth", 1 / factor, width=steps[add].width), *steps[add:])


def _stacks(address: str) -> Iterator[str]:
    """Yield the stacks around an address, without the indices of their layers: encoder and encoder.*.inner."""
    parts = address.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            yield ".".join("*" if before.isdigit() else before for before in parts[:place])


def _count_layers(nodes: Iterable[Node]) -> Mapping[str, int]:
    """Return the number of layers of each stack."""
    layers: defaultdict[str, int] = defaultdict(int)
    for node in nodes:
        numbers = [int(part) for part in node.address.split(".") if part.isdigit()]
        for stack, number in zip(_stacks(node.address), numbers, strict=True):
            layers[stack] = max(layers[stack], number + 1)
    return layers
