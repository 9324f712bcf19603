"""The one place that turns conf/ and overrides into plain mappings; hydra and omegaconf stay behind this door."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from tfm_blocks.errors import ConfigError, Problem, suggest
from tfm_blocks.language.files import ModelFile, model_chain
from tfm_blocks.language.sources import Sources, knobs_read

PACKAGE = Path(__file__).parent
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"


@dataclass(frozen=True)
class Composed:
    """A resolved config: plain dicts, lists and scalars, and where each was written."""

    mapping: dict[str, Any]
    sources: Sources

    @property
    def model(self) -> dict[str, Any]:
        """The key `model`."""
        return cast(dict[str, Any], self.mapping.get("model") or {})


def root_keys() -> set[str]:
    """The keys of train.yaml and its groups, which no knob of a model may take."""
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()} - {"model"}
    return groups | set(read_yaml(CONF / "train.yaml")) - {"defaults"}


def read_yaml(path: Path) -> dict[str, Any]:
    """A trusted file of conf/ as a plain mapping."""
    return cast(dict[str, Any], yaml.safe_load(path.read_text("utf-8")) or {})


def compose_model(model: str, overrides: Sequence[str] = (), conf: Path | None = None) -> Composed:
    """A model alone: a name under conf/model/ or a path to a YAML file, with `heads=8` or `model.add_norm=pre` on top.

    `conf` is a further folder with a `model/` in it. Raises ConfigError.
    """
    folders = [*([conf / "model"] if conf else []), CONF / "model"]
    chain = model_chain(model, folders, root_keys())
    merged = OmegaConf.create({})
    for file in chain:
        merged = cast(
            DictConfig, OmegaConf.merge(merged, {key: file.mapping[key] for key in file.mapping if key != "defaults"})
        )
    known = [str(key) for key in merged]
    sources = chain_sources(chain, overrides)
    for path, text in sources.overrides.items():
        if path[0] not in known:
            raise ConfigError(Problem(path[0], f"no such knob: {text}", help=suggest(path[0], known)))
        OmegaConf.update(merged, ".".join(path), yaml.safe_load(text.partition("=")[2]), merge=True)
    return resolve(merged, sources, chain)


def chain_sources(chain: Sequence[ModelFile], overrides: Iterable[str]) -> Sources:
    """The places of a model's chain, and the overrides by the path that they set."""
    sources = Sources()
    for file in chain:
        sources.add_file(file.shown, file.text)
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals:
            raise ConfigError(Problem(text, "is no override", help="write key=value"))
        sources.overrides[tuple(key.lstrip("+~").split("."))] = text
    return sources


def resolve(config: DictConfig, sources: Sources, chain: Sequence[ModelFile]) -> Composed:
    """The config with every `${…}` filled in; ConfigError for one that leads nowhere, and for knobs without effect."""
    raw = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    _unread_knobs(raw, sources, chain)
    try:
        mapping = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except InterpolationKeyError as error:
        raise _leads_nowhere(error, raw, sources) from None
    except MissingMandatoryValue as error:
        path = tuple(str(error.full_key).split("."))
        raise ConfigError(sources.problem(path, "must be given", help=f"write {error.full_key}=…")) from None
    except OmegaConfBaseException as error:
        path = tuple(str(getattr(error, "full_key", "") or "").split("."))
        raise ConfigError(sources.problem(path, str(error).splitlines()[0])) from None
    return Composed(cast(dict[str, Any], mapping), sources)


def _leads_nowhere(error: InterpolationKeyError, raw: dict[str, Any], sources: Sources) -> ConfigError:
    path = tuple(str(error.full_key).split("."))
    written = sources.written.get(path)
    name = str(error.msg).split("'")[1] if "'" in str(error.msg) else str(error.msg)
    knobs = [key for key, value in raw.items() if not isinstance(value, (dict, list))]
    rule = f"{written.text if written else 'its value'} leads nowhere: there is no key {name!r}"
    return ConfigError(sources.problem(path, rule, help=suggest(name, knobs)))


def _unread_knobs(raw: dict[str, Any], sources: Sources, chain: Sequence[ModelFile]) -> None:
    """A knob that nothing reads would make a sweep that changes nothing."""
    knobs = {key for file in chain for key in file.mapping if key not in ("defaults", "model")}
    unread = [key for key in sorted(knobs - knobs_read(raw)) if sources.set_here((key,))]
    if unread:
        raise ConfigError(
            [sources.problem((key,), f"nothing reads the knob {key!r}", help=f"use it as ${{{key}}}") for key in unread]
        )
