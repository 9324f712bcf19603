"""Blocks of other packages: entry points, or `plugins=my_module` on the command line; never a key of a model file."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from importlib.metadata import entry_points

from tfm_blocks.errors import ConfigError, Problem

GROUP = "tfm_blocks.blocks"


def load_plugins(modules: Sequence[str]) -> None:
    """Imports every installed entry point of the group, then `modules`; ConfigError where one cannot be imported."""
    for entry in entry_points(group=GROUP):
        _import(entry.module)
    for module in modules:
        _import(module)


def _import(module: str) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module):
        raise ConfigError(Problem("plugins", f"{module!r} is not the name of a Python module"))
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            Problem(
                "plugins",
                f"the module {module!r} cannot be imported: {error}",
                help="install it, or put its folder on PYTHONPATH",
            )
        ) from error
    except Exception as error:
        rule = f"the module {module!r} fails when it is imported: {type(error).__name__}: {error}"
        raise ConfigError(Problem("plugins", rule, help=f"python -c 'import {module}' shows where")) from error
