"""The `@block` decorator: one typed declaration feeds the checker, shape inference, `tfm blocks` and the docs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast, get_type_hints

from tfm_blocks.errors import suggest
from tfm_blocks.registry.expression import names_in, split_rule
from tfm_blocks.registry.signature import Signature, is_letter, parse_signature
from tfm_blocks.registry.values import Kind, Part, convert, kind_of

GRAMMAR = frozenset(
    ["block", "same", "layer", "repeat", "in", "tie", "args", "add_norm", "at", "before", "after", "parallel", "join"]
)
CATEGORIES = ("norm", "activation", "join", "position", "scores", "gate", "router")
REQUIRED = inspect.Parameter.empty
KEEP, RIGHT_PADDED = "keep_B", "right_padded_"  # before the letter of an axis: parameters of `forward`

Cls = TypeVar("Cls", bound=type)
Values = Mapping[str, Any]
Translate = Callable[..., Values]
Sees = Literal["itself", "past", "all"]


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


@dataclass(frozen=True, kw_only=True)
class BlockInfo:
    """All that the language knows of a block.

    `sizes` are the letters that the constructor takes, `keeps` the letters whose keep mask `forward` takes,
    `right_padded` the letters for which `forward` takes whether padding comes last,
    `parameters` the names that `forward` gives to the ports, `tieable` the parameter that `tie` shares. `sees` tells
    what an output position sees of others: a port, or `kv|x` for kv and else x, to 'past', 'all' or the name of the
    argument that decides. Of other ports it sees its own position. A `weightless` block has no parameters, so it is not
    shared by the layers that share their weights: each of them has one with its own arguments.
    `alias_of` names the block that an alias stands for; `translate` returns the constructor's arguments for those of
    the model file.
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
    alias_of: str = ""
    translate: Callable[[Values], Values] = dict

    def make(self, *sizes: Any, **arguments: Any) -> Any:
        """Construct the module."""
        return self.cls(*sizes, **self.translate(arguments))

    @property
    def description(self) -> str:
        """The docstring of the class; for an alias, the block and the arguments that it stands for."""
        if not self.alias_of:
            return inspect.getdoc(self.cls) or ""
        defaults = {name: "…" if one.required else one.default for name, one in self.arguments.items()}
        block = REGISTRY.blocks[self.alias_of].arguments
        written = [
            f"{name}: {value}" for name, value in self.translate(defaults).items() if _differs(value, block[name])
        ]
        return f"Alias of `{self.alias_of}`" + (f" with `{', '.join(written)}`." if written else ".")

    def sight(self, port: str, given: Collection[str], arguments: Mapping[str, Any]) -> Sees:
        """What an output position sees of `port`, where the ports `given` are wired; mask=causal is the past."""
        for ports, seen in self.sees.items():
            attended = next((name for name in ports.split("|") if name in given), None)
            if port == attended and seen in self.arguments:
                return "past" if arguments[seen] == "causal" else "all"
            if port == attended:
                return cast(Sees, seen)
        return "itself"

    @property
    def shipped(self) -> bool:
        """Part of tfm-blocks; any other block comes from a plug-in."""
        return self.cls.__module__.startswith("tfm_blocks.")

    @property
    def stepped(self) -> bool:
        """Remembers the positions before the present one, so it has `start` and `step`."""
        return hasattr(self.cls, "step")

    @property
    def positionwise(self) -> bool:
        """An output position depends on its input position alone, wherever in the sequence it stands."""
        return not self.sees and not self.stepped and not self._merges_sequences

    @property
    def alone(self) -> bool:
        """Position-wise, from vectors, with nothing but the output: a position needs nothing but its vector."""
        signature = self.signature
        return self.positionwise and not (self.keeps or self.right_padded or signature.loss or signature.ports[0].ids)

    @property
    def _merges_sequences(self) -> bool:
        return any(port.sums & self.signature.sequences for port in self.signature.ports)


