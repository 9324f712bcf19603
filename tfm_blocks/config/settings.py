"""Frozen pydantic models for parts of a run's config, and the conversion of pydantic's errors to problems.

The implementations of a config group are modules of one package, so their names are a closed set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from tfm_blocks.config.foreign_keys import advice
from tfm_blocks.errors import ConfigError, Problem, shown, suggest
from tfm_blocks.errors import RuleError as RuleError  # raised by validators
from tfm_blocks.metric_schema import IMPROVABLE, find_key

SHOWN = 80  # characters of a wrong value
UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Rank = Annotated[int, Field(ge=1, le=1 << 16)]  # of an adapter
Above0 = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Filled = Annotated[str, Field(min_length=1)]  # a name or a path


class Settings(BaseModel):
    """Base of settings. Unknown keys are refused, and values are not converted, except an int to a float.

    A rule between settings is a validator of the setting to blame. Declare this setting after the others, and read the
    valid ones from `info.data`. Its error is then reported together with all other errors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _can_improve(metric: str) -> str:
    with suppress(KeyError):
        if find_key(metric).name in IMPROVABLE:
            return metric
    rule = f"must be a validation metric that can improve, but is {shown(metric)}"
    raise RuleError(rule, suggest(metric, IMPROVABLE))


ImprovableMetric = Annotated[str, AfterValidator(_can_improve)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Names = Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)]


class Where(Settings):
    """The weights of a group: those that match each key.

    role: roles of weights. node: addresses of nodes, or beginnings of addresses. block: names of blocks.
    """

    role: Names = []
    node: Names = []
    block: Names = []

    @model_validator(mode="after")
    def _has_keys(self) -> Where:
        if not self.model_fields_set:
            raise RuleError("is empty", "name weights, such as where: {role: embedding} or where: {node: encoder}")
        return self


Read = TypeVar("Read", bound=Settings)


def read_settings(cls: type[Read], mapping: Mapping[str, Any], context: object = None) -> Read:
    """Validate `mapping` as an instance of `cls`; `context` is passed to the validators.

    Raises ConfigError with a problem for each missing, unknown or invalid value.
    """
    try:
        return cls.model_validate(mapping, context=context)
    except ValidationError as error:
        raise ConfigError([_problem(cls, details) for details in error.errors(include_url=False)]) from None


_MAPPING = ("must be a mapping{or_null}, but is {value}", "write its keys below it, or {address}={{key: value}}")
# templates of a rule and a fix; the fields are pydantic's error context, `value`, `address` and `or_null`
WORDINGS = {
    "missing": ("is missing", "write {address}=…"),
    "int_type": ("must be an int{or_null}, but is {value}", "write a whole number, such as 4"),
    "float_type": ("must be a float{or_null}, but is {value}", "write a number, such as 0.1"),
    "finite_number": ("must be a finite number, but is {value}", "write a number, such as 0.1"),
    "bool_type": ("must be a bool{or_null}, but is {value}", "write true or false"),
    "string_type": ("must be a str{or_null}, but is {value}", "write text in quotes"),
    "string_for_list": ("must be a str{or_null}, but is the list {value}", "write one of its items"),
    "list_type": ("must be a list{or_null}, but is {value}", "write {address}=[a,b]"),
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "greater_than_equal": ("must be at least {ge:g}, but is {value}", "write {address}={ge:g} or more"),
    "less_than_equal": ("must be at most {le:g}, but is {value}", "write {address}={le:g} or less"),
    "greater_than": ("must be above {gt:g}, but is {value}", "write {address}=… with a number above {gt:g}"),
    "less_than": ("must be below {lt:g}, but is {value}", "write {address}=… with a number below {lt:g}"),
    "string_too_short": ("is empty", "name something, or leave it out; an unset shell variable is empty, too"),
    "too_short": ("must hold at least {min_length}, but holds {actual_length}: {value}", "add to it"),
    "too_long": ("must hold at most {max_length}, but holds {actual_length}: {value}", "shorten it"),
}
UNKNOWN_KEY = ("extra_forbidden", "invalid_key")


