"""What `python train.py --help` prints."""
# Not Hydra's own help, which copies its store of configs once for each of its groups: longer than all else together.

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import OmegaConf

from tfm_blocks.compose.command_line import composed, prepare, split
from tfm_blocks.compose.folders import config_folders, options
from tfm_blocks.compose.overrides import first_of_sweep, parse_overrides

HELP = frozenset({"--help", "-h"})
TEXT = """\
Trains a Transformer that YAML describes, and keeps it in a folder under runs/.

  python train.py [GROUP=NAME]... [KEY=VALUE]...
  python train.py model=base heads=8 layers=6
  python train.py -m heads=2,4,8              one run for each of them

Options
  -m, --multirun      sweep: train a run for each combination of values given as a,b,c
  -cd, --config-dir   a folder with files of your own: FOLDER/model/mine.yaml is model=mine
  -c, --cfg job       print the config of the run instead of training it
  --resolve           with --cfg: values in place of ${{...}}
  -h, --help          this text, with what the rest of the command line makes of the config
  --hydra-help        Hydra's further options

Groups
{groups}

Keys
{keys}"""


def help_text(arguments: Sequence[str]) -> str:
    """The options, every group with its names, and every key with the value that the command line gives it.

    Raises ConfigError for a command line that could not be trained.
    """
    left = [argument for argument in arguments if argument not in HELP]
    own = split(left).own
    overrides = parse_overrides(split(prepare(left)).texts)
    config = composed([first_of_sweep(override) for override in overrides], own)
    folders = config_folders(own)
    names = sorted({path.name for folder in folders for path in folder.iterdir() if path.is_dir()})
    known = {name: sorted(options(name, folders)) for name in names}
    groups = [f"  {name}: {', '.join(found)}" for name, found in known.items() if found]
    keys = [f"  {line}" for line in OmegaConf.to_yaml(config).splitlines()]
    return TEXT.format(groups="\n".join(groups), keys="\n".join(keys))
