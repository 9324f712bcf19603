"""The command `tfm`. Each command imports its heavy modules only when it runs."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tfm_blocks.cli.options import Command, load_requested_plugins
from tfm_blocks.errors import FULL, TfmError, close_output, cut, escape_unknown_letters, printable, write_utf8
from tfm_blocks.launch.process_settings import collect_garbage_rarely, set_library_defaults
from tfm_blocks.version import __version__

COMMAND_MODULES = (  # in the order of `tfm --help`
    "models", "sizes", "view", "probes", "translate", "evaluate", "exchange", "runs", "dashboard", "completion",
)  # fmt: skip
DATA_OPTIONS = ("data", "json", "csv", "markdown", "latex")  # attributes of commands whose output is data


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its status: 0 if it succeeds, 2 for an invalid config, 1 for other user errors."""
    if "_ARGCOMPLETE" in os.environ:
        from tfm_blocks.cli.completion import complete

        complete(command_parser())
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["train"]:  # Hydra parses its options
        from tfm_blocks.cli.train import train

        status = train(arguments[1:], program="tfm train", command=[sys.executable, "-m", "tfm_blocks", "train"])
    else:
        status = run_command(lambda: _run(arguments))
    if status:
        sys.exit(status)


def run_command(action: Callable[[], int | None]) -> int:
    """Run a command and return its exit status; handle a full disk and a closed output pipe."""
    escape_unknown_letters()
    status = 0
    try:
        try:
            status = print_errors(action)
        finally:
            if sys.stdout:
                sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader closed the pipe, as in `tfm blocks | head`
        close_output()
        return status
    except OSError as error:  # such as a full disk or a file without write permission
        if error.errno is None:  # an error of a library, or a bug: only the traceback shows its origin
            raise
        place = error.filename or ("output" if error.errno in FULL else type(error).__name__)
        print(f"error: {printable(cut(str(place)))}: {error.strerror}", file=sys.stderr)
        close_output()
        return 1
    except KeyboardInterrupt:
        return 130


def print_errors(action: Callable[[], int | None]) -> int:
    """Run `action` and return its exit status; if it raises TfmError, print the error and return the error's status."""
    try:
        return action() or 0
    except TfmError as error:
        with suppress(BrokenPipeError):
            print(error, file=sys.stderr)
        return error.exit_status


def _run(argv: Sequence[str]) -> int | None:
    arguments = _parse(argv)
    if any(vars(arguments).get(name) for name in DATA_OPTIONS):
        write_utf8()
    set_library_defaults()
    collect_garbage_rarely()
    load_requested_plugins(arguments)
    status: int | None = arguments.run(arguments)
    return status


def _parse(argv: Sequence[str]) -> Namespace:
    """Parse the arguments; overrides may precede or follow options."""
    parser = command_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not (hasattr(arguments, "overrides") and all("=" in text and text[0] != "-" for text in rest)):
        help = f"tfm {arguments.command} --help lists the arguments"
        parser.error(f"unrecognized arguments: {' '.join(rest)}; {help}")
    if hasattr(arguments, "overrides"):
        arguments.overrides = [*arguments.overrides, *rest]
        if arguments.overrides or "=" in arguments.model:
            _choose_model(arguments)
    return arguments


def _choose_model(arguments: Namespace) -> None:
    """Set the model if overrides stand in its place, and drop overrides that a later one replaces.

    Raises ConfigError.
    """
    from tfm_blocks.compose.command_line import chosen_models, keep_last
    from tfm_blocks.compose.overrides import override_key

    is_override = "=" in arguments.model and not Path(arguments.model).exists()
    overrides = keep_last([arguments.model, *arguments.overrides] if is_override else arguments.overrides)
    if is_override:
        models = chosen_models(overrides, arguments.config_dir)
        without = [text for text in overrides if override_key(text) != "model"]
        if len(without) == len(overrides):
            models = list(dict.fromkeys(models))
            arguments.models_of_experiments = len(models) > 1
        arguments.model, overrides = ",".join(models), without
    arguments.overrides = overrides


def command_parser() -> Command:
    """Return the parser of all commands, whose modules `train.py` does not import."""
    parser = Command("tfm", description="Train, inspect, check and use models.")
    parser.add_argument("--version", action="version", version=f"tfm-blocks {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="train a run, or a sweep with -m; see tfm train --help")
    for name in COMMAND_MODULES:
        import_module(f"tfm_blocks.cli.{name}").add_commands(commands)
    return parser