@dataclass
class Registry:
    """Names to blocks. It is closed: what is not in it cannot be written in a model file.

    `broken` holds the installed plug-ins that failed to load, whose blocks are missing.
    """

    blocks: dict[str, BlockInfo] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)

    def add(self, info: BlockInfo) -> None:
        """Raises TypeError on a name taken by another class; the same class of a module imported again replaces it."""
        taken = self.blocks.get(info.name)
        if taken and _full_name(taken.cls) != _full_name(info.cls):
            raise TypeError(f"block {info.name!r} is registered already, by {_full_name(taken.cls)}")
        self.blocks[info.name] = info

    def reserve(self, names: Iterable[str]) -> None:
        """Names that no node may have, because the modules that hold the nodes have attributes of these names."""
        self.reserved.update(name for name in names if not name.startswith("_"))

    def members(self, category: str) -> list[str]:
        """The names of the blocks of a category."""
        return [name for name, info in self.blocks.items() if info.category == category]

    def suggest(self, name: object, known: Iterable[str]) -> str:
        """Return the help for an unknown name: the nearest of `known`, and the plug-ins that failed to load."""
        lost = [f"it may be a block of the plug-in {one}, which failed to load" for one in sorted(self.broken)]
        return "; ".join([suggest(str(name), known), *lost])

    def make(self, part: Part, *sizes: int) -> Any:
        """The module of a part, with as many of `sizes` as its constructor takes."""
        info = self.blocks[part.block]
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
    """Registers an `nn.Module` class as the block `name`.

    Its positional constructor parameters are letters of the signature, injected as sizes (None where only an absent
    port would bind them); its keyword-only parameters are the YAML arguments, their annotations the types. A
    constructor that ends in `**options` also has the keyword-only parameters of the base class that it passes them to.
    The positional parameters of `forward` are called like the ports, with their axes behind: `x_BTD`. Its keyword-only
    `keep_BT` parameters receive the keep mask of axis T, and `right_padded_T` is True if padding comes last on axis T.
    A block that reads other positions of a port has it in `sees`, and `start` and `step` if the output has that axis.
    A `weightless` block has no parameters; its arguments may name `i` in a layer that shares its weights.
    A rule of `where` may end in `unless ARGUMENT`: where that is set, nothing is asked.
    Raises TypeError at import on a declaration that breaks these rules.
    """

    said: dict[str, Any] = {"name": name, "source": source, "branch": branch, "category": category, "tieable": tieable}
    said |= {"weightless": weightless}
    said |= {"signature": parse_signature(signature), "sees": dict(sees or {}), "where": dict(where or {})}

    def register(cls: Cls) -> Cls:
        REGISTRY.add(_info(cls, **said))
        return cls

    return register


def _info(cls: type, *, name: str, signature: Signature, **said: Any) -> BlockInfo:
    """What the class says of itself beside what was said of it. Raises TypeError where the two break the rules."""
    sizes, arguments = _constructor(name, cls)
    info = BlockInfo(
        name=name,
        cls=cls,
        signature=signature,
        arguments=arguments,
        sizes=sizes,
        keeps=_letters(cls, KEEP),
        right_padded=_letters(cls, RIGHT_PADDED),
        parameters=_parameters(name, cls, signature),
        **said,
    )
    _check_names(info)
    _check_sight(info)
    return info


def _differs(value: Any, argument: Argument) -> bool:
    return bool(value != argument.default) and not (argument.required and value == "…")


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def alias(name: str, *, of: str, takes: Collection[str]) -> Callable[[Translate], Translate]:
    """Register another name for the block `of`, for models that were written with that name.

    The alias has the arguments `takes` of the block, and the keyword-only parameters of the decorated function, which
    returns the arguments of the block that they stand for.
    """

    def register(function: Translate) -> Translate:
        block, own = REGISTRY.blocks[of], _arguments(name, function)

        def translate(values: Values) -> Values:
            taken = {key: value for key, value in values.items() if key not in own}
            return {**taken, **function(**{key: value for key, value in values.items() if key in own})}

        arguments = {**{key: block.arguments[key] for key in takes}, **own}
        REGISTRY.add(replace(block, name=name, arguments=arguments, alias_of=of, translate=translate))
        return function

    return register


def _constructor(name: str, cls: type) -> tuple[tuple[str, ...], dict[str, Argument]]:
    """The letters and the arguments of a class, with the arguments of the bases that it passes `**options` to."""
    constructors = _constructors(name, cls)
    arguments: dict[str, Argument] = {}
    for constructor in constructors:
        inherited = _arguments(name, constructor)
        arguments |= {key: inherited[key] for key in inherited if key not in arguments}
    return tuple(_sizes(name, constructors[0])) if constructors else (), arguments


def _constructors(name: str, cls: type) -> list[Any]:
    """The constructor of a class, and those of its bases up to the first that takes no `**options`; none of torch's."""
    found: list[Any] = []
    parameter = None
    for owner in cls.__mro__:
        if owner.__module__ == "torch.nn.modules.module":
            break
        if "__init__" in vars(owner):
            found.append(vars(owner)["__init__"])
            parameter = _any_number(found[-1])
            if parameter is None or parameter.kind is parameter.VAR_POSITIONAL:
                break
    if parameter is not None:
        rule = "arguments must be named, by the class or by a base class"
        raise TypeError(f"block {name!r}: the constructor takes *{parameter.name}; {rule}")
    return found


