"""The chain of a model: the files that it inherits, followed by its own file, and what a child replaces."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tfm_blocks.errors import ConfigError, Place, Problem, config_error, unknown_option
from tfm_blocks.language.files import NAME, YamlFile, read_model_file
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Path as KeyPath
from tfm_blocks.registry.blocks import GRAMMAR, BlockInfo, Registry

MISSING = "???"  # a key that must be set; OmegaConf does not merge it into a value


def read_model_chain(name: str, folders: Sequence[Path], root_keys: Collection[str]) -> list[YamlFile]:
    """Read the files of the model `name` (or of a path to a YAML file), parents first.

    Parents are looked up next to the file that inherits them, then in `folders`. `root_keys` are names that no knob may
    have. Raises ConfigError.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            help = "write its path relative to the current folder"
            raise config_error("model", f"there is no file {name}", help)
    else:
        path = _find(name, folders)
    chain = _Chain(folders, root_keys).files(path, ())
    merge_chain(chain)
    return chain


def _find(name: str, folders: Sequence[Path], place: Place | None = None) -> Path:
    for folder in folders:
        path = folder / f"{name}.yaml"
        if NAME.fullmatch(name) and path.is_file():
            return path
    known = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    raise ConfigError(unknown_option("model", name, known, place))


@dataclass
class _Chain:
    """Reader that loads each file once.

    It refuses a file that is inherited twice: Hydra would merge it twice, and the second merge would override the
    changes made in between.
    """

    folders: Sequence[Path]
    root_keys: Collection[str]
    read: set[Path] = field(default_factory=set)

    def files(self, path: Path, children: tuple[Path, ...]) -> list[YamlFile]:
        self.read.add(path.resolve())
        file = read_model_file(path, self.root_keys)
        chain = []
        for parent in file.parents:
            place = next((place for key, place, _ in file.entries if key == ("defaults",)), Place(file.shown))
            inherited = _find(parent, [path.parent, *self.folders], place)
            if inherited.resolve() in (*children, path.resolve()):
                help = f"take {parent} out of the defaults of {file.shown}"
                raise ConfigError(Problem("defaults", f"{parent} inherits itself", place, help=help))
            if inherited.resolve() in self.read:
                rule = f"{parent} is inherited twice; the second time would override the changes in between"
                help = "let only one parent inherit it; the others write only their changes"
                raise ConfigError(Problem("defaults", rule, place, help=help))
            chain += self.files(inherited, (*children, path.resolve()))
        return [*chain, file]


def merge_chain(chain: Sequence[YamlFile]) -> dict[str, Any]:
    """Merge the mappings of all files, including nulls; later files override earlier ones.

    Raises ConfigError if a key holds a list in one file and a mapping in another, or a value and then `???`.
    """
    whole: dict[str, Any] = {}
    for file in chain:
        for path, rule, help in _merge(whole, file.value, ()):
            sources = Sources()
            sources.add_file(file)
            raise ConfigError(sources.problem(path, rule, help=help))
    return whole


def _merge(whole: dict[str, Any], mapping: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, str, str]]:
    """Merge `mapping` into `whole`. Yield the path of each key that cannot be merged, the rule, and a fix."""
    for key, value in mapping.items():
        before = whole.get(key, MISSING)
        if {type(before), type(value)} == {dict, list}:
            rule = "is a list in one file and a mapping in another that inherits it, which cannot be merged"
            yield (*path, str(key)), rule, "use the same type as the inherited file, or another key"
        elif value == MISSING != before:
            rule = f"is {MISSING}, which does not replace the value of an inherited file"
            yield (*path, str(key)), rule, "leave it out, or write a value"
        elif isinstance(before, dict) and isinstance(value, dict):
            yield from _merge(before, value, (*path, str(key)))
        else:
            whole[key] = copy.deepcopy(value)


class Replacement:
    """Remove keys that the new block does not have and that were set before it, and collect a note for each block.

    A key is set before the block if its file comes earlier, or if the layer has the key and `at` changes the block.
    """

    def __init__(self, registry: Registry, sources: Sources) -> None:
        self.sources = sources
        self.blocks = registry.blocks
        self.foreign = {"tie"}.union(*({*info.arguments, *_ports(info)} for info in self.blocks.values()))
        self.notes: list[Problem] = []

    def clean(self, value: Any, *paths: KeyPath) -> Any:
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
                cleaned["at"][index] = change
                if isinstance(change, Mapping):
                    inner = [(*path, *key) for key in (("layer",), ("at", str(index))) for path in paths]
                    merged = merge(layer, change)
                    cleaned["at"][index] = _with_nulls(change, merged, self.clean(merged, *inner))
        return cleaned

    def _dropped(self, value: Mapping[Any, Any], paths: tuple[KeyPath, ...]) -> Iterator[Any]:
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

    def _setter(self, paths: tuple[KeyPath, ...], key: str) -> tuple[int, int, KeyPath]:
        """Return the index of the last of `paths` that sets the key, the rank of its file, and the path of the key."""
        for level in reversed(range(len(paths))):
            path = (*paths[level], key)
            if (rank := self.sources.rank(path)) is not None:
                return level, rank, path
        return 0, 0, (*paths[0], key)

    def _is_only_use(self, path: KeyPath, level: int, rank: int) -> bool:
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
