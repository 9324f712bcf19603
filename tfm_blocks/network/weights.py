"""What each weight of a network is: its role, its symbolic shape, its ties, its uses and its depth."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tfm_blocks.blocks.layers.linear import Linear, StackedMaps
from tfm_blocks.config.settings import Where
from tfm_blocks.errors import ConfigError, Problem, shown, suggest
from tfm_blocks.language.spec import Node
from tfm_blocks.network.graph import GENERATOR, Network
from tfm_blocks.network.initial import initialise
from tfm_blocks.registry.blocks import REGISTRY

Role = Literal[
    "embedding", "position", "matrix", "head", "bias", "gain", "router", "convolution", "recurrent", "scalar",
    "experts", "adapter",
]  # fmt: skip
LOOKED_UP: frozenset[Role] = frozenset({"embedding", "position"})  # a token reads one of its rows
NOT_DECAYED: frozenset[Role] = frozenset({"bias", "gain", "scalar"})
KNOWN_LAYERS = (nn.Linear, nn.LayerNorm, nn.RMSNorm)  # of torch; their roles follow from the shapes
LAYER = re.compile(r"\.(\d+)(?=\.|$)")  # the index of a layer, after the address of its stack
BY_AXES: tuple[Role, ...] = ("scalar", "gain", "matrix", "experts")  # roles of weights with 0 to 3 axes


class Learning(NamedTuple):
    """How a weight learns: its group, the name of its optimizer, the factor of its learning rate, and its decay."""

    group: str
    optimizer: str
    rate: float
    decay: float


@dataclass(frozen=True)
class Weight:
    """A weight of a network, under the first of its `names`; a tied weight has several names.

    `roles` and `blocks` have the role and the block under each name. `node` is the node that owns the weight, and
    `uses` counts the nodes that read it, those with shared weights and ties included. `depth` is the index of the layer
    and the number of layers, in the innermost stack with several layers around the node; (0, 1) outside of such stacks.
    `parts` are the widths of the maps that are stacked along the output axis, such as queries, keys and values; the
    output axis is the last but one, and the first of convolutions. `heads` counts the attention heads of each part.
    """

    names: tuple[str, ...]
    roles: tuple[Role, ...]
    blocks: tuple[str, ...]
    shape: tuple[int, ...]
    node: Node
    uses: int
    depth: tuple[int, int]
    parts: tuple[int, ...]
    heads: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the address of the weight in a state dict."""
        return self.names[0]

    @property
    def size(self) -> int:
        """Return the number of parameters."""
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Return True if weight decay applies to the weight: not to biases, gains and scalars."""
        return NOT_DECAYED.isdisjoint(self.roles)


def list_weights(network: Network) -> list[Weight]:
    """Return every weight of a network once, in the order of `network.parameters()`. No value is read.

    The addresses of a generator begin with its name.
    """
    names: defaultdict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    calls = [(call.node.owner, call) for call in network.all_calls]
    if inner := network.replacer:
        calls += [(f"{GENERATOR}.{call.node.owner}", call) for call in inner.all_calls]
    uses = defaultdict[nn.Parameter, int](int)
    for _, call in calls:
        for parameter in call.own_parameters:
            uses[parameter] += 1
    owners = {owner: call.node for owner, call in reversed(calls)}
    depths, weights = _depths(owners), []
    for parameter, own in names.items():
        nodes = [max((owner for owner in owners if f"{name}.".startswith(f"{owner}.")), key=len) for name in own]
        owner, blocks = nodes[0], tuple(dict.fromkeys(block for one in nodes if (block := owners[one].block)))
        roles = tuple(dict.fromkeys(role_of(network, name, parameter.ndim)[0] for name in own))
        shape, node, depth = tuple(parameter.shape), owners[owner], depths[owner]
        outputs = 0 if "convolution" in roles else max(len(shape) - 2, 0)  # the axis
        stacked = _parts(network.get_submodule(own[0].rpartition(".")[0]), shape, outputs)
        weights.append(Weight(tuple(own), roles, blocks, shape, node, uses[parameter], depth, *stacked))
    return weights


def _depths(addresses: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the index and the number of layers in the innermost stack with several layers around each address."""
    places = {
        address: [(address[: match.start()], int(match[1])) for match in LAYER.finditer(address)]
        for address in addresses
    }
    layers = {stack: index + 1 for stack, index in sorted(chain.from_iterable(places.values()))}
    inner = {address: [place for place in reversed(own) if layers[place[0]] > 1] for address, own in places.items()}
    return {address: (own[0][1], layers[own[0][0]]) if own else (0, 1) for address, own in inner.items()}


def count_without_embeddings(network: Network) -> int:
    """Return the number of parameters without the tables that are only looked up; a tied unembedding counts."""
    return sum(weight.size for weight in list_weights(network) if not LOOKED_UP.issuperset(weight.roles))


