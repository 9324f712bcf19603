"""The folders with groups of settings: conf/, and the one that --config-dir names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import yaml

from tfm_blocks.errors import ConfigError, Place, Problem
from tfm_blocks.language.files import HEADER, shown_path

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
                    "--config-dir", rule.format(f"conf/{path.relative_to(own)}"), Place(shown_path(path)), help=help
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


def read_yaml(path: Path) -> dict[str, Any]:
    """A file of settings as a plain mapping. Raises ConfigError where it is none."""
    try:
        mapping = yaml.safe_load(path.read_text("utf-8")) or {}
    except UnicodeDecodeError:
        raise ConfigError(Problem(path.stem, "is not UTF-8 text", Place(shown_path(path)))) from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = Place(shown_path(path), mark.line + 1 if mark else None)
        raise ConfigError(Problem(path.stem, f"is not YAML: {getattr(error, 'problem', error)}", place)) from None
    if not isinstance(mapping, dict):
        raise ConfigError(Problem(path.stem, "must be a mapping of settings", Place(shown_path(path))))
    defaults = mapping.get("defaults", [])
    if not isinstance(defaults, list) or not all(isinstance(entry, (str, dict)) for entry in defaults):
        rule = "must be a list of names and of group: name"
        raise ConfigError(
            Problem("defaults", rule, Place(shown_path(path)), help="defaults: [{override /model: base}]")
        )
    return cast(dict[str, Any], mapping)


def read_experiment(path: Path) -> dict[str, Any]:
    """A file of the group experiment, which sets any key of a run. Raises ConfigError where it could not."""
    mapping = read_yaml(path)
    if HEADER not in path.read_text("utf-8")[:512].splitlines():
        rule = "lacks its first line, so that what it sets would go below the key experiment"
        raise ConfigError(Problem(path.stem, rule, Place(shown_path(path)), help=f"begin the file with {HEADER}"))
    if "hydra" in mapping:
        rule = "sets hydra, but an experiment says what a run is, not how it is started"
        raise ConfigError(Problem(path.stem, rule, Place(shown_path(path)), help="write hydra.… on the command line"))
    return mapping
