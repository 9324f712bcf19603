"""Blocks of other packages: entry points, or `plugins=my_module` on the command line; never a key of a model file."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from tfm_blocks.errors import ConfigError, Problem, shown
from tfm_blocks.registry.blocks import REGISTRY

GROUP = "tfm_blocks.blocks"
_registered: dict[str, set[str]] = {}  # by plug-in: the blocks that appeared while it was imported


def load_plugins(modules: Sequence[str]) -> None:
    """Imports every installed entry point of the group, then `modules`; ConfigError where one cannot be imported.

    `modules` are sought in the current folder first, whatever the command that loads them.
    """
    for entry in entry_points(group=GROUP):
        _import(entry.module)
    folder = str(Path.cwd())
    if modules and folder not in sys.path:
        sys.path.insert(0, folder)
    for module in modules:
        _import(module)


def plugins_of(modules: Sequence[str], blocks: Iterable[str]) -> list[str]:
    """Return those of `modules` that register at least one of `blocks`."""
    used = set(blocks)
    return [module for module in modules if not used.isdisjoint(_registered_by(module))]


def _registered_by(module: str) -> set[str]:
    """Return the names of the blocks whose classes `module` or its submodules hold, or that its import registered."""
    held = {
        name
        for name, info in REGISTRY.blocks.items()
        if info.cls.__module__ == module or info.cls.__module__.startswith(f"{module}.")
    }
    return held | _registered.get(module, set())


def _import(module: str) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module):
        help = "write the name that Python imports it by, such as my_blocks"
        raise ConfigError(Problem("plugins", f"{shown(module)} is not the name of a Python module", help=help))
    try:
        before = set(REGISTRY.blocks)
        importlib.import_module(module)
        _registered.setdefault(module, set()).update(REGISTRY.blocks.keys() - before)
    except ImportError as error:
        raise ConfigError(
            Problem(
                "plugins",
                f"the module {shown(module)} cannot be imported: {error}",
                help="install it, or put it into this folder, or its folder on PYTHONPATH",
            )
        ) from error
    except Exception as error:
        rule = f"the module {shown(module)} fails when it is imported: {type(error).__name__}: {error}"
        raise ConfigError(Problem("plugins", rule, help=f"python -c 'import {module}' shows where")) from error
