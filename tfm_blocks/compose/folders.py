"""The folders with config groups: conf/, the folder of --config-dir, and the folder of published families."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from tfm_blocks.errors import ConfigError, Place, Problem, display_path
from tfm_blocks.language.chain import read_model_chain
from tfm_blocks.language.files import YamlFile, expect_header, read_yaml_file

GLOBAL_GROUPS = frozenset({"experiment", "debug"})  # groups whose files set any key of a run
OF_A_SWEEP = frozenset({"sweep", "launcher", "match", "ladder"})  # keys that define which jobs run, how and where
_DEFAULT = re.compile(r"(override |optional )*/?[^/\s@]+(/[^/\s@]+)*(@\S*)?")
PACKAGE = Path(__file__).parent.parent
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
FAMILIES = PACKAGE / "exchange" / "families"  # its `model/` has models whose weights are published


def config_folders(config_dir: Path | None) -> list[Path]:
    """Return conf/, `config_dir` and FAMILIES. Raises ConfigError if it is not a folder, or has a built-in name."""
    if config_dir is None or config_dir.resolve() == CONF.resolve():
        return [CONF, FAMILIES]
    if not config_dir.is_dir():
        rule = f"there is no folder {config_dir}"
        raise ConfigError(Problem("--config-dir", rule, help="name a folder that contains model/"))
    shipped = [(CONF, path) for path in CONF.rglob("*.yaml")]
    shipped += [(FAMILIES, path) for path in (FAMILIES / "model").glob("*.yaml")]
    files = {path.relative_to(root): root.name for root, path in sorted(shipped)}
    if hidden := [file for file in files if (config_dir / file).is_file()]:
        rule, help = "has the name of the built-in file {}/{}, so the name would be ambiguous", "give it another name"
        problems = [(config_dir / file, "--config-dir", rule.format(files[file], file), help) for file in hidden]
        raise ConfigError([_problem(*problem) for problem in problems])
    return [CONF, config_dir, FAMILIES]


def root_keys() -> set[str]:
    """Return the keys of train.yaml and its groups, which no knob of a model may use."""
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()} - {"model"}
    return groups | set(read_yaml(CONF / "train.yaml")) - {"defaults"}


def list_options(group: str, folders: list[Path]) -> dict[str, Path]:
    """Return the files that can be chosen, by name. A file such as `_probe` is only inherited."""
    return {name: path for name, path in _all_files(group, folders).items() if not path.name.startswith("_")}


def _all_files(group: str, folders: list[Path]) -> dict[str, Path]:
    """Return the files by name, the first of each; a file of a subfolder is named such as `probe/mqar`.

    Models in subfolders are left out, because the name of a model has no folder.
    """
    files: dict[str, Path] = {}
    for root in (folder / group for folder in folders):
        for path in sorted(root.glob("*.yaml" if group == "model" else "**/*.yaml")):
            files.setdefault(path.relative_to(root).with_suffix("").as_posix(), path)
    return files


def list_groups(folders: list[Path]) -> list[str]:
    return sorted({path.name for folder in folders for path in folder.iterdir() if path.is_dir()} - {"dashboard"})


def model_chain(name: str, folders: list[Path]) -> list[YamlFile]:
    """Read the files of a model, parents first. Raises ConfigError."""
    return read_model_chain(name, [folder / "model" for folder in folders], root_keys())


def chosen_files(choices: Mapping[str, str], folders: list[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the files of all groups but the model, in merge order: debug last, the experiment before it.

    Each comes with the group below whose key it sets values, or "" if it sets any key.
    """
    for group in sorted(
        choices.keys() - {"model"}, key=lambda group: (group == "debug", group in GLOBAL_GROUPS, group)
    ):
        for path in group_files(group, choices[group], folders):
            yield path, "" if group in GLOBAL_GROUPS else group


def split_choice(choice: str) -> list[str]:
    """Return the options of a choice, such as both of `[csv,wandb]`."""
    return [part.strip(" \"'") for part in choice.removeprefix("[").removesuffix("]").split(",")]


def group_files(group: str, choice: str | None, folders: list[Path], children: tuple[Path, ...] = ()) -> list[Path]:
    """Return the files of the options, each after its parents; [] for Hydra's own groups.

    `children` are the files that inherit the options. Raises ConfigError for an option that inherits itself.
    """
    known, files = _all_files(group, folders), list[Path]()
    for path in (known[name] for name in split_choice(choice or "") if name in known):
        if path in children:
            help = f"take {path.stem} out of the defaults of {display_path(children[-1])}"
            raise ConfigError(_problem(children[-1], "defaults", f"{path.stem} inherits itself", help))
        for entry in read_yaml(path).get("defaults", []):
            if isinstance(entry, str) and entry != "_self_":
                files += group_files(group, entry.removeprefix(f"/{group}/"), folders, (*children, path))
        files.append(path)
    return files


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a config file as a mapping, which nobody changes. Raises ConfigError if it is not a mapping."""
    mapping = read_yaml_file(path).value
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise _refuse(path, "must be a mapping of settings", "write key: value")
    defaults = mapping.get("defaults", [])
    entries = defaults if isinstance(defaults, list) else [None]
    keys = [key for entry in entries for key in (entry if isinstance(entry, dict) else [entry])]
    valid = all(isinstance(entry, (str, dict)) for entry in entries)
    if not valid or not all(_DEFAULT.fullmatch(str(key)) for key in keys):
        rule = "must be a list of entries NAME or GROUP: NAME"
        raise ConfigError(_problem(path, "defaults", rule, "defaults: [{override /model: base}]"))
    return cast(dict[str, Any], mapping)


def read_experiment(path: Path) -> dict[str, Any]:
    """Read a file of a group of GLOBAL_GROUPS. Raises ConfigError if its settings would have no effect."""
    mapping = read_yaml(path)
    effect = f", so its settings would go below the key {path.parent.name}"
    expect_header(read_yaml_file(path), path.stem, effect)
    if "hydra" in mapping:
        rule = "sets hydra, but an experiment defines a run, not how it is started"
        raise _refuse(path, rule, "write hydra.… on the command line")
    return mapping


def _refuse(path: Path, rule: str, help: str) -> ConfigError:
    return ConfigError(_problem(path, path.stem, rule, help))


def _problem(path: Path, address: str, rule: str, help: str) -> Problem:
    return Problem(address, rule, Place(display_path(path)), help=help)