def _any_number(function: Any) -> inspect.Parameter | None:
    """The parameter `*args` or `**options`."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return next((one for one in _parameters_of(function) if one.kind in kinds), None)


def _parameters_of(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _sizes(name: str, constructor: Any) -> Iterator[str]:
    hints = get_type_hints(constructor)
    for parameter in _parameters_of(constructor)[1:]:
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            _expect_annotation(name, parameter, hints)
            yield parameter.name


def _arguments(name: str, function: Any) -> dict[str, Argument]:
    """The keyword-only parameters of a function."""
    hints = get_type_hints(function, include_extras=True)
    arguments = {}
    for parameter in _parameters_of(function):
        if parameter.kind is parameter.KEYWORD_ONLY:
            _expect_annotation(name, parameter, hints)
            argument = Argument(parameter.name, kind_of(hints[parameter.name]), parameter.default)
            if not argument.required:
                convert(argument.default, argument.kind)
            arguments[argument.name] = argument
    return arguments


def _expect_annotation(name: str, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> None:
    if parameter.name not in hints:
        raise TypeError(f"block {name!r}: parameter {parameter.name!r} has no annotation")


def _letters(cls: type, prefix: str) -> tuple[str, ...]:
    """The letters that `forward` has keyword-only parameters for."""
    forward = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    names = [one.name for one in forward.parameters.values() if one.kind is one.KEYWORD_ONLY]
    return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _parameters(name: str, cls: type, signature: Signature) -> dict[str, str]:
    """What `forward` calls each port: its name, or its name with the axes behind, in the order of the signature."""
    declared = inspect.signature(cls.forward).parameters.values()  # type: ignore[attr-defined]
    taken = [parameter.name for parameter in declared if parameter.kind is parameter.POSITIONAL_OR_KEYWORD][1:]
    options = [parameter.name for parameter in declared if parameter.kind is parameter.KEYWORD_ONLY]
    unknown = [option for option in options if not option.startswith((KEEP, RIGHT_PADDED))]
    if unknown:
        raise TypeError(
            f"block {name!r}: forward takes {', '.join(unknown)}, which nothing passes: "
            f"its keyword-only parameters are {KEEP}T, the keep mask of axis T, and {RIGHT_PADDED}T"
        )
    ports = [port.name for port in signature.ports]
    if len(taken) != len(ports) or any(
        one != port and not one.startswith(f"{port}_") for one, port in zip(taken, ports, strict=True)
    ):
        raise TypeError(
            f"block {name!r}: forward takes {', '.join(taken) or 'nothing'}, but its ports are {', '.join(ports)}: "
            "call each parameter like its port, with its axes behind, as x_BTD"
        )
    return dict(zip(ports, taken, strict=True))


def _check_names(info: BlockInfo) -> None:
    letters, arguments = info.signature.letters, info.arguments
    ports = {port.name for port in info.signature.ports}
    clashes = (ports & set(arguments)) | ((ports | set(arguments)) & GRAMMAR)
    named = {axis for port in info.signature.ports for axis in port.axes} | set(info.signature.output)
    unknown = {axis for axis in named if not is_letter(axis)} - set(arguments)
    unknown |= (set(info.sizes) | set(info.keeps) | set(info.right_padded)) - letters
    named_in_rules = {name for rule in info.where for part in split_rule(rule) for name in names_in(part)}
    unknown |= named_in_rules - letters - set(arguments)
    unknown |= {port for key in info.sees for port in key.split("|")} - ports
    unknown |= set(info.sees.values()) - {"past", "all"} - set(arguments)
    if info.category and info.category not in CATEGORIES:
        raise TypeError(f"block {info.name!r}: there is no category {info.category!r}: {', '.join(CATEGORIES)}")
    if clashes:
        raise TypeError(
            f"block {info.name!r}: {sorted(clashes)} name two things at once (ports, arguments, grammar words)"
        )
    if info.weightless and info.branch:
        raise TypeError(
            f"block {info.name!r}: a branch block is not weightless, since the norms around it have weights"
        )
    if unknown:
        raise TypeError(f"block {info.name!r}: {sorted(unknown)} are neither letters of the signature nor arguments")


def _check_sight(info: BlockInfo) -> None:
    """Every sequence that a block takes in is seen at the output's own position, or `sees` says of it what is seen."""
    signature = info.signature
    seen = {port for key in info.sees for port in key.split("|")}
    for port in signature.ports:
        unaligned = (port.letters & signature.sequences) - set(signature.output) - port.sums
        if unaligned and port.name not in seen:
            raise TypeError(
                f"block {info.name!r}: the output has no axis {', '.join(sorted(unaligned))}, so sees must say what it "
                f"sees of {port.name}: 'all', 'past' or the name of an argument"
            )
    remembers = any(signature.port(port).letters & signature.sequences & set(signature.output) for port in seen)
    if remembers and not (hasattr(info.cls, "start") and hasattr(info.cls, "step")):
        raise TypeError(f"block {info.name!r} mixes positions: it needs start and step, to decode incrementally")
