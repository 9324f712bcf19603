"""Model files are read as plain YAML, within bounds, before anything else sees them; hostile ones are refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tfm_blocks.errors import ConfigError, Place, Problem, suggest

HEADER = "# @package _global_"
LARGEST = 64 * 1024
DEEPEST = 32
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_KNOB = re.compile(r"\$\{[A-Za-z_]\w*\}")
_SCALARS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null"))
_DIRECTIVE = re.compile(r"\s*#\s*@")


@dataclass(frozen=True)
class ModelFile:
    """One file of a chain. `shown` is its path as people read it, `parents` the models that it inherits, in order."""

    shown: str
    text: str
    mapping: dict[str, Any]
    parents: tuple[str, ...]


def model_chain(name: str, folders: Sequence[Path], root_keys: Collection[str] = ()) -> list[ModelFile]:
    """The files of model `name` (or of a path to a YAML file), what is inherited first.

    Parents are sought beside the file, then in `folders`; `root_keys` are names that no knob may have. ConfigError.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(Problem("model", f"there is no file {name}"))
        return _chain(path, [path.parent, *folders], root_keys, ())
    return _chain(_find(name, folders), list(folders), root_keys, ())


def models_in(folders: Sequence[Path]) -> list[str]:
    """The names of the models in `folders`."""
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def _find(name: str, folders: Sequence[Path], place: Place | None = None) -> Path:
    for folder in folders:
        path = folder / f"{name}.yaml"
        if _NAME.fullmatch(name) and path.is_file():
            return path
    raise ConfigError(Problem("model", f"no model is called {name!r}", place, help=suggest(name, models_in(folders))))


def _chain(path: Path, folders: list[Path], root_keys: Collection[str], children: tuple[Path, ...]) -> list[ModelFile]:
    file = read_model_file(path, root_keys)
    chain = []
    for parent in file.parents:
        place = Place(file.shown)
        inherited = _find(parent, folders, place)
        if inherited.resolve() in (*children, path.resolve()):
            raise ConfigError(Problem("defaults", f"{parent} inherits itself", place))
        chain += _chain(inherited, folders, root_keys, (*children, path.resolve()))
    return [*chain, file]


def read_model_file(path: Path, root_keys: Collection[str] = ()) -> ModelFile:
    """Reads one file as plain YAML. Raises ConfigError with the reason where it is not a plain model file."""
    shown = shown_path(path)
    raw = path.read_bytes()[: LARGEST + 1]
    if len(raw) > LARGEST:
        raise _refuse(shown, f"a model file has at most {LARGEST // 1024} KB")
    try:
        text = raw.decode("utf-8")
        _inspect(text, shown)
        mapping = yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise _refuse(shown, "is not UTF-8 text", raw[: error.start].count(b"\n") + 1) from None
    except yaml.MarkedYAMLError as error:
        line = getattr(error.problem_mark, "line", 0) + 1
        raise _refuse(shown, f"is not YAML: {error.problem}", line) from None
    except yaml.YAMLError as error:
        raise _refuse(shown, f"is not YAML: {str(error).splitlines()[0]}") from None
    except ValueError as error:  # digits beyond Python's limit, dates that are none
        raise _refuse(shown, f"has a value that cannot be read: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if _DIRECTIVE.match(line) and line != HEADER:
            raise _refuse(shown, f"has the directive {line.strip()!r}", number, f"the only one is {HEADER}")
    if HEADER not in text[:512].splitlines():
        raise _refuse(shown, "lacks its first line", help=f"begin the file with {HEADER}")
    if not isinstance(mapping, dict):
        raise _refuse(shown, "must be a mapping of knobs and the key model")
    return ModelFile(shown, text, mapping, _root(mapping, shown, text, root_keys))


def shown_path(path: Path) -> str:
    """A path as people read it: from the current folder, where it is below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _inspect(text: str, shown: str) -> None:
    """Walks the parser's events; nothing is built from them, so that an alias bomb or deep nesting costs nothing."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else None
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _refuse(shown, "uses a YAML alias or anchor", line, "write the value out, or make it a knob: ${knob}")
        tag = getattr(event, "tag", None)
        if tag:
            raise _refuse(shown, f"uses the YAML tag {tag}", line, "model files hold plain values only")
        if isinstance(event, yaml.ScalarEvent) and "${" in _KNOB.sub("", event.value, count=1):
            rule = f"has {event.value[:80]!r}, which is more than one ${{knob}}: a resolver or an expression"
            raise _refuse(shown, rule, line, "a value holds one ${knob} at most; arithmetic belongs into model.args")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise _refuse(shown, f"nests deeper than {DEEPEST}", line)
    _plain(yaml.compose(text, Loader=yaml.SafeLoader), shown)


def _plain(node: yaml.Node | None, shown: str) -> None:
    """Values are plain, keys are strings, and each stands once: YAML itself would keep the last in silence."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _plain(item, shown)
    if isinstance(node, yaml.ScalarNode) and node.tag not in _SCALARS:
        kind = node.tag.rpartition(":")[2]
        raise _refuse(
            shown,
            f"has the {kind} {node.value!r}",
            node.start_mark.line + 1,
            "text that looks like one is put in quotes",
        )
    seen: set[str] = set()
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:int"):
            raise _refuse(
                shown, f"has a key that YAML does not read as a name: {key.value!r}", line, "put it in quotes"
            )
        if key.value in seen:
            raise _refuse(shown, f"has the key {key.value!r} twice", line)
        seen.add(key.value)
        _plain(value, shown)


def _root(mapping: dict[str, Any], shown: str, text: str, root_keys: Collection[str]) -> tuple[str, ...]:
    for key, value in mapping.items():
        line = next((at for at, row in enumerate(text.splitlines(), 1) if row.startswith(f"{key}:")), None)
        if key in ("defaults", "model"):
            continue
        if isinstance(value, (dict, list)):
            help = suggest(str(key), ["defaults", "model"])
            raise _refuse(
                shown, f"has the root key {key!r}, which is neither defaults, model nor a single value", line, help
            )
        if key in root_keys or not str(key).isidentifier() or str(key).startswith("_"):
            help = "give the knob a name of its own"
            raise _refuse(shown, f"cannot set {key!r}: a model file has knobs of its own only", line, help)
    return _parents(mapping.get("defaults") or [], shown)


def _parents(defaults: Any, shown: str) -> tuple[str, ...]:
    names = defaults if isinstance(defaults, list) else [defaults]
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _refuse(shown, f"defaults lists names of models, but has {name!r}", help="defaults: [base, _self_]")
    if "_self_" in names and names[-1] != "_self_":
        raise _refuse(shown, "has _self_ before a parent: a model changes what it inherits", help="put _self_ last")
    return tuple(name for name in names if name != "_self_")


def _refuse(shown: str, rule: str, line: int | None = None, help: str = "") -> ConfigError:
    return ConfigError(Problem(shown, rule, Place(shown, line), help=help))
