"""The command `tfm`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tfm_blocks.cli import models, runs
from tfm_blocks.errors import TfmError


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; leaves with 0, with 2 for a wrong config, with 1 for any other mistake of the user's."""
    arguments = _parse(argv)
    if arguments.plugins:
        sys.path.insert(0, str(Path.cwd()))
    try:
        arguments.run(arguments)
    except TfmError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk, a file that may not be written
        print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before and after options."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not (hasattr(arguments, "overrides") and all("=" in text and text[0] != "-" for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tfm", description="Look at models, check them, and use trained ones.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for room in (models, runs):
        room.add_commands(commands)
    return parser
