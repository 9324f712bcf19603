"""`tfm probes`: the probe tasks, and the test of the tasks of a plug-in."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfm_blocks.cli.options import add_plugins
from tfm_blocks.errors import ConfigError, Problem, shown

if TYPE_CHECKING:
    from tfm_blocks.cli.options import Commands


def add_commands(commands: Commands) -> None:
    """Add the parser of this command."""
    what = "list the probe tasks, or explain some of them with examples"
    command = commands.add_parser("probes", help="list and explain the probe tasks", description=what)
    command.add_argument("names", nargs="*", metavar="TASK", help="explain these tasks: settings, sizes and examples")
    command.add_argument("--test", metavar="MODULE", help="test the tasks that this plug-in registers")
    add_plugins(command)
    command.set_defaults(run=_probes)


def _probes(arguments: argparse.Namespace) -> int:
    from tfm_blocks.registry.plugins import load_plugins
    from tfm_blocks.report.probes import show_probe, show_probes

    load_plugins(())
    if arguments.test:
        return _test_tasks(arguments.test, arguments.names)
    for name in arguments.names:
        show_probe(name)
    if not arguments.names:
        show_probes()
    return 0


def _test_tasks(module: str, names: Sequence[str]) -> int:
    """Print for each task of a plug-in that it passes, or the rule that it breaks. Return 1 if a task breaks a rule.

    Raises ConfigError if the module cannot be imported, or registers none of the tasks.
    """
    from tfm_blocks.probes.catalogue import TASKS, broken_rules
    from tfm_blocks.registry.plugins import load_plugins, plugins_in_use

    load_plugins([module])
    registered = [name for name in TASKS if plugins_in_use([module], (), [name])]
    unknown = [name for name in names if name not in registered]
    if unknown or not registered:
        rule = " ".join([f"the module {shown(module)} registers no task", *unknown[:1]])
        raise ConfigError(Problem("--test", rule, help="put the decorator @task(NAME) on its classes"))
    failed = False
    for name in names or registered:
        cls = TASKS[name]
        breach = next(
            (f"{size}: {rule}" for size, preset in cls.presets.items() for rule in broken_rules(cls, preset)), ""
        )
        print(f"{name}: {breach or 'pass'}")
        failed |= bool(breach)
    return int(failed)
