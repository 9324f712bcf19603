"""Overrides as they are typed: `heads=8`, `model.add_norm=pre`, in Hydra's grammar."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from tfm_blocks.errors import ConfigError, Problem


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """A value that is not in the grammar is text: `d_ff=2*(d_model+1)`, `data.dir=/my texts`.

    Raises ConfigError with one problem for each text that is no override even so.
    """
    overrides, problems = [], []
    for text in texts:
        override = _parse(text) or _parse(_quoted(text))
        if override and not override.is_interval_sweep():
            overrides.append(override)
        else:
            help = "write key=value, or key=a,b with -m"
            problems.append(Problem(text.partition("=")[0] or text, f"is no override: {text}", help=help))
    if problems:
        raise ConfigError(problems)
    return overrides


def _parse(text: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def _quoted(text: str) -> str:
    key, equals, value = text.partition("=")
    return key + equals + "'" + value.replace("'", r"\'") + "'" if equals else text


def refuse_sweeps(overrides: Sequence[Override], help: str) -> None:
    """Raises ConfigError where one names several values."""
    found = [override for override in overrides if override.is_sweep_override()]
    if found:
        rule = "{} names several values"
        raise ConfigError([Problem(one.key_or_group, rule.format(one.input_line), help=help) for one in found])


def values(override: Override, options: Sequence[str]) -> list[str]:
    """What an override chooses of a group with these options; of a sweep, all its values."""
    value: object = override.value()
    if isinstance(value, Glob):
        return value.filter(list(options))
    found = override.sweep_iterator() if override.is_sweep_override() else [value]
    return ["null" if one is None else str(one) for one in found]


def first_of_sweep(override: Override) -> str:
    """The text of the override with the first of its values."""
    text = override.input_line or ""
    if not override.is_sweep_override() or isinstance(override.value(), Glob):
        return text
    return f"{text.partition('=')[0]}={next(iter(override.sweep_string_iterator()))}"
