"""The `@optimizer` decorator: settings, docs and training use its typed declaration. Does not need torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

Make = TypeVar("Make", bound=Callable[..., Any])
RESERVED = (
    *("name", "groups", "others", "where", "train", "rate", "cautious", "independent_decay"),  # settings of all
    *("params", "lr", "parts", "peak_decay", "peak_momentum", "cautious_decay"),  # keys of parameter groups
)


@dataclass(frozen=True, eq=False)
class OptimizerInfo:
    """Declaration of an optimizer. `settings` maps names of settings to their types and defaults.

    `roles` are the roles of the weights that it takes, or empty for all. The decay of a `decoupled` optimizer shrinks
    the weights, apart from the gradient.
    """

    name: str
    make: Callable[..., Any]
    settings: Mapping[str, tuple[Any, Any]]
    source: str
    decoupled: bool
    roles: tuple[str, ...]

    @property
    def description(self) -> str:
        """Return the docstring and the source."""
        return f"{inspect.getdoc(self.make)} Source: {self.source}."


OPTIMIZERS: dict[str, OptimizerInfo] = {}


def optimizer(
    name: str, *, source: str, decoupled: bool = False, roles: Collection[str] = ()
) -> Callable[[Make], Make]:
    """Register a subclass of `torch.optim.Optimizer`, or a function that returns one, as the optimizer `name`.

    It is called with a list of torch's parameter groups, each with its own value of every setting and `lr`, and with
    the settings by keyword. Its keyword-only parameters are these settings, typed by their annotations; each needs a
    default. If it has `weight_decay`, biases, gains and scalars get a value of 0. `source` cites the paper.

    `decoupled`: each step subtracts `lr · weight_decay` times the weights, apart from the gradient. `roles`: the
    optimizer takes only weights of these roles, and the settings `others` describe the optimizer of the other weights.
    Its parameter groups contain `parts`, the widths of the maps that each of their weights stacks, or None.

    If a module is reloaded, its optimizers replace the earlier ones. Raises TypeError at import if a declaration
    breaks these rules.
    """

    def register(make: Make) -> Make:
        taken, home = OPTIMIZERS.get(name), (make.__module__, make.__qualname__)
        if taken and (taken.make.__module__, taken.make.__qualname__) != home:
            raise TypeError(
                f"optimizer {name!r} is already registered by {taken.make.__module__}.{taken.make.__qualname__}"
            )
        if not re.fullmatch(r"[a-z]\w*", name) or not inspect.getdoc(make):
            raise TypeError(f"optimizer {name!r} needs a docstring, and a name of letters, digits and _")
        function = inspect.getattr_static(make, "__init__") if isinstance(make, type) else make
        hints = get_type_hints(function, include_extras=True)
        settings = {}
        for parameter in inspect.signature(make).parameters.values():
            if parameter.kind is not parameter.KEYWORD_ONLY:
                continue
            if parameter.name in RESERVED:
                raise TypeError(f"optimizer {name!r}: {parameter.name} has a reserved name; rename this parameter")
            if parameter.name not in hints or parameter.default is parameter.empty:
                raise TypeError(f"optimizer {name!r}: {parameter.name} needs an annotation and a default")
            settings[parameter.name] = hints[parameter.name], parameter.default
        OPTIMIZERS[name] = OptimizerInfo(name, make, settings, source, decoupled, tuple(roles))
        return make

    return register