def matches(weight: Weight, where: Where) -> bool:
    """Return True if the weight has one of the roles, of the nodes and of the blocks of `where`; a missing key has all.

    A node is an address or its beginning. The index of a layer may be `*` or left out, for all layers: `encoder`,
    `encoder.0`, `encoder.*.attn` and `encoder.attn`.
    """
    return (
        (not where.role or not set(where.role).isdisjoint(weight.roles))
        and (not where.node or any(_lies_in(name.split("."), where.node) for name in weight.names))
        and (not where.block or not set(where.block).isdisjoint(weight.blocks))
    )


def _lies_in(address: Sequence[str], nodes: Sequence[str]) -> bool:
    forms = address, [part for part in address if not part.isdigit()]
    pairs = ((form, node.split(".")) for form in forms for node in nodes)
    return any(len(node) <= len(form) and all(map(_fits, form, node)) for form, node in pairs)


def _fits(part: str, want: str) -> bool:
    """Return True if `want` is the part of an address, or `*` for the index of any layer."""
    return want == part or (want == "*" and part.isdigit())


def find_where_problems(weights: Sequence[Weight], where: Where) -> Iterator[tuple[str, str, str]]:
    """Yield the key, the rule and the fix of each name in `where` that no weight of the model has."""
    owners = {weight.node.owner: weight.node.owner.split(".") for weight in weights}
    nodes = {".".join(parts[:end]): None for parts in owners.values() for end in range(1, len(parts) + 1)}
    blocks = dict.fromkeys(block for weight in weights for block in weight.blocks)
    for node in where.node:
        if not any(_lies_in(name.split("."), [node]) for weight in weights for name in weight.names):
            yield "node", f"the model has no weights at a node {shown(node)}", suggest(node, nodes)
    for key, names, known in (("role", where.role, get_args(Role)), ("block", where.block, blocks)):
        for name in names:
            if name not in known:
                rule = f"no {'role' if key == 'role' else 'block with weights in the model'} is called {shown(name)}"
                is_norm = key == "block" and name in REGISTRY.blocks and REGISTRY.blocks[name].category == "norm"
                help = "the norms of add & norm belong to the block of their node; their role is gain"
                yield key, rule, help if is_norm else suggest(name, known)


