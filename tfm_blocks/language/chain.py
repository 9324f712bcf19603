"""The chain of a model: the files that it inherits, followed by its own file."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfm_blocks.errors import ConfigError, Place, Problem, shown, suggest
from tfm_blocks.language.files import NAME, ModelFile, read_model_file
from tfm_blocks.language.sources import Sources

MISSING = "???"  # a key that must be set; OmegaConf does not merge it into a value


def read_model_chain(name: str, folders: Sequence[Path], root_keys: Collection[str] = ()) -> list[ModelFile]:
    """Read the files of the model `name` (or of a path to a YAML file), parents first.

    Parents are looked up next to the file, then in `folders`. `root_keys` are names that no knob may have.
    Raises ConfigError.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            help = "write its path relative to the current folder"
            raise ConfigError(Problem("model", f"there is no file {name}", help=help))
        chain = _Chain([path.parent, *folders], root_keys).files(path, ())
    else:
        chain = _Chain(list(folders), root_keys).files(_find(name, folders), ())
    merge_chain(chain)
    return chain


def _find(name: str, folders: Sequence[Path], place: Place | None = None) -> Path:
    for folder in folders:
        path = folder / f"{name}.yaml"
        if NAME.fullmatch(name) and path.is_file():
            return path
    known = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    help = f"{suggest(name, known)}; your own: --config-dir DIR, with DIR/model/NAME.yaml"
    raise ConfigError(Problem("model", f"no model is called {shown(name)}", place, help=help))


class _Chain:
    """Reader that loads each file once.

    It refuses a file that is inherited twice: Hydra would merge it twice, and the second merge would override the
    changes made in between.
    """

    def __init__(self, folders: Sequence[Path], root_keys: Collection[str]) -> None:
        self.folders = folders
        self.root_keys = root_keys
        self.read: set[Path] = set()

    def files(self, path: Path, children: tuple[Path, ...]) -> list[ModelFile]:
        self.read.add(path.resolve())
        file = read_model_file(path, self.root_keys)
        chain = []
        for parent in file.parents:
            place = Place(file.shown)
            inherited = _find(parent, self.folders, place)
            if inherited.resolve() in (*children, path.resolve()):
                help = f"take {parent} out of the defaults of {file.shown}"
                raise ConfigError(Problem("defaults", f"{parent} inherits itself", place, help=help))
            if inherited.resolve() in self.read:
                rule = f"{parent} is inherited twice; the second time would override the changes in between"
                help = "let only one parent inherit it; the others write only their changes"
                raise ConfigError(Problem("defaults", rule, place, help=help))
            chain += self.files(inherited, (*children, path.resolve()))
        return [*chain, file]


def merge_chain(chain: Sequence[ModelFile]) -> dict[str, Any]:
    """Merge the mappings of all files, including nulls; later files override earlier ones.

    Raises ConfigError if a key holds a list in one file and a mapping in another, or a value and then `???`.
    """
    whole: dict[str, Any] = {}
    for file in chain:
        for path, rule, help in _merge(whole, file.mapping, ()):
            sources = Sources()
            sources.add_file(file.shown, file.text)
            raise ConfigError(sources.problem(path, rule, help=help))
    return whole


def _merge(
    whole: dict[str, Any], mapping: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str, str]]:
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
