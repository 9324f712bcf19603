"""The folders with groups of settings: conf/, and the one that --config-dir names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import yaml

from tfm_blocks.errors import ConfigError, Place, Problem
from tfm_blocks.language.files import HEADER, display_path, suggest_yaml_fix

GLOBAL_GROUPS = frozenset({"experiment", "debug"})  # groups whose files set any key of a run
OF_A_SWEEP = frozenset({"sweep", "launcher"})  # groups that say how and where jobs are run, and nothing of a run
PACKAGE = Path(__file__).parent.parent
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"


def config_folders(own: Path | None) -> list[Path]:
    """conf/, then `own`. Raises ConfigError where `own` is no folder, or has a file that one of ours would hide."""
    if own is None or own.resolve() == CONF.resolve():
        return [CONF]
    if not own.is_dir():
        raise ConfigError(Problem("--config-dir", f"there is no folder {own}", help="name one with a model/ in it"))
    taken = sorted(path for path in [*own.glob("*.yaml"), *own.glob("*/*.yaml")] if _is_ours(path.relative_to(own)))
    if taken:
        rule = "has the name of one of ours, and {} would be read instead"
        help = "give it another name"
        raise ConfigError(
            [
                Problem(
                    "--config-dir", rule.format(f"conf/{path.relative_to(own)}"), Place(display_path(path)), help=help
                )
                for path in taken
            ]
        )
    return [CONF, own]


def _is_ours(path: Path) -> bool:
    return (CONF / path).is_file()


def root_keys() -> set[str]:
    """The keys of train.yaml and its groups, which no knob of a model may take."""
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()} - {"model"}
    return groups | set(read_yaml(CONF / "train.yaml")) - {"defaults"}


def options(group: str, folders: list[Path]) -> dict[str, Path]:
    """The files of a group by name."""
    return {path.stem: path for folder in folders for path in sorted((folder / group).glob("*.yaml"))}


def merge_order(groups: Iterable[str]) -> list[str]:
    """As their files are laid over each other: debug last, the experiment before it."""
    return sorted(groups, key=lambda group: (group == "debug", group in GLOBAL_GROUPS, group))


def options_in(choice: str) -> list[str]:
    """The options of one choice: of `[csv,wandb]` both."""
    return [part.strip(" \"'") for part in choice.removeprefix("[").removesuffix("]").split(",")]


def group_files(group: str, choice: str | None, folders: list[Path]) -> list[Path]:
    """The files of the options, each after those that it inherits; none where the group is one of Hydra's own."""
    known = options(group, folders)
    names = options_in(choice) if choice else []
    return [file for name in names if name in known for file in _inherited(group, known[name], folders)]


def _inherited(group: str, path: Path, folders: list[Path]) -> list[Path]:
    parents = [entry for entry in read_yaml(path).get("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    return [*(file for parent in parents for file in group_files(group, parent, folders)), path]


def read_yaml(path: Path) -> dict[str, Any]:
    """A file of settings as a plain mapping. Raises ConfigError where it is none."""
    try:
        text = path.read_text("utf-8")
        mapping = yaml.safe_load(text) or {}
    except UnicodeDecodeError:
        raise ConfigError(
            Problem(path.stem, "is not UTF-8 text", Place(display_path(path)), help="save it as UTF-8")
        ) from None
    except ValueError as error:  # more digits than Python reads, a date that is none
        rule = f"has a value that cannot be read: {error}"
        raise ConfigError(Problem(path.stem, rule, Place(display_path(path)), help="write a smaller one")) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        rule = f"is not YAML: {getattr(error, 'problem', error)}"
        place, help = Place(display_path(path), line), suggest_yaml_fix(text, line or 0)
        raise ConfigError(Problem(path.stem, rule, place, help=help)) from None
    if not isinstance(mapping, dict):
        raise ConfigError(
            Problem(path.stem, "must be a mapping of settings", Place(display_path(path)), help="write key: value")
        )
    defaults = mapping.get("defaults", [])
    if not isinstance(defaults, list) or not all(isinstance(entry, (str, dict)) for entry in defaults):
        rule = "must be a list of names and of group: name"
        raise ConfigError(
            Problem("defaults", rule, Place(display_path(path)), help="defaults: [{override /model: base}]")
        )
    return cast(dict[str, Any], mapping)


def read_experiment(path: Path) -> dict[str, Any]:
    """A file of a group of EVERYWHERE. Raises ConfigError where it could not set what it says."""
    mapping = read_yaml(path)
    if HEADER not in path.read_text("utf-8")[:512].splitlines():
        rule = f"lacks its first line, so that what it sets would go below the key {path.parent.name}"
        raise ConfigError(Problem(path.stem, rule, Place(display_path(path)), help=f"begin the file with {HEADER}"))
    if "hydra" in mapping:
        rule = "sets hydra, but an experiment says what a run is, not how it is started"
        raise ConfigError(Problem(path.stem, rule, Place(display_path(path)), help="write hydra.… on the command line"))
    return mapping
