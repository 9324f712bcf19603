"""What `python train.py --help` prints: options, groups, and every key with its value and its comment in conf/."""
# Not Hydra's own help, which copies its store of configs once for each of its groups: longer than all else together.

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf

from tfm_blocks.compose.command_line import composed, prepare_arguments, split_arguments
from tfm_blocks.compose.comments import Comment, comments_of, lay_over
from tfm_blocks.compose.folders import CONF, GLOBAL_GROUPS, config_folders, group_files, merge_order, options, root_keys
from tfm_blocks.compose.overrides import first_of_sweep, parse_overrides
from tfm_blocks.errors import LONGEST_VALUE, cut
from tfm_blocks.language.chain import read_model_chain
from tfm_blocks.language.files import display_path

COLUMN = 30  # where comments begin, at least
HELP = frozenset({"--help", "-h"})
TEXT = """\
Trains a Transformer that YAML describes, and keeps it in a folder under runs/.

  {program} [GROUP=NAME]... [KEY=VALUE]...
  {program} model=base heads=8 layers=6
  {program} -m heads=2,4,8    one run for each of them

Options
  -m, --multirun      sweep: train a run for each combination of values given as a,b,c
  -cd, --config-dir   a folder with files of your own: FOLDER/model/mine.yaml is model=mine
  -c, --cfg job       print the config of the run instead of training it
  --resolve           with --cfg: values in place of ${{...}}
  -h, --help          this text, with what the rest of the command line makes of the config
  -i, --info WHAT     how Hydra gets there: all, config, defaults, defaults-tree, plugins or searchpath
  --hydra-help        Hydra's further options
  --version           the version of tfm-blocks

Groups
{groups}

Made of, in this order
{files}

Keys
{keys}"""


def help_text(arguments: Sequence[str], program: str) -> str:
    """The options, every group with its names, and every key with the value that the command line gives it.

    Raises ConfigError for a command line that could not be trained.
    """
    left = [argument for argument in arguments if argument not in HELP]
    own = split_arguments(left).own
    overrides = parse_overrides(split_arguments(prepare_arguments(left)).texts)
    folders = config_folders(own)
    first = [first_of_sweep(one, list(options(one.key_or_group, folders))) for one in overrides]
    config = composed(first, own, hydra=True)
    names = sorted({path.name for folder in folders for path in folder.iterdir() if path.is_dir()} - {"dashboard"})
    known = {name: sorted(options(name, folders)) for name in names}
    groups = [f"  {name}: {', '.join(found)}" for name, found in known.items() if found]
    comments = _comments(config.hydra.runtime.choices, folders)
    keys = {key: value for key, value in _plain(config).items() if key != "hydra"}
    files = [f"  {display_path(path)}" for path, _ in _files(config.hydra.runtime.choices, folders)]
    return TEXT.format(
        program=program,
        groups="\n".join(groups),
        files="\n".join(files),
        keys="\n".join(_lines(keys, (), comments)),
    )


def _comments(choices: Mapping[str, str], folders: list[Path]) -> dict[tuple[str, ...], Comment]:
    """Those of train.yaml, the model's chain, the groups and the experiment; what comes later goes on top."""
    found: dict[tuple[str, ...], Comment] = {}
    for path, group in _files(choices, folders):
        comments = comments_of(path.read_text("utf-8"), (group,) if group and group != "model" else ())
        found = lay_over(found, comments | ({("model",): comments[()]} if group == "model" else {}))
    return found


def _files(choices: Mapping[str, str], folders: list[Path]) -> Iterator[tuple[Path, str]]:
    """Those that the config is made of, and the group below whose key each sets something; \"\" for all keys."""
    yield CONF / "train.yaml", ""
    for file in read_model_chain(choices["model"], [folder / "model" for folder in folders], root_keys()):
        yield Path(file.shown), "model"
    for group in merge_order(choices.keys() - {"model"}):
        for path in group_files(group, choices[group], folders):
            yield path, "" if group in GLOBAL_GROUPS else group


def _plain(config: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))


def _lines(
    mapping: Mapping[str, Any], path: tuple[str, ...], comments: Mapping[tuple[str, ...], Comment]
) -> Iterator[str]:
    indent = "  " * (len(path) + 1)
    for name, value in mapping.items():
        here = (*path, str(name))
        comment = comments.get(here, Comment())
        yield from (f"{indent}# {line}" for line in comment.above)
        spread = isinstance(value, dict) and _is_spread(value, here, comments)
        text = f"{indent}{name}:" + ("" if spread else f" {cut(_flow(value))}")
        yield f"{text:<{COLUMN}}   # {comment.beside}" if comment.beside else text
        if spread:
            yield from _lines(value, here, comments)


def _is_spread(mapping: Mapping[str, Any], path: tuple[str, ...], comments: Mapping[tuple[str, ...], Comment]) -> bool:
    """On lines of its own: a mapping whose keys have comments, or that is too long for one line."""
    commented = any(comments.get((*path, str(name)), Comment()) != Comment() for name in mapping)
    return bool(mapping) and (len(path) == 1 or commented or len(_flow(mapping)) > LONGEST_VALUE)


def _flow(value: Any) -> str:
    """The value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    return text.removesuffix("\n").removesuffix("\n...")
