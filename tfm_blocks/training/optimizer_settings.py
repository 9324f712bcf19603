"""The settings of the key `optimizer`: a registered optimizer, and groups of weights with separate optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, cast

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    create_model,
    field_validator,
    model_validator,
)

import tfm_blocks.training.optimizers  # noqa: F401  registers them
from tfm_blocks.config.settings import RuleError, Settings, Where
from tfm_blocks.errors import listed, shown
from tfm_blocks.registry.expression import Number, evaluate, names_in
from tfm_blocks.registry.optimizers import OPTIMIZERS, OptimizerInfo

DEFAULT, OTHERS, BASE = "default", "others", "base of the adapters"  # the names of further groups in tables
LISTED = 8  # names in an error
SHARED = ("weight_decay", "cautious", "independent_decay")  # a group with another optimizer inherits these


def _is_a_rate(rate: object) -> object:
    """Check a factor of the learning rate: a number, or arithmetic of i and n, whose values are checked later."""
    if isinstance(rate, int | float) and not isinstance(rate, bool):
        expect_above_0(rate)
    elif not isinstance(rate, str):
        raise RuleError(f"must be a number or arithmetic, but is {shown(rate)}", 'write 10, or "0.9**(n-1-i)"')
    else:
        try:
            unknown = [name for name in names_in(rate) if name not in ("i", "n")]
            evaluate(rate, lambda name: 7 if name == "n" else 0)  # as in the first layer of a stack
        except ValueError as error:
            raise RuleError(str(error), 'write a number such as 10, or arithmetic such as "0.9**(n-1-i)"') from None
        if unknown:
            rule = f"names {unknown[0]}, but only i and n have values: the index of a layer and the number of layers"
            raise RuleError(rule, 'write arithmetic such as "0.9**(n-1-i)"')
    return rate


def expect_above_0(rate: Number) -> None:
    """Raise RuleError unless the factor of a learning rate is a finite number above 0."""
    if not 0 < rate < float("inf"):
        raise RuleError(
            f"must be a finite number above 0, but is {shown(rate)}", "write train: false to freeze weights"
        )


RateFactor = Annotated[float | str, BeforeValidator(_is_a_rate)]


class GroupSettings(Settings):
    """The optimizer of some weights. A setting that is left out has the value of the whole optimizer.

    where: the weights that no earlier group takes. train: false freezes them. rate: the factor of the learning rate, a
    number or arithmetic of i and n, the index of the layer and the number of layers.
    """

    rate: RateFactor = 1.0
    train: bool = True
    name: str = ""

    @model_validator(mode="before")
    @classmethod
    def _has_no_optimizer_if_frozen(cls, group: Any) -> Any:
        own = cls.model_fields.keys() - {"where", "train"}  # unknown keys have separate errors
        others = [str(key) for key in group if key in own] if isinstance(group, dict) else []
        if others and group.get("train") is False:
            rule = f"freezes its weights with train: false, but sets {listed(others, LISTED)} of their optimizer"
            raise RuleError(rule, f"leave train out, or {listed(others, LISTED)}")
        return group


class OptimizerSettings(Settings):
    """The optimizer of all weights that no group takes. The schedule sets the learning rate.

    groups: optimizers of some weights by name; of the groups that match a weight, the first takes it.
    cautious: decay only the weights that the step itself makes smaller.
    independent_decay: the decay of a step is weight_decay times the schedule's part of its peak, for any learning rate.
    others: the optimizer of the weights that this optimizer does not take, with the keys of a group.
    """

    name: str
    groups: Mapping[str, Any] = {}

    @field_validator("groups", mode="before")
    @classmethod
    def _have_free_names(cls, groups: Any) -> Any:
        if not isinstance(groups, dict):
            return groups
        for name in (DEFAULT, OTHERS, BASE):
            if name in groups:
                raise RuleError(f"has a group {name}, which is the name of the remaining weights", "call it otherwise")
        return {name: group for name, group in groups.items() if group is not None}

    @property
    def info(self) -> OptimizerInfo:
        return OPTIMIZERS[self.name]


def fields_of(info: OptimizerInfo) -> dict[str, Any]:
    """Return the fields of an optimizer's settings with its groups for pydantic: types and defaults."""
    fields: dict[str, Any] = dict(info.settings)
    if info.decoupled:
        fields |= {"cautious": (bool, False), "independent_decay": (bool, False)}
    return fields


def _model(info: OptimizerInfo, parent: type[Settings], name: object, fields: Mapping[str, Any]) -> Any:
    """Return a model of the settings of an optimizer; `name` is the default of its key `name`."""
    doc = f"{info.description} {parent.__doc__}"
    fields = {**fields_of(info), **fields, "name": (Literal[info.name], name)}
    return create_model(f"{info.name.title()}{parent.__name__}", __base__=parent, __doc__=doc, **fields)


def _group_type(base: str, fields: Mapping[str, Any]) -> Any:
    """Return the type of a group; without the key `name` it is one of the optimizer `base`."""

    def name(value: Any) -> Any:
        return value.get("name", base) if isinstance(value, dict) else getattr(value, "name", base)

    models = (Annotated[_model(info, GroupSettings, info.name, fields), Tag(info.name)] for info in OPTIMIZERS.values())
    return Annotated[Union[tuple(models)], Discriminator(name)]  # noqa: UP007


@lru_cache
def _settings_type(known: tuple[OptimizerInfo, ...]) -> Any:
    others = _group_type("adamw", {}), Field(default={"name": "adamw"}, validate_default=True)
    models = []
    for info in known:
        groups: Any = dict[str, _group_type(info.name, {"where": (Where, ...)})]  # type: ignore[misc]
        fields = {"groups": (groups, {}), **({OTHERS: others} if info.roles else {})}
        models.append(_model(info, OptimizerSettings, ..., fields))
    return Annotated[Union[tuple(models)], Field(discriminator="name")]  # noqa: UP007


def read_optimizer(mapping: Mapping[str, Any]) -> OptimizerSettings:
    """Return the settings of a valid mapping."""
    return cast(OptimizerSettings, TypeAdapter(settings_type()).validate_python(mapping))


def settings_type() -> Any:
    """Return the union of the settings of all registered optimizers, including optimizers of plug-ins."""
    return _settings_type(tuple(OPTIMIZERS.values()))


def settings_of_others(settings: OptimizerSettings, group: Any) -> Any:
    """Return how a group without a `name` learns the weights that the whole optimizer does not take, or None.

    It has the settings of `others`, the product of both rates, and its own decay.
    """
    others = getattr(settings, OTHERS, None)
    if others is None or "name" in group.model_fields_set or not (group.train and others.train):
        return None
    own = group.model_fields_set & set(SHARED) & fields_of(OPTIMIZERS[others.name]).keys()
    rate = f"({group.rate}) * ({others.rate})"
    return others.model_copy(update={**{key: getattr(group, key) for key in own}, "rate": rate})


def names_used(settings: OptimizerSettings) -> set[str]:
    """Return the names of the optimizers of all groups."""
    others = [getattr(settings, OTHERS)] if settings.info.roles else []
    return {settings.name, *(group.name for group in (*settings.groups.values(), *others) if group.train)}
