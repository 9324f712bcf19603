"""`tfm probes`: the probe tasks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfm_blocks.cli.options import Commands


def add_commands(commands: Commands) -> None:
    """Add the parser of this command."""
    what = "list the probe tasks, or explain some of them with examples"
    command = commands.add_parser("probes", help="list and explain the probe tasks", description=what)
    command.add_argument("names", nargs="*", metavar="TASK", help="explain these tasks: settings, sizes and examples")
    command.set_defaults(run=_probes)


def _probes(arguments: argparse.Namespace) -> None:
    from tfm_blocks.report.probes import show_probe, show_probes

    for name in arguments.names:
        show_probe(name)
    if not arguments.names:
        show_probes()
