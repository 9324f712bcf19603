"""Write and read the checked config of a sweep's job, so that the job's process does not compose it again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from tfm_blocks.compose.resolve import Composed, resolve
from tfm_blocks.errors import Place
from tfm_blocks.language.files import YamlFile
from tfm_blocks.language.sources import Sources

FORMAT = 1
_RESOLVER = re.compile(r"\$\{[^}]*:")


def job_record(composed: Composed, changes: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """Return the content of a job file as plain data.

    Args:
        composed: The checked config.
        changes: Root keys that the sweep sets, such as `name`.
        command: The command line that trains the same run without the sweep.
    """
    raw, sources = cast(dict[str, Any], OmegaConf.to_container(composed.raw, resolve=False)), composed.sources
    return {
        "format": FORMAT,
        "command": list(command),
        "choices": dict(composed.choices),
        "config": {**_without_resolvers(raw, composed.mapping), **changes},
        "sources": {
            "written": [[path, asdict(place), sources.values[path]] for path, place in sources.written.items()],
            "overrides": list(sources.overrides.items()),
            "chosen": sorted(sources.chosen),
            "files": list(sources.files),
        },
    }


def read_job(path: Path) -> tuple[Composed, list[str]]:
    """Read the config of a job and its command line from the file written by the sweep."""
    record = json.loads(path.read_text("utf-8"))
    stored = record["sources"]
    written = {tuple(key): Place(**place) for key, place, _ in stored["written"]}
    values = {tuple(key): text for key, _, text in stored["written"]}
    overrides = {tuple(key): text for key, text in stored["overrides"]}
    files = {name: YamlFile(name, "") for name in stored["files"]}
    sources = Sources(written, values, overrides, set(stored["chosen"]), files)
    composed = resolve(OmegaConf.create(record["config"]), sources, ())
    return replace(composed, choices=record["choices"]), record["command"]


def _without_resolvers(raw: Any, resolved: Any) -> Any:
    """Replace `${resolver:…}` by its value. `${key}` stays, since the size of the vocabulary is not known yet."""
    if isinstance(raw, dict):
        return {
            key: _without_resolvers(value, resolved[key]) if key in resolved else value for key, value in raw.items()
        }
    if isinstance(raw, list):
        return [_without_resolvers(*pair) for pair in zip(raw, resolved, strict=True)]
    return resolved if isinstance(raw, str) and _RESOLVER.search(raw) else raw
