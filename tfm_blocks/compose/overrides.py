"""Parse overrides such as `heads=8` and `model.add_norm=pre` in Hydra's grammar."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString, RangeSweep, Sweep
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from tfm_blocks.errors import Problem, config_error, cut, expect_none, shown
from tfm_blocks.language.files import LONGEST_INTEGER, YAML_1_1

LONGEST_KEY = 200
LAYERS_HELP = "at={-1: {ffn: null}}, or name a slice by an arg: model.args.even=::2 and at={even: {ffn: null}}"
NAMES = frozenset({"name", "sweep.name"})  # folders: 2024_01_15 is not the number 20240115
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_QUOTED_KEY = re.compile(r"""(['"])[^'"]*\1\s*:""")
_SEPARATORS = re.compile(r"[,\[\]{}()\s]+")
ENDLESS = re.compile(rf"\d{{{LONGEST_INTEGER + 1}}}")  # an integer that is too long for messages and files


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """Parse overrides. A value outside the grammar is text: `d_ff=2*(d_model+1)`, `data.dir=/my texts`.

    Raises ConfigError with a problem for each invalid override, duplicate key, and empty range or interval.
    """
    _expect_whole(texts)
    overrides: dict[str, Override] = {}
    problems = []
    for text in texts:
        override = _parse(text)
        name, equals, value = text.partition("=")
        is_broken = override is None and value[:1] + value[-1:] in ("{}", "[]")
        is_number = override and override.key_or_group in NAMES and isinstance(override.value(), (int, float))
        if equals and (override is None or is_number):  # outside of the grammar, or a name of digits: text
            override = _parse(name + "='" + value.replace("'", r"\'") + "'")
        key = override.get_key_element().lstrip("+~") if override else name
        if override is None:
            help = f"write {LAYERS_HELP}" if ".at." in name else "write key=value, or key=a,b with -m"
            problems.append(Problem(key or text, f"is not an override: {cut(text)}", help=help))
        elif wrong := _wrong_text(key, text, is_broken):
            problems.append(Problem(cut(key), wrong[0], help=wrong[1]))
        elif key in overrides:
            rule = f"is set twice: {written(overrides[key])} and {cut(text)}"
            braces = "; quote a value {a:b,c:d}, which a shell splits otherwise" if ":" in value else ""
            problems.append(Problem(key, rule, help=f"leave one of them out{braces}"))
        elif wrong := _wrong_numbers(override.value()):
            problems.append(Problem(key, f"{wrong[0]}: {cut(text)}", help=wrong[1]))
        else:
            overrides[key] = override
    expect_none(problems)
    return list(overrides.values())


def _wrong_text(key: str, text: str, is_broken: bool) -> tuple[str, str] | None:
    """Return the rule that the text of an override breaks, and a fix; None for valid text.

    `is_broken`: the value is a mapping or a list with a part outside of the grammar.
    """
    if len(key) > LONGEST_KEY:  # Hydra looks for a folder with that name
        return f"has more than {LONGEST_KEY} characters", "write a key of the config"
    if ENDLESS.search(text):  # as text, since Python limits the digits of integers
        rule = f"has an integer of more than {LONGEST_INTEGER} digits: {cut(text)}"
        return rule, f"write one of at most {LONGEST_INTEGER}"
    if is_broken:
        if _QUOTED_KEY.search(text):
            rule = f"has a key in quotes, which is outside of Hydra's grammar: {cut(text)}"
            return rule, f"for layers, write {LAYERS_HELP}"
        help = 'put arithmetic and other text in double quotes, such as {d_ff: "2*d_model"}'
        return f"has a part that is outside of Hydra's grammar: {cut(text)}", help
    if key not in NAMES and (number := _ambiguous_number(text.partition("=")[2])):
        rule = f"has the number {shown(number)}, which is not written in plain decimal digits: {cut(text)}"
        return rule, f"leave out leading zeros, : and _; put text in quotes twice: '{key}=\"{cut(number)}\"'"
    return None


def _expect_whole(texts: Sequence[str]) -> None:
    """Raise ConfigError if a shell split an override at its spaces."""
    opened = [text for text in texts if any(text.count(left) > text.count(right) for left, right in ("{}", "[]"))]
    if opened and any("=" not in text and not text.startswith("~") for text in texts):
        name = opened[0].partition("=")[0]
        help = f"quote the whole override, since a shell splits it at spaces: '{cut(name)}=…'"
        raise config_error(cut(name), f"is cut off: {cut(opened[0])}", help)


def override_key(text: str) -> str:
    """Return the key or the group of an override."""
    return text.partition("=")[0].lstrip("+~")


def override_text(key: str, value: object) -> str:
    """Return the override that sets a key: `tie=null`, `norm=rmsnorm`, `norm={block: "rmsnorm", eps: 0.001}`."""
    return f"{key}={value if isinstance(value, str) else _value_text(value)}"


def _value_text(value: object) -> str:
    """Return a value in Hydra's grammar, whose keys are not quoted."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False)
        case Mapping():
            return "{" + ", ".join(f"{key}: {_value_text(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_value_text, value)) + "]"
    return str(value)


def written(override: Override) -> str:
    """Return the text of an override for messages."""
    return cut(override.input_line or "")


@lru_cache(maxsize=4096)
def parse_override(text: str) -> Override:
    """Parse one override, once. Raises HydraException, ValueError and RecursionError."""
    return OverridesParser.create().parse_override(text)


def _parse(text: str) -> Override | None:
    try:
        return parse_override(text)
    except (HydraException, ValueError, RecursionError):  # ValueError: an integer with too many digits
        return None


def _ambiguous_number(value: str) -> str:
    """Return the first part of a value that YAML 1.1 or Hydra reads as a number and YAML 1.2 otherwise, or ""."""
    parts = _SEPARATORS.split(_QUOTED.sub("", value))
    if "{" in value:  # in a mapping, a colon is not part of a number
        parts = [piece for part in parts for piece in part.split(":")]
    return next((part for part in parts if (match := YAML_1_1.fullmatch(part)) and not match["word"]), "")


def _wrong_numbers(value: object) -> tuple[str, str] | None:
    """Return the rule that a range or an interval breaks, and a fix; None for valid and for other values."""
    if not isinstance(value, Sweep):
        return None
    if value.tags - ({"log"} if isinstance(value, IntervalSweep) else set()):
        return "has an unknown tag: the only one is log, on an interval", "write tag(log,interval(LOW,HIGH)), or no tag"
    if isinstance(value, RangeSweep):
        step, length = value.step, (value.stop or 0) - (value.start or 0)
        if not step or length * step <= 0:
            return "is an empty range", "write range(LOW,HIGH), which excludes HIGH, with a STEP above 0"
    if isinstance(value, IntervalSweep):
        low, high = float(value.start or 0), float(value.end or 0)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            return "must have a lower bound below its upper bound", "write interval(LOW,HIGH), or one value"
        if "log" in value.tags and low <= 0:
            help = "write a LOW above 0, such as 1e-4, or leave out tag(log,…)"
            return "has a log scale, which needs numbers above 0", help
    return None


def refuse_sweeps(overrides: Sequence[Override], help: str) -> None:
    """Raise ConfigError for overrides with several values."""
    problems = [
        Problem(override.key_or_group, f"{written(override)} has several values", help=help)
        for override in overrides
        if override.is_sweep_override()
    ]
    expect_none(problems)


def error_reason(error: BaseException) -> str:
    """Return the message of a Hydra or OmegaConf error, without the lines about their types."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    kept = lines[:2] if lines[0].endswith(":") else lines[:1]
    if isinstance(error.__cause__, OmegaConfBaseException) and len(kept) == 1:
        kept.append(error_reason(error.__cause__))
    reason = ": ".join(line.rstrip(":") for line in kept).replace(" ++model", " model")
    return reason.replace("Cannot merge DictConfig with ListConfig", "a list and a mapping cannot be merged")


def list_choices(override: Override, options: Sequence[str]) -> list[str]:
    """Return the choices of an override of a group with these options; a list such as [a,b] is a single choice."""
    value: object = override.value()
    if isinstance(value, Glob):
        return value.filter(list(options))
    choices = override.sweep_iterator() if override.is_sweep_override() else [value]
    return [_choice(choice) for choice in choices]


def _choice(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_choice, value))}]"
    text = value.text if isinstance(value, QuotedString) else value
    return "null" if text is None else str(text)


def list_texts(override: Override, options: Sequence[str]) -> list[str]:
    """Return the override once for each of its values, as typed; `options` are the options of its group."""
    text = override.input_line or ""
    if not override.is_sweep_override():
        return [text]
    by_name = options or isinstance(override.value(), Glob)
    values = list_choices(override, options) if by_name else override.sweep_string_iterator()
    return [f"{text.partition('=')[0]}={value}" for value in values]


def first_of_sweep(override: Override, options: Sequence[str] = ()) -> str:
    """Return the override with only the first of its values."""
    text = override.input_line or ""
    if override.is_interval_sweep():
        return f"{text.partition('=')[0]}={override.value().start}"  # type: ignore[union-attr]
    return next(iter(list_texts(override, options)), text)
