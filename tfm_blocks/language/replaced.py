"""Drop the arguments of replaced blocks: a child model that changes `block` need not write null for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tfm_blocks.errors import Problem
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Path
from tfm_blocks.registry.blocks import GRAMMAR, BlockInfo, Registry


class Replacement:
    """Remove keys that the new block does not have and that were set before it, and collect a note for each block.

    A key is set before the block if its file comes earlier, or if the layer has the key and `at` changes the block.
    """

    def __init__(self, registry: Registry, sources: Sources) -> None:
        self.sources = sources
        self.blocks = registry.blocks
        self.foreign = {"tie"}.union(*({*info.arguments, *_ports(info)} for info in self.blocks.values()))
        self.notes: list[Problem] = []

    def clean(self, value: Any, *paths: Path) -> Any:
        """Return the value at `paths` without these keys, written as null in `at`.

        The first path is the path of the layer, and each next path is one of `at`, which overrides it.
        """
        if not isinstance(value, Mapping):
            return value
        dropped = set(self._dropped(value, paths))
        cleaned = {key: item for key, item in value.items() if key not in dropped}
        for key in [key for key in cleaned if key != "at"]:
            cleaned[key] = self.clean(cleaned[key], *((*path, str(key)) for path in paths))
        layer, changes = cleaned.get("layer"), cleaned.get("at")
        if isinstance(layer, Mapping) and isinstance(changes, Mapping):
            cleaned["at"] = {}
            for index, change in changes.items():
                inner = [(*path, *key) for key in (("layer",), ("at", str(index))) for path in paths]
                cleaned["at"][index] = self._change(layer, change, inner)
        return cleaned

    def _change(self, layer: Mapping[Any, Any], change: Any, paths: list[Path]) -> Any:
        """Return the change of `at` with a null for each key of the layer that it drops."""
        if not isinstance(change, Mapping):
            return change
        merged = merge(layer, change)
        return _with_nulls(change, merged, self.clean(merged, *paths))

    def _dropped(self, value: Mapping[Any, Any], paths: tuple[Path, ...]) -> Iterator[Any]:
        """Yield the keys to drop from a mapping with the key `block`."""
        name = value.get("block")
        info = self.blocks.get(name) if isinstance(name, str) else None
        if info is None:
            return
        known = {"block", *info.arguments, *_ports(info), *(GRAMMAR if info.tieable else GRAMMAR - {"tie"})}
        level, rank, path = self._setter(paths, "block")
        rank = max(rank, self.sources.rank((self.sources.knob(path) or "",)) or 0)
        dropped = []
        for key in value:
            if key in self.foreign - known and value[key] is not None:
                its_level, its_rank, its_path = self._setter(paths, str(key))
                if (its_level < level or its_rank < rank) and not self._is_only_use(its_path, level, rank):
                    dropped.append(key)
        if dropped:
            rule = f"{info.name} does not take {', '.join(dropped)}, written for the block that it replaces: dropped"
            problem = self.sources.problem(path, rule)
            self.notes.append(replace(problem, address=".".join(path[:-1]), severity="note"))
        yield from dropped

    def _setter(self, paths: tuple[Path, ...], key: str) -> tuple[int, int, Path]:
        """Return the index of the last of `paths` that sets the key, the rank of its file, and the path of the key."""
        for level in reversed(range(len(paths))):
            path = (*paths[level], key)
            if (rank := self.sources.rank(path)) is not None:
                return level, rank, path
        return 0, 0, (*paths[0], key)

    def _is_only_use(self, path: Path, level: int, rank: int) -> bool:
        """Return True if the knob in a value is set no earlier than the block, and no other key or layer reads it."""
        knob = self.sources.knob(path)
        if level or knob is None or (self.sources.rank((knob,)) or 0) < rank:
            return False
        return sum(self.sources.knob(other) == knob for other in self.sources.written) == 1


def merge(layer: Mapping[Any, Any], change: Mapping[Any, Any]) -> dict[str, Any]:
    """Merge a change of `at` into its layer key by key; lists and single values are replaced, null removes a key."""
    merged = {str(key): value for key, value in layer.items()}
    for name, value in change.items():
        key, old = str(name), merged.get(str(name))
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _with_nulls(change: Mapping[Any, Any], merged: Mapping[str, Any], cleaned: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the change with a null for each key that `cleaned` lacks."""
    nulls: dict[Any, Any] = {}
    for key, value in change.items():
        both = isinstance(value, Mapping) and isinstance(cleaned.get(str(key)), Mapping)
        nulls[key] = _with_nulls(value, merged[str(key)], cleaned[str(key)]) if both else value
    return nulls | {key: None for key in merged if key not in cleaned}


def _ports(info: BlockInfo) -> list[str]:
    """Return the keys of the inputs of a block, except `in`."""
    return [port.name for port in info.signature.ports[1:]]
