"""The `@block` decorator: the checker, shape inference, `tfm blocks` and the docs use its typed declaration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from tfm_blocks.errors import shown, suggest
from tfm_blocks.registry.expression import names_in_rule
from tfm_blocks.registry.signature import (
    KEEP,
    RIGHT_PADDED,
    Argument,
    Signature,
    axis_names,
    constructor_parameters,
    forward_letters,
    forward_ports,
    is_letter,
    parse_signature,
)
from tfm_blocks.registry.values import Part

GRAMMAR = frozenset(
    ["block", "same", "layer", "repeat", "in", "tie", "args", "add_norm", "at", "before", "after", "parallel", "join"]
)
CATEGORIES = ("norm", "activation", "join", "position", "scores", "selection", "gate", "router")

ALIASES = {  # names of activations in transformers
    "swish": "silu",
    "relu2": "squared_relu",
    "linear": "identity",
    "gelu_10": "clipped_gelu",
    "sqrtsoftplus": "sqrt_softplus",
    "gelu_python": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
}

Cls = TypeVar("Cls", bound=type)
Sees = Literal["nothing", "itself", "past", "all"]


@dataclass(frozen=True, kw_only=True)
class BlockInfo:
    """Declaration of a block, as used by the language.

    `sizes` are the letters that the constructor takes, and `keeps` the letters whose keep mask `forward` takes.
    `right_padded` are the letters for which `forward` takes a flag that padding comes last. `parameters` maps ports to
    parameters of `forward`. `tieable` is the parameter that `tie` shares.

    `sees` maps a port to the positions that an output position depends on: 'past', 'all', or the name of the argument
    that selects one of these. The key `kv|x` means kv if it is connected, else x. For unlisted ports, an output
    position sees only the same position. `where` maps rules on sizes and arguments to their reasons. add & norm
    surrounds a `branch`. A `weightless` block has no parameters, so layers with shared weights have separate instances
    of it, each with its own arguments.
    """

    name: str
    cls: type
    signature: Signature
    arguments: Mapping[str, Argument]
    sizes: tuple[str, ...]
    keeps: tuple[str, ...]
    right_padded: tuple[str, ...]
    parameters: Mapping[str, str]
    branch: bool
    weightless: bool
    category: str
    sees: Mapping[str, str]
    where: Mapping[str, str]
    tieable: str | None
    source: str

    def make(self, *sizes: Any, **arguments: Any) -> Any:
        return self.cls(*sizes, **arguments)

    @property
    def mixes_positions(self) -> bool:
        """Return True if outputs combine positions. Experts that choose among positions process each one alone."""
        return bool(self.sees) and "experts" not in self.arguments

    @property
    def description(self) -> str:
        """Return the docstring of the class."""
        return inspect.getdoc(self.cls) or ""

    def sight(self, port: str, wired: Collection[str], arguments: Mapping[str, Any]) -> Sees:
        """Return the positions of `port` that an output position sees. The ports `wired` are connected."""
        for ports, seen in self.sees.items():
            attended = next((name for name in ports.split("|") if name in wired), None)
            if port == attended and seen in self.arguments:
                return "past" if arguments[seen] == "causal" else "all"
            if port == attended:
                return cast(Sees, seen)
        return "itself"

    @property
    def shipped(self) -> bool:
        """Return True if the block belongs to tfm-blocks, False if it belongs to a plug-in."""
        return self.cls.__module__.startswith("tfm_blocks.")

    @property
    def alone(self) -> bool:
        """Return True if the block maps each vector separately: position-wise, without ids, masks and losses."""
        signature = self.signature
        if self.sees or hasattr(self.cls, "step") or any(port.sums & signature.sequences for port in signature.ports):
            return False
        return not (self.keeps or self.right_padded or signature.loss or signature.ports[0].ids)


@dataclass
class Registry:
    """Map names to blocks. The registry is closed: a model file can use only registered blocks.

    `broken` holds the installed plug-ins that failed to load, whose blocks are missing.
    """

    blocks: dict[str, BlockInfo] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)

    def add(self, info: BlockInfo) -> None:
        """Register a block. If a module is reloaded, its classes replace the earlier ones.

        Raises TypeError if another class has the name.
        """
        taken = self.blocks.get(info.name)
        if taken and _full_name(taken.cls) != _full_name(info.cls):
            raise TypeError(f"block {info.name!r} is already registered by {_full_name(taken.cls)}")
        self.blocks[info.name] = info

    def reserve(self, names: Iterable[str]) -> None:
        """Reserve names that no node may have, because the modules that hold nodes have attributes with these names."""
        self.reserved.update(name for name in names if not name.startswith("_"))

    def members(self, category: str) -> list[str]:
        return [name for name, info in self.blocks.items() if info.category == category]

    def suggest(self, name: object, known: Iterable[str]) -> str:
        """Return the help for an unknown name: the nearest of `known`, and the plug-ins that failed to load.

        For the name of an activation in transformers, the nearest is the activation.
        """
        known = [*known]
        if (alias := ALIASES.get(str(name))) in known:
            name = alias
        failed = [f"it may be a block of the plug-in {plugin}, which failed to load" for plugin in sorted(self.broken)]
        return "; ".join([suggest(str(name), known), *failed])

    def complete(self, value: Any) -> Any:
        """Add the defaults of the arguments that a part does not set, so that equal parts have equal values."""
        if not isinstance(value, Part):
            return value
        declared = self.blocks[value.block].arguments.values()
        defaults = {argument.name: argument.default for argument in declared if not argument.required}
        return Part(
            value.block, {name: self.complete(inner) for name, inner in {**defaults, **value.arguments}.items()}
        )

    def make(self, part: Part | None, *sizes: int, kinds: tuple[type, ...] = ()) -> Any:
        """Construct the module of a part, with the first of `sizes` that its constructor takes; None without a part.

        Raises ValueError unless the module is one of `kinds`, if there are any.
        """
        if part is None:
            return None
        info = self.blocks[part.block]
        if kinds and not issubclass(info.cls, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(
                f"{part.block} must be a {names} of {kinds[0].__module__}, as this {info.category} is used"
            )
        return info.make(*sizes[: len(info.sizes)], **part.arguments)


REGISTRY = Registry()


def block(
    name: str,
    signature: str,
    *,
    source: str,
    branch: bool = False,
    weightless: bool = False,
    category: str = "",
    sees: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    tieable: str | None = None,
) -> Callable[[Cls], Cls]:
    """Register an `nn.Module` class as the block `name`.

    Constructor: positional parameters are letters of the signature, and receive their sizes, or None if only an absent
    port would bind them. Keyword-only parameters are the YAML arguments, typed by their annotations. A constructor that
    ends in `**options` also has the keyword-only parameters of the base class that receives them.

    `forward`: positional parameters are named after the ports, followed by their axes: `x_BTD`. A keyword-only
    parameter `keep_BT` receives the keep mask of axis T, and `right_padded_T` is True if padding comes last on axis T.

    A block that reads other positions of a port lists the port in `sees`, and needs `start` and `step` if the output
    has that axis. A `weightless` block has no parameters; its arguments may use `i` in a layer with shared weights.
    `where` maps each rule, a single comparison such as `D % heads == 0`, to its reason in an error message. A rule may
    end in `unless ARGUMENT`, which disables the rule if that argument is set. `source` cites the paper. add & norm
    surrounds a `branch`.

    Raises TypeError at import if a declaration breaks these rules.
    """
    for option, value in (("sees", sees), ("where", where)):
        if not isinstance(value, Mapping | None):
            raise TypeError(f"block {name!r}: {option} must be a mapping, but is {shown(value)}")
    options: dict[str, Any] = {"name": name, "source": source, "branch": branch, "category": category}
    options |= {"tieable": tieable, "weightless": weightless}
    options |= {"signature": parse_signature(signature), "sees": dict(sees or {}), "where": dict(where or {})}

    def register(cls: Cls) -> Cls:
        REGISTRY.add(_info(cls, **options))
        return cls

    return register


def _info(cls: type, *, name: str, signature: Signature, **options: Any) -> BlockInfo:
    """Combine the decorator's options with the parameters of the class. Raises TypeError if they do not match."""
    if not isinstance(cls, type) or "torch.nn.modules.module" not in {base.__module__ for base in cls.__mro__}:
        raise TypeError(f"block {name!r}: @block decorates a subclass of torch.nn.Module, but got {shown(cls)}")
    sizes, arguments = constructor_parameters(name, cls)
    info = BlockInfo(
        name=name,
        cls=cls,
        signature=signature,
        arguments=arguments,
        sizes=sizes,
        keeps=forward_letters(cls, KEEP),
        right_padded=forward_letters(cls, RIGHT_PADDED),
        parameters=forward_ports(name, cls, signature),
        **options,
    )
    _check_names(info)
    _check_sight(info)
    return info


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _check_names(info: BlockInfo) -> None:
    letters, arguments = info.signature.letters, info.arguments
    ports = {port.name for port in info.signature.ports}
    clashes = (ports & set(arguments)) | ((ports | set(arguments)) & GRAMMAR)
    named = {axis for port in info.signature.ports for axis in port.axes}
    named |= {name for axis in info.signature.output for name in axis_names(axis)}
    unknown = {axis for axis in named if not is_letter(axis)} - set(arguments)
    unknown |= (set(info.sizes) | set(info.keeps) | set(info.right_padded)) - letters
    try:
        named_in_rules = {name for rule in info.where for name in names_in_rule(rule)}
    except ValueError as error:
        raise TypeError(f"block {info.name!r}: where: {error}") from error
    unknown |= named_in_rules - letters - set(arguments)
    unknown |= {port for key in info.sees for port in key.split("|")} - ports
    sights = {"nothing", "past", "all"} | set(arguments)
    if wrong := {str(sight) for sight in info.sees.values()} - sights:
        choices = ", ".join(sorted(sights))
        raise TypeError(f"block {info.name!r}: sees must name one of {choices}, but names {', '.join(sorted(wrong))}")
    if info.category and info.category not in CATEGORIES:
        raise TypeError(f"block {info.name!r}: there is no category {info.category!r}: {', '.join(CATEGORIES)}")
    if clashes:
        raise TypeError(
            f"block {info.name!r}: {sorted(clashes)} are used twice (as ports, arguments or reserved words)"
        )
    if info.weightless and info.branch:
        raise TypeError(
            f"block {info.name!r}: a branch block cannot be weightless, since the norms around it have weights"
        )
    if unknown:
        raise TypeError(f"block {info.name!r}: {sorted(unknown)} are neither letters of the signature nor arguments")


def _check_sight(info: BlockInfo) -> None:
    """Check that every input sequence has the output's positions or is listed in `sees`."""
    signature = info.signature
    seen = {port for key in info.sees for port in key.split("|")}
    for port in signature.ports:
        unaligned = (port.letters & signature.sequences) - set(signature.output) - port.sums
        if unaligned and port.name not in seen:
            raise TypeError(
                f"block {info.name!r}: the output has no axis {', '.join(sorted(unaligned))}, so sees must list "
                f"{port.name}: 'all', 'past' or the name of an argument"
            )
    decoded = {port for key, sight in info.sees.items() if sight not in ("nothing", "all") for port in key.split("|")}
    own = signature.sequences & set(signature.output)
    mixes_positions = any(signature.port(port).letters & own for port in decoded)
    if mixes_positions and not (hasattr(info.cls, "start") and hasattr(info.cls, "step")):
        raise TypeError(f"block {info.name!r} mixes positions: it needs start and step, to decode incrementally")
