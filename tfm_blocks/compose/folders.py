"""The folders with config groups: conf/ and the folder of --config-dir."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import yaml

from tfm_blocks.errors import ConfigError, Place, Problem
from tfm_blocks.language.files import HEADER, display_path, suggest_yaml_fix

GLOBAL_GROUPS = frozenset({"experiment", "debug"})  # groups whose files set any key of a run
OF_A_SWEEP = frozenset({"sweep", "launcher", "match"})  # keys that define which jobs run, how and where
PACKAGE = Path(__file__).parent.parent
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"


def config_folders(config_dir: Path | None) -> list[Path]:
    """Return conf/ and `config_dir`. Raises ConfigError if it is not a folder, or if conf/ would hide its files."""
    if config_dir is None or config_dir.resolve() == CONF.resolve():
        return [CONF]
    if not config_dir.is_dir():
        raise ConfigError(
            Problem("--config-dir", f"there is no folder {config_dir}", help="name a folder that contains model/")
        )
    taken = sorted(
        path
        for path in [*config_dir.glob("*.yaml"), *config_dir.glob("*/*.yaml")]
        if _is_ours(path.relative_to(config_dir))
    )
    if taken:
        rule = "has the name of a built-in file, and {} would be read instead"
        help = "give it another name"
        raise ConfigError(
            [
                Problem(
                    "--config-dir",
                    rule.format(f"conf/{path.relative_to(config_dir)}"),
                    Place(display_path(path)),
                    help=help,
                )
                for path in taken
            ]
        )
    return [CONF, config_dir]


def _is_ours(path: Path) -> bool:
    return (CONF / path).is_file()


def root_keys() -> set[str]:
    """Return the keys of train.yaml and its groups, which no knob of a model may use."""
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()} - {"model"}
    return groups | set(read_yaml(CONF / "train.yaml")) - {"defaults"}


def list_options(group: str, folders: list[Path]) -> dict[str, Path]:
    """Return the files of a group by name."""
    return {path.stem: path for folder in folders for path in sorted((folder / group).glob("*.yaml"))}


def merge_order(groups: Iterable[str]) -> list[str]:
    """Sort groups in merge order: debug last, the experiment before it."""
    return sorted(groups, key=lambda group: (group == "debug", group in GLOBAL_GROUPS, group))


def split_choice(choice: str) -> list[str]:
    """Return the options of a choice, such as both of `[csv,wandb]`."""
    return [part.strip(" \"'") for part in choice.removeprefix("[").removesuffix("]").split(",")]


def group_files(group: str, choice: str | None, folders: list[Path]) -> list[Path]:
    """Return the files of the options, each after its parents; [] for Hydra's own groups."""
    known = list_options(group, folders)
    names = split_choice(choice) if choice else []
    return [file for name in names if name in known for file in _inherited(group, known[name], folders)]


def _inherited(group: str, path: Path, folders: list[Path]) -> list[Path]:
    parents = [entry for entry in read_yaml(path).get("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    return [*(file for parent in parents for file in group_files(group, parent, folders)), path]


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a config file as a plain mapping. Raises ConfigError if it is not a mapping."""
    try:
        text = path.read_text("utf-8")
        mapping = yaml.safe_load(text) or {}
    except UnicodeDecodeError:
        raise ConfigError(
            Problem(path.stem, "is not UTF-8 text", Place(display_path(path)), help="save it as UTF-8")
        ) from None
    except ValueError as error:  # an integer with too many digits, or an invalid date
        rule = f"has a value that cannot be read: {error}"
        raise ConfigError(Problem(path.stem, rule, Place(display_path(path)), help="write a smaller value")) from None
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
        rule = "must be a list of entries NAME or GROUP: NAME"
        raise ConfigError(
            Problem("defaults", rule, Place(display_path(path)), help="defaults: [{override /model: base}]")
        )
    return cast(dict[str, Any], mapping)


def read_experiment(path: Path) -> dict[str, Any]:
    """Read a file of a group of GLOBAL_GROUPS. Raises ConfigError if its settings would have no effect."""
    mapping = read_yaml(path)
    if HEADER not in path.read_text("utf-8")[:512].splitlines():
        rule = f"lacks the required first line, so its settings would go below the key {path.parent.name}"
        raise ConfigError(Problem(path.stem, rule, Place(display_path(path)), help=f"begin the file with {HEADER}"))
    if "hydra" in mapping:
        rule = "sets hydra, but an experiment defines a run, not how it is started"
        raise ConfigError(Problem(path.stem, rule, Place(display_path(path)), help="write hydra.… on the command line"))
    return mapping
