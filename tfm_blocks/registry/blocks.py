"""The `@block` decorator: one typed declaration feeds the checker, shape inference, `tfm blocks` and the docs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast, get_type_hints

from tfm_blocks.registry.expression import names_in
from tfm_blocks.registry.signature import Signature, is_letter, parse_signature
from tfm_blocks.registry.values import Kind, convert, kind_of

GRAMMAR = frozenset(
    ["block", "same", "layer", "repeat", "in", "tie", "args", "add_norm", "at", "before", "after", "parallel", "join"]
)
REQUIRED = inspect.Parameter.empty

Cls = TypeVar("Cls", bound=type)
Sight = Literal["itself", "past", "all"]


@dataclass(frozen=True)
class Argument:
    """A YAML argument of a block; `default` is REQUIRED where there is none."""

    name: str
    kind: Kind
    default: Any

    @property
    def required(self) -> bool:
        """Must come from the node or from the args in scope."""
        return self.default is REQUIRED


@dataclass(frozen=True)
class BlockInfo:
    """All that the language knows of a block.

    `sizes` are the letters that the constructor takes, `keeps` the letters whose keep mask `forward` takes, `tieable`
    the parameter that `tie` shares. `sees` tells what an output position sees of others: a port, or `kv|x` for kv and
    else x, to 'past', 'all' or the name of the argument that decides. Of other ports it sees its own position.
    """

    name: str
    cls: type
    signature: Signature
    arguments: Mapping[str, Argument]
    sizes: tuple[str, ...]
    keeps: tuple[str, ...]
    branch: bool
    norm: bool
    sees: Mapping[str, str]
    where: Mapping[str, str]
    tieable: str | None
    source: str

    def sight(self, port: str, given: Collection[str], arguments: Mapping[str, Any]) -> Sight:
        """What an output position sees of `port`, where the ports `given` are wired; mask=causal is the past."""
        for ports, seen in self.sees.items():
            attended = next((name for name in ports.split("|") if name in given), None)
            if port == attended and seen in self.arguments:
                return "past" if arguments[seen] == "causal" else "all"
            if port == attended:
                return cast(Sight, seen)
        return "itself"

    @property
    def positionwise(self) -> bool:
        """An output position depends on its input position alone, wherever in the sequence it stands."""
        return not self.sees and not hasattr(self.cls, "step")


@dataclass
class Registry:
    """Names to blocks. It is closed: what is not in it cannot be written in a model file."""

    blocks: dict[str, BlockInfo] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)

    def add(self, info: BlockInfo) -> None:
        """Raises TypeError on a name taken by another class."""
        taken = self.blocks.get(info.name)
        if taken and taken.cls.__qualname__ != info.cls.__qualname__:
            raise TypeError(
                f"block {info.name!r} is registered already, by {taken.cls.__module__}.{taken.cls.__qualname__}"
            )
        self.blocks[info.name] = info

    def reserve(self, names: Iterable[str]) -> None:
        """Names that no node may have, because the module that holds the nodes has attributes of these names."""
        self.reserved.update(name for name in names if not name.startswith("_"))

    def norms(self) -> list[str]:
        """The names that the arg `norm` can have."""
        return [name for name, info in self.blocks.items() if info.norm]


REGISTRY = Registry()


def block(
    name: str,
    signature: str,
    *,
    source: str,
    branch: bool = False,
    norm: bool = False,
    sees: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    tieable: str | None = None,
) -> Callable[[Cls], Cls]:
    """Registers an `nn.Module` class as the block `name`.

    Its positional constructor parameters are letters of the signature, injected as sizes (None where only an absent
    port would bind them); its keyword-only parameters are the YAML arguments, their annotations the types. Keyword-only
    `keep_BT` parameters of `forward` receive the keep mask of axis T. A block that mixes positions has `sees`, and
    `start` and `step` for incremental decoding. Raises TypeError at import on a declaration that breaks these rules.
    """

    def register(cls: Cls) -> Cls:
        parsed = parse_signature(signature)
        sizes, arguments = _constructor(name, cls)
        info = BlockInfo(
            name,
            cls,
            parsed,
            arguments,
            sizes,
            _keeps(cls),
            branch,
            norm,
            dict(sees or {}),
            dict(where or {}),
            tieable,
            source,
        )
        _check(info)
        REGISTRY.add(info)
        return cls

    return register


def _constructor(name: str, cls: type) -> tuple[tuple[str, ...], dict[str, Argument]]:
    parameters = list(inspect.signature(cls).parameters.values())
    init: Any = vars(cls).get("__init__", cls.__init__)  # type: ignore[misc]
    hints = get_type_hints(init, vars(sys.modules[cls.__module__]), include_extras=True)
    sizes: list[str] = []
    arguments = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            raise TypeError(f"block {name!r}: the constructor takes *{parameter.name}; arguments must be named")
        if parameter.name not in hints:
            raise TypeError(f"block {name!r}: parameter {parameter.name!r} has no annotation")
        if parameter.kind is parameter.KEYWORD_ONLY:
            arguments[parameter.name] = Argument(parameter.name, kind_of(hints[parameter.name]), parameter.default)
        else:
            sizes.append(parameter.name)
    return tuple(sizes), arguments


def _keeps(cls: type) -> tuple[str, ...]:
    forward = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    return tuple(name.removeprefix("keep_B") for name in forward.parameters if name.startswith("keep_B"))


def _check(info: BlockInfo) -> None:
    letters, arguments = info.signature.letters, info.arguments
    ports = {port.name for port in info.signature.ports}
    clashes = (ports & set(arguments)) | ((ports | set(arguments)) & GRAMMAR)
    named = {axis for port in info.signature.ports for axis in port.axes} | set(info.signature.output)
    unknown = {axis for axis in named if not is_letter(axis)} - set(arguments)
    unknown |= (set(info.sizes) | set(info.keeps)) - letters
    unknown |= {name for rule in info.where for name in names_in(rule)} - letters - set(arguments)
    unknown |= {port for key in info.sees for port in key.split("|")} - ports
    if clashes:
        raise TypeError(
            f"block {info.name!r}: {sorted(clashes)} name two things at once (ports, arguments, grammar words)"
        )
    if unknown:
        raise TypeError(f"block {info.name!r}: {sorted(unknown)} are neither letters of the signature nor arguments")
    if info.sees and not (hasattr(info.cls, "start") and hasattr(info.cls, "step")):
        raise TypeError(f"block {info.name!r} mixes positions: it needs start and step, to decode incrementally")
    for argument in arguments.values():
        if not argument.required:
            convert(argument.default, argument.kind)
