"""Resolve every `${…}` of a merged config to plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from tfm_blocks.compose.overrides import error_reason, parse_overrides
from tfm_blocks.errors import ConfigError, Problem, cut, expect_none, shown, suggest
from tfm_blocks.language.chain import merge
from tfm_blocks.language.files import INDEX, YamlFile
from tfm_blocks.language.parametrisation import WHERE, nested_scalars
from tfm_blocks.language.sources import Sources, find_knobs

SOURCE_VOCAB = "source_vocab"  # knob of models that read sources with a separate vocabulary


@dataclass(frozen=True)
class Composed:
    """A resolved config as plain dicts, lists and scalars, with the source location of each value.

    `choices` maps each group to the selected option, such as {"model": "base"}.
    """

    mapping: dict[str, Any]
    sources: Sources
    raw: DictConfig
    chain: tuple[YamlFile, ...]
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.mapping.get("model") or {})

    @property
    def knobs(self) -> dict[str, Any]:
        """Return the values of the root keys except `model`; of a composed model, its knobs."""
        return {name: value for name, value in self.mapping.items() if name != "model"}

    def expect_vocab(self) -> None:
        """Raise ConfigError if the model has no knob `vocab`."""
        if "vocab" not in self.raw:
            rule = "the size of the vocabulary comes from the tokenizer, through this knob"
            help = "give the model file a root key vocab, and its args vocab: ${vocab}"
            raise ConfigError(Problem("vocab", rule, help=help))

    @property
    def vocabulary(self) -> tuple[Any, Any]:
        """Return the values of `vocab` and `source_vocab`; None for a knob that the model lacks."""
        return self.mapping.get("vocab"), self.mapping.get(SOURCE_VOCAB)

    def with_vocab(self, size: int, source: int | None = None) -> Composed:
        """Return the config for a tokenizer of `size`, and for one of sources with a separate vocabulary.

        Raises ConfigError if the model lacks the knob `vocab`, or for a separate vocabulary `source_vocab`.
        """
        self.expect_vocab()
        if source is not None and SOURCE_VOCAB not in self.raw:
            rule = "has a separate vocabulary of sources, but the model has no knob source_vocab"
            help = "write model=two_vocabularies, or name one tokenizer for sources and targets"
            raise ConfigError(Problem("data.tokenizer", rule, help=help))
        of_sources = {SOURCE_VOCAB: size if source is None else source} if SOURCE_VOCAB in self.raw else {}
        return self.with_values({"vocab": size, **of_sources})

    def with_model(self, model: Mapping[str, Any]) -> Composed:
        """Return the config with the mapping of the checked model, which lacks the arguments of replaced blocks."""
        return replace(self, mapping=self.mapping | {"model": model})

    def with_values(self, values: Mapping[str, Any]) -> Composed:
        """Return the config with new values of these keys, such as `trainer.steps`."""
        raw = self.raw.copy()
        for key, value in values.items():
            OmegaConf.update(raw, key, value, merge=False, force_add=True)
        return replace(resolve(raw, self.sources, self.chain), choices=self.choices)


def chain_sources(chain: Sequence[YamlFile], overrides: Iterable[str]) -> Sources:
    """Return the source locations of a model's chain, and the overrides by each path that they set.

    That is the path of the key, and the paths inside of a mapping such as `model.args={heads: 8}`.
    """
    sources = Sources()
    for text in (text.removeprefix("++") for text in overrides):
        key, _, value = text.partition("=")
        sources.overrides[path := tuple(key.lstrip("+~").split("."))] = text
        if value.lstrip().startswith("{"):
            (override,) = parse_overrides([text])
            sources.overrides |= dict.fromkeys(_inner_paths(override.value(), path), text)
    for file in chain:
        sources.add_file(file, chosen=file is chain[-1])
    return sources


def _inner_paths(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        yield (*path, str(key))
        yield from _inner_paths(inner, (*path, str(key)))


def to_plain(config: DictConfig) -> dict[str, Any]:
    """Return a config as plain data, with each `${…}` as text."""
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))


def resolve(config: DictConfig, sources: Sources, chain: Sequence[YamlFile]) -> Composed:
    """Resolve every `${…}`. Raises ConfigError for an unknown key in `${…}`, and for knobs without effect."""
    raw = to_plain(config)
    _unread_knobs(raw, sources, chain)
    model = _merge_layers(raw.get("model"))
    if model != raw.get("model"):
        config = config.copy()
        with open_dict(config):
            config["model"] = model
    try:
        mapping = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except InterpolationKeyError as error:
        raise _leads_nowhere(error, raw, sources) from None
    except MissingMandatoryValue as error:
        path = tuple(str(error.full_key).split("."))
        raise ConfigError(sources.problem(path, "must be set", help=f"write {error.full_key}=…")) from None
    except OmegaConfBaseException as error:
        path = tuple(str(getattr(error, "full_key", "") or "").split("."))
        help = "write a value, or the name of a knob in ${…}"
        raise ConfigError(sources.problem(path, error_reason(error), help=help)) from None
    resolved = cast(dict[str, Any], mapping)
    _resolve_base(resolved, config, sources)
    return Composed(resolved, sources, config, tuple(chain))


def recorded_config(mapping: dict[str, Any], sources: Sources) -> Composed:
    """Return the config that the folder of a run records."""
    return Composed(mapping, sources, OmegaConf.create(mapping), ())


def _resolve_base(mapping: dict[str, Any], config: DictConfig, sources: Sources) -> None:
    """Add to `model.base`, which has sizes of knobs, the values of the model that differ at these sizes, by path.

    So the mapping of a model has its base, although a run records no knobs. Raises ConfigError.
    """
    model = mapping.get("model")
    base = model.get("base") if isinstance(model, dict) else None
    if not isinstance(base, dict) or WHERE in base:
        return
    base = {knob: value for knob, value in base.items() if value is not None}
    raw = to_plain(config)
    known = sorted(knob for knob in find_knobs(raw["model"]) if type(mapping.get(knob)) is int)
    problems = []
    for knob, value in base.items():
        path = ("model", "base", str(knob))
        if knob not in known:
            rule = f"the model reads no knob {shown(knob)} that is a whole number"
            problems.append(sources.problem(path, rule, help=suggest(str(knob), known)))
        elif type(value) is not int or value < 1:
            rule = f"must be a whole number of at least 1, but is {shown(value)}"
            problems.append(sources.problem(path, rule, help=f"write model.base.{knob}={mapping[knob]}"))
    expect_none(problems)
    small = config.copy()
    for knob, value in base.items():
        OmegaConf.update(small, str(knob), value)
    other = dict(nested_scalars(OmegaConf.to_container(small.model, resolve=True)))
    where = {".".join(path): other[path] for path, value in nested_scalars(model) if other[path] != value}
    cast(dict[str, Any], model)["base"] = {**base, WHERE: where}


def _merge_layers(value: Any) -> Any:
    """Merge the changes of each layer in `at`; its index is an integer in files and text in an override `at.0`."""
    if not isinstance(value, Mapping):
        return value
    merged: dict[Any, Any] = {}
    for key, item in value.items():
        name = int(key) if isinstance(key, str) and INDEX.fullmatch(key) else key
        before = merged.get(name)
        merged[name] = merge(before, item) if isinstance(before, Mapping) and isinstance(item, Mapping) else item
    return {name: _merge_layers(item) for name, item in merged.items()}


def _leads_nowhere(error: InterpolationKeyError, raw: dict[str, Any], sources: Sources) -> ConfigError:
    path = tuple(str(error.full_key).split("."))
    name = str(error.msg).split("'")[1] if "'" in str(error.msg) else str(error.msg)
    knobs = [key for key, value in raw.items() if not isinstance(value, (dict, list))]
    value = sources.overrides[path].partition("=")[2] if path in sources.overrides else sources.values.get(path)
    rule = f"{cut(value) if value else 'its value'} cannot be resolved: there is no key {shown(name)}"
    return ConfigError(sources.problem(path, rule, help=suggest(name, knobs)))


def _unread_knobs(raw: dict[str, Any], sources: Sources, chain: Sequence[YamlFile]) -> None:
    """Raise ConfigError for knobs that nothing reads, since sweeping over them would change nothing."""
    knobs = {key for file in chain for key in file.value if key not in ("defaults", "model")}
    rewired = any(path[0] == "model" for path in sources.overrides)
    unread = [
        key
        for key in sorted(knobs - find_knobs(raw))
        if (key,) in sources.overrides or (sources.is_set_by_user((key,)) and not rewired)
    ]
    if unread:
        rules = {key: f"nothing reads the knob {shown(key)}" for key in unread}
        raise ConfigError([sources.problem((key,), rules[key], help=f"use it as ${{{key}}}") for key in unread])