def _problem(cls: type[Settings], error: ErrorDetails) -> Problem:
    kind, context = error["type"], error.get("ctx", {})
    if kind in UNKNOWN_KEY:
        *parents, key = error["loc"]
        keys, annotation = _follow(cls, parents)
        address = ".".join([*keys, str(key)])
        known = [name for member in _members(annotation) for name in _fields(member)]
        of_where = f"write where: {{{key}: …}}" if "where" in known and key in Where.model_fields else ""
        help = of_where or advice(address) or suggest(str(key), known) or "leave it out"
        return Problem(address, "no such setting", help=help)
    keys, annotation = _follow(cls, error["loc"])
    address, error_raised = ".".join(keys), context.get("error")
    if isinstance(error_raised, RuleError):
        return Problem(address, str(error_raised), help=error_raised.help)
    if kind == "literal_error":
        return _invalid_choice(address, error["input"], _names(annotation))
    if kind.startswith("union_tag"):
        tag = context["discriminator"].strip("'()")  # a function is shown as name()
        names = [name for member in _members(annotation) for name in _names(_fields(member)[tag])]
        choice = _invalid_choice(f"{address}.{tag}", context.get("tag"), names)
        is_plugged = keys[:1] == ["optimizer"]  # a plug-in can register others
        return replace(choice, help=f"{choice.help}; of a plug-in: plugins=[MODULE]") if is_plugged else choice
    if kind not in WORDINGS:
        return Problem(address, error["msg"])
    or_null = " or null" if type(None) in get_args(annotation) else ""
    if kind == "string_type" and isinstance(error["input"], list):
        kind = "string_for_list"
    context |= {"address": address, "value": _shown(error["input"]), "or_null": or_null}
    rule, help = (text.format(**context) for text in WORDINGS[kind])
    return Problem(address, rule, help=help)


def _invalid_choice(address: str, value: object, options: Sequence[str]) -> Problem:
    rule = "is missing" if value is None else f"must be one of {', '.join(options)}, but is {_shown(value)}"
    return Problem(address, rule, help=suggest(str(value), options))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _follow(annotation: Any, location: Sequence[str | int]) -> tuple[list[str], Any]:
    """Return the config keys along pydantic's `location`, and the annotation at its end.

    A location also names the member of a discriminated union, and ends in [key] if a key is invalid. Indices of lists
    are left out, because the command line can only set whole lists.
    """
    keys = []
    for part in location:
        members = _members(annotation)
        if part == "[key]":
            continue
        if len(members) > 1:
            annotation = next((member for member in members if part in _tags(member)), annotation)
        else:
            keys += [str(part)] if isinstance(part, str) else []
            annotation = _fields(members[0]).get(str(part)) or get_args(members[0])[-1]
    return keys, annotation


def _members(annotation: Any) -> list[Any]:
    """Return the members of a union without None, or the annotation itself."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for part in get_args(annotation) if part is not type(None) for member in _members(part)]
    return [annotation]


def _fields(annotation: Any) -> dict[str, Any]:
    """Return the annotations of a model's fields; {} for other annotations."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {name: field.annotation for name, field in annotation.model_fields.items()}
    return {}


def _names(annotation: Any) -> list[str]:
    """Return the values of a Literal without None; [] for other annotations."""
    return [name for member in _members(annotation) if get_origin(member) is Literal for name in get_args(member)]


def _tags(union: Any) -> list[str]:
    """Return the tags of a discriminated union, which are fields with a single value."""
    fields = [field for model in _members(union) for field in _fields(model).values()]
    values = [_names(field) for field in fields if get_origin(field) is Literal]
    return [names[0] for names in values if len(names) == 1]


def names_of(package: str) -> list[str]:
    """Return the names of the modules of a package."""
    return [module.name for module in iter_modules(import_module(package).__path__)]


def implementation(package: str, name: str, constant: str) -> Any:
    """Return the constant that a module of the package defines; `name` is one of `names_of`."""
    return getattr(import_module(f"{package}.{name}"), constant)


def read_amount(text: str) -> int:
    """Return the number that a text such as 65M, 1.5B or 65,000,000 stands for, or 0 if it stands for none."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([kMBT]?)", text.replace(",", "").replace("_", ""))
    return round(float(match[1]) * UNITS[match[2]]) if match else 0