def _parts(module: nn.Module, shape: tuple[int, ...], axis: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the widths of the maps that `module` stacks along an axis of its weight, and their attention heads."""
    width = shape[axis] if shape else 1
    parts = module.parts if isinstance(module, StackedMaps) else [width]
    if sum(parts) != width:
        return (width,), (1,)
    return tuple(parts), module.heads if isinstance(module, Linear) else (1,) * len(parts)


def role_of(network: nn.Module, name: str, axes: int) -> tuple[Role, bool]:
    """Return the role that the outermost module around a weight declares, or else the role that its shape allows.

    A class declares the roles of its weights in `weight_roles`, by their addresses below the module. The second value
    is True if a class declares the role. Raises ConfigError if a class declares a role that does not exist.
    """
    if role := declared_of(network, name, "weight_roles")[1]:
        if role not in get_args(Role):
            rule = f"weight_roles declares the role {shown(role)}, which does not exist"
            raise ConfigError(Problem(name, rule, help=suggest(str(role), get_args(Role))))
        return role, True
    return "bias" if axes <= 1 and name.endswith("bias") else BY_AXES[min(axes, 3)], False


def declared_of(network: nn.Module, name: str, attribute: str) -> tuple[nn.Module, Any]:
    """Return the innermost module around a weight, and what the outermost one declares for the weight, or ""."""
    module, declared, parts = network, "", name.split(".")
    for place, part in enumerate(parts):
        below = ".".join(parts[place:])
        for kind in type(module).__mro__:
            declared = declared or vars(kind).get(attribute, {}).get(below, "")
        if place < len(parts) - 1:
            module = module.get_submodule(part)
    return module, declared


def roles_by_shape(block: nn.Module) -> dict[str, tuple[Role, str]]:
    """Return the role and the class of each weight that a plug-in's block registers without declaring its role.

    Weights of shipped layers, and of torch's linear maps and norms, have the role that their shape allows.
    """
    found: dict[str, tuple[Role, str]] = {}
    for name, parameter in block.named_parameters():
        owner = block.get_submodule(name.rpartition(".")[0])
        role, declared = role_of(block, name, parameter.ndim)
        known = isinstance(owner, KNOWN_LAYERS) or type(owner).__module__.startswith("tfm_blocks.")
        if not declared and not known:
            found[name] = role, type(owner).__name__
    return found


def unused_roles(block: nn.Module) -> set[tuple[str, str]]:
    """Return the classes of a plug-in and the addresses in their `weight_roles` that are not weights of the block."""
    return {
        (kind.__name__, address)
        for module in block.modules()
        for kind in type(module).__mro__
        if not kind.__module__.startswith("tfm_blocks.")
        for address in vars(kind).get("weight_roles", {}).keys() - {name for name, _ in module.named_parameters()}
    }


def symbolic_shapes(
    shapes: Mapping[str, Sequence[tuple[int, ...]]], sizes: Mapping[str, int]
) -> Iterator[tuple[str, ...]]:
    """Yield the symbolic shape of each weight, such as ("3·d_model", "d_model/2").

    `shapes` has the shapes of all weights under "", and with each knob doubled, whose value is in `sizes`. An axis that
    doubles with a knob has the knob as a factor, and an axis that does not double with any knob is a number.
    """
    for number, shape in enumerate(shapes[""]):
        axes = []
        for axis, size in enumerate(shape):
            factors = [knob for knob, changed in shapes.items() if knob and changed[number][axis] == 2 * size]
            rest = Fraction(size, math.prod(sizes[knob] for knob in factors))
            whole = [str(rest.numerator)] if rest.numerator > 1 or not factors else []
            axes.append("·".join([*whole, *factors]) + (f"/{rest.denominator}" if rest.denominator > 1 else ""))
        yield tuple(axes)


class _FilledValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records with which distribution each part of a storage is filled: its name and two numbers.

    `scaled` has the factor by which some rows of a part are then multiplied, such as the values of each head.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: defaultdict[int, dict[int, tuple[str, float, float]]] = defaultdict(dict)
        self.scaled: defaultdict[int, dict[int, float]] = defaultdict(dict)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.endswith("_") and isinstance(args[0], Tensor):
            storage, place = args[0].untyped_storage()._cdata, int(args[0].storage_offset())
            parts = self.parts[storage]
            kind, first, second = parts.get(place, ("set", 0.0, 0.0))
            if any(isinstance(one, Tensor) for one in args[1:]):
                kind = "set"
            elif name in ("normal_", "uniform_"):
                numbers = [*args[1:], *(0.0, 1.0)[len(args) - 1 :]]  # values that equal torch's defaults are left out
                kind, first, second = name[:-1], float(numbers[0]), float(numbers[1])
            elif name in ("zero_", "fill_"):
                kind, first = "constant", float(args[1]) if name == "fill_" else 0.0
            elif name == "mul_" and place not in parts and (before := [begin for begin in parts if begin < place]):
                self.scaled[storage][max(before)] = float(args[1])
                return func(*args, **(kwargs or {}))
            elif name == "mul_":
                first, second = first * float(args[1]), second * float(args[1])
            else:
                kind = "set"
            parts[place] = (kind, first, second)
        return func(*args, **(kwargs or {}))


Fill = tuple[int, str, float, float]  # where a part of a weight begins, and its distribution: a name and two numbers


def initial_fills(network: Network) -> dict[str, list[Fill]]:
    """Return the parts of each weight by its first name, in order. The network is on the meta device."""
    return {name: [(place, *part) for place, part, _ in parts] for name, parts in _filled_parts(network).items()}


def _filled_parts(network: Network) -> dict[str, list[tuple[int, tuple[str, float, float], float]]]:
    """Return the place of each part of each weight, its distribution, and the factor of some of its rows."""
    with _FilledValues() as filled:
        initialise(network, 0)
    return {
        name: [(place, part, filled.scaled[storage].get(place, 1.0)) for place, part in sorted(parts.items())]
        for name, parameter in network.named_parameters()
        if (parts := filled.parts.get(storage := parameter.untyped_storage()._cdata))
    }


def initial_distributions(network: Network, factors: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Return the distribution of the initial values of each weight by its first name, such as `uniform ±0.0765`.

    The network is on the meta device. `factors` multiply the parts of some weights. Parts of a weight with different
    distributions are separated by commas; `set` stands for values that no such distribution describes.
    """
    distributions = {}
    for name, parts in _filled_parts(network).items():
        own = zip(parts, factors.get(name, [1.0] * len(parts)), strict=True)
        scaled = ((part, factor * by) for (_, part, rows), factor in own for by in {1.0: None, rows: None})
        texts = [_distribution(kind, first * factor, second * factor) for (kind, first, second), factor in scaled]
        distributions[name] = ", ".join(dict.fromkeys(texts))
    return distributions


def _distribution(kind: str, first: float, second: float) -> str:
    if kind == "uniform":
        return f"uniform ±{second:.3g}" if first == -second else f"uniform {first:.3g} to {second:.3g}"
    return {"constant": f"{first:g}", "normal": f"normal {first:g} ± {second:.3g}"}.get(kind, kind)


def common_embeddings(network: Network, generator: Network) -> Iterator[tuple[Weight, Weight]]:
    """Yield the embeddings and positions that have the same address in both networks, which share them."""
    own = {weight.name: weight for weight in list_weights(network)}
    for weight in list_weights(generator):
        other = own.get(weight.name)
        if other and not LOOKED_UP.isdisjoint(weight.roles) and not LOOKED_UP.isdisjoint(other.roles):
            yield other, weight


def attach_generator(network: Network, generator: Network) -> None:
    """Make the generator a child of the network, with the embeddings of the network instead of separate ones."""
    shared = {
        generator.get_parameter(other.name): network.get_parameter(own.name)
        for own, other in common_embeddings(network, generator)
    }
    for module in generator.modules():
        for name, parameter in module._parameters.items():
            if parameter in shared:
                module._parameters[name] = shared[parameter]
    network.add_module(GENERATOR, generator)
