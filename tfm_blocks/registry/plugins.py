"""Import blocks, probe tasks and optimizers of other packages.

They are entry points, or named by `plugins=my_module` on the command line, but never by model files.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from tfm_blocks.errors import LONGEST_LINE, ConfigError, Problem, cut, place_of, print_on_rank_0, shown
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.optimizers import OPTIMIZERS

GROUP = "tfm_blocks.blocks"
_registered: dict[str, set[tuple[str, str]]] = {}  # plug-in to the kinds and names that its import registered


def load_plugins(modules: Sequence[str], *, warn: Callable[[str], None] | None = None) -> None:
    """Import every installed entry point of the group, then `modules`, which are looked up in the current folder first.

    `warn` reports a failing entry point once, by default on stderr, because most models do not need it. Raises
    ConfigError if one of `modules` cannot be imported.
    """
    for entry in entry_points(group=GROUP):
        _import_installed(entry, warn or (lambda text: print_on_rank_0(f"warning: {text}")))
    folder = str(Path.cwd())
    if modules and folder not in sys.path:
        sys.path.insert(0, folder)
    for module in modules:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module):
            help = "write the name that Python imports it by, such as my_blocks"
            raise ConfigError(Problem("plugins", f"{shown(module)} is not the name of a Python module", help=help))
        try:
            before = registrations().keys()
            importlib.import_module(module)
            _registered.setdefault(module, set()).update(registrations().keys() - before)
        except (Exception, SystemExit) as error:
            rule = f"the module {shown(module)} fails when it is imported: {type(error).__name__}: {error}"
            help = f"python -c 'import {module}' prints the whole traceback"
            if isinstance(error, ImportError):
                rule = f"the module {shown(module)} cannot be imported: {error}"
                help = f"install {error.name or module}, or put it into this folder, or its folder on PYTHONPATH"
                help = f"leave .py out: {module.removesuffix('.py')}" if Path(module).is_file() else help
            elif isinstance(error, SystemExit):
                rule = f"the module {shown(module)} ends the process when it is imported"
                help = "put commands that are not declarations below the line if __name__ == '__main__':"
            raise ConfigError(Problem("plugins", rule, place_of(error, module), help=help)) from error


def is_loaded(module: str) -> bool:
    """Return True if the command line or the caller named this plug-in, and it was imported."""
    return module in _registered


def plugins_in_use(
    modules: Sequence[str], blocks: Iterable[str], tasks: Iterable[str] = (), optimizers: Iterable[str] = ()
) -> list[str]:
    """Return the `modules` that register at least one of `blocks`, of the probe `tasks` or of `optimizers`."""
    if not modules:
        return []
    kinds = {"block": blocks, "task": tasks, "optimizer": optimizers}
    names = {(kind, name) for kind, own in kinds.items() for name in own}
    used = {name: home for name, home in registrations().items() if name in names}
    return [
        module
        for module in modules
        if any(name in _registered.get(module, ()) or home.startswith(f"{module}.") for name, home in used.items())
    ]


def registrations() -> dict[tuple[str, str], str]:
    """Return the module of each registered block, probe task and optimizer, with a dot at its end, by kind and name."""
    from tfm_blocks.probes.catalogue import TASKS

    blocks = {("block", name): info.cls for name, info in REGISTRY.blocks.items()}
    tasks = {("task", name): cls for name, cls in TASKS.items()}
    optimizers = {("optimizer", name): info.make for name, info in OPTIMIZERS.items()}
    return {name: f"{made.__module__}." for name, made in {**blocks, **tasks, **optimizers}.items()}


def _import_installed(entry: EntryPoint, warn: Callable[[str], None]) -> None:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
    plugin = f"{package} ({entry.name} = {entry.value})"
    if plugin in REGISTRY.broken:
        return
    try:
        importlib.import_module(entry.module)
    except (Exception, SystemExit) as error:
        REGISTRY.broken.add(plugin)
        reason = cut(f"{type(error).__name__}: {error}", LONGEST_LINE)
        warn(f"the plug-in {plugin} failed to load, so its blocks are missing: {reason}; reinstall it or remove it")
