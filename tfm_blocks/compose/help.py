"""The text of `python train.py --help`: options, groups, and every key with its value and its comment in conf/."""
# Hydra's own help is not used: it copies its config store once per group, which takes longer than all other steps.

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tfm_blocks.compose.command_line import Request
from tfm_blocks.compose.comments import Comment, merge_comments, read_comments
from tfm_blocks.compose.composition import Composer
from tfm_blocks.compose.folders import CONF, chosen_files, list_groups, list_options, model_chain
from tfm_blocks.compose.overrides import first_of_sweep
from tfm_blocks.compose.resolve import to_plain
from tfm_blocks.errors import LONGEST_VALUE, cut
from tfm_blocks.language.files import read_yaml_file

COLUMN = 30  # the first column of comments, at least
TEXT = """\
Train a Transformer that is defined in YAML, and save it in a folder under runs/.

  {program} [GROUP=NAME]... [KEY=VALUE]...
  {program} model=base heads=8 layers=6
  {program} -m heads=2,4,8    one run per value

Options
  -m, --multirun      sweep: train a run for each combination of values written as a,b,c
  -cd, --config-dir   a folder with your own config files: FOLDER/model/mine.yaml is model=mine
  -c, --cfg job       print the config of the run instead of training it
  --resolve           with --cfg: print values in place of ${{...}}
  --yes               start a ladder (experiment=ladder); without it, the command only prints the estimated hours
  -h, --help          print this text and the config that the other arguments give
  -i, --info WHAT     print how Hydra composes the config: all, config, defaults, defaults-tree, plugins or searchpath
  --hydra-help        print Hydra's other options
  --version           print the version of tfm-blocks

Groups
{groups}

Files, in merge order
{files}

Keys
{keys}"""


def help_text(request: Request, program: str) -> str:
    """Return the help text: options, groups with their names, and keys with the values of this command line.

    Raises ConfigError for an invalid command line.
    """
    folders = request.folders
    first = [
        first_of_sweep(override, list(list_options(override.key_or_group, folders))) for override in request.overrides
    ]
    config = Composer(folders).compose(first)
    known = {name: sorted(list_options(name, folders)) for name in list_groups(folders)}
    groups = [f"  {name}: {', '.join(options)}" for name, options in known.items() if options]
    comments: dict[tuple[str, ...], Comment] = {}
    choices = config.hydra.runtime.choices
    # the files of the config in merge order, each with the group below whose key it sets values, or ""
    chosen = [(read_yaml_file(CONF / "train.yaml"), "")]
    chosen += [(file, "model") for file in model_chain(choices["model"], folders)]
    chosen += [(read_yaml_file(path), group) for path, group in chosen_files(choices, folders)]
    for file, group in chosen:
        own = read_comments(file, (group,) if group and group != "model" else ())
        comments = merge_comments(comments, own | ({("model",): own[()]} if group == "model" else {}))
    keys = to_plain(config)
    del keys["hydra"]
    files = [f"  {file.shown}" for file, _ in chosen]
    return TEXT.format(
        program=program, groups="\n".join(groups), files="\n".join(files), keys="\n".join(_lines(keys, (), comments))
    )


def _lines(
    mapping: Mapping[str, Any], path: tuple[str, ...], comments: Mapping[tuple[str, ...], Comment]
) -> Iterator[str]:
    indent = "  " * (len(path) + 1)
    for name, value in mapping.items():
        key_path = (*path, str(name))
        comment = comments.get(key_path, Comment())
        yield from (f"{indent}# {line}" for line in comment.above)
        spread = False  # over several lines, because a mapping has comments or is too long for one line
        if isinstance(value, dict) and value:
            commented = any(comments.get((*key_path, str(inner)), Comment()) != Comment() for inner in value)
            spread = not path or commented or len(flow(value)) > LONGEST_VALUE
        text = f"{indent}{name}:" + ("" if spread else f" {cut(flow(value))}")
        yield f"{text:<{COLUMN}}   # {comment.beside}" if comment.beside else text
        if spread:
            yield from _lines(value, key_path, comments)


def flow(value: Any) -> str:
    """Format a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    return text.removesuffix("\n").removesuffix("\n...")
