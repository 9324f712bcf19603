"""The chain of a model: its file, and before it the files that it inherits."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfm_blocks.errors import ConfigError, Place, Problem, shown, suggest
from tfm_blocks.language.files import NAME, ModelFile, read_model_file
from tfm_blocks.language.sources import Sources


def model_chain(name: str, folders: Sequence[Path], root_keys: Collection[str] = ()) -> list[ModelFile]:
    """The files of model `name` (or of a path to a YAML file), what is inherited first.

    Parents are sought beside the file, then in `folders`; `root_keys` are names that no knob may have. ConfigError.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(Problem("model", f"there is no file {name}", help="write its path from this folder"))
        chain = _Chain([path.parent, *folders], root_keys).files(path, ())
    else:
        chain = _Chain(list(folders), root_keys).files(_find(name, folders), ())
    merged(chain)
    return chain


def models_in(folders: Sequence[Path]) -> list[str]:
    """The names of the models in `folders`."""
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def _find(name: str, folders: Sequence[Path], place: Place | None = None) -> Path:
    for folder in folders:
        path = folder / f"{name}.yaml"
        if NAME.fullmatch(name) and path.is_file():
            return path
    help = f"{suggest(name, models_in(folders))}; your own: --config-dir DIR, with DIR/model/NAME.yaml"
    raise ConfigError(Problem("model", f"no model is called {shown(name)}", place, help=help))


class _Chain:
    """Reads each file once. What would be inherited twice is refused: Hydra would merge it twice, and the second time
    undo what came between.
    """

    def __init__(self, folders: Sequence[Path], root_keys: Collection[str]) -> None:
        self.folders = folders
        self.root_keys = root_keys
        self.read: set[Path] = set()

    def files(self, path: Path, children: tuple[Path, ...]) -> list[ModelFile]:
        """The file's parents, with theirs, and the file."""
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
                rule = f"{parent} is inherited twice, and the second time would undo what came between"
                help = "let one of the parents inherit it; the others say only what they change"
                raise ConfigError(Problem("defaults", rule, place, help=help))
            chain += self.files(inherited, (*children, path.resolve()))
        return [*chain, file]


def merged(chain: Sequence[ModelFile]) -> dict[str, Any]:
    """The mapping of all files, each on top of those before it, nulls included.

    Raises ConfigError where one file has a list and another a mapping: neither goes on top of the other.
    """
    whole: dict[str, Any] = {}
    for file in chain:
        path = _merge(whole, file.mapping)
        if path:
            sources = Sources()
            sources.add_file(file.shown, file.text)
            rule = "is a list in one file and a mapping in another that inherits it, which cannot be merged"
            raise ConfigError(sources.problem(path, rule, help="write what the inherited file has, or another key"))
    return whole


def _merge(whole: dict[str, Any], mapping: Mapping[str, Any]) -> tuple[str, ...]:
    """Puts `mapping` on top of `whole`; the path of the first key that cannot be merged, empty where all can."""
    for key, value in mapping.items():
        before = whole.get(key)
        if {type(before), type(value)} == {dict, list}:
            return (str(key),)
        if isinstance(before, dict) and isinstance(value, dict):
            below = _merge(before, value)
            if below:
                return (str(key), *below)
        else:
            whole[key] = copy.deepcopy(value)
    return ()
