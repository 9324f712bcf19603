"""Run Hydra as an application, which composes the config of each run of a command line."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Sequence

import hydra
from omegaconf import DictConfig

from tfm_blocks.compose.command_line import PRINTING, split_arguments
from tfm_blocks.compose.folders import CONF


def run_hydra(arguments: Sequence[str], job: Callable[[DictConfig], None]) -> None:
    """Call `job` with each config, or print the output of an option such as --cfg. Hydra reads sys.argv."""
    sys.argv[1:] = arguments
    main = hydra.main(version_base=None, config_path=str(CONF.resolve()), config_name="train")(job)
    if PRINTING.isdisjoint(split_arguments(arguments).flags):
        main()
        return
    output = io.StringIO()  # a failed write inside Hydra, as in `--cfg all | head`, would print a traceback
    try:
        with contextlib.redirect_stdout(output):
            main()
    finally:
        print(output.getvalue(), end="")
