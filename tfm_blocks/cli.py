"""The command `tfm`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.errors import DataError, Place, Problem, TfmError

if TYPE_CHECKING:
    from tfm_blocks.compose.resolve import Composed

CHUNK = 256


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
    parser = argparse.ArgumentParser("tfm", description="Look at models, check them, and translate with trained ones.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("check", _check, "check a model without allocating it"),
        ("show", _show, "the nodes of a model, with shapes and parameters"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("model", metavar="MODEL", help="a name under conf/model/, or a path to a YAML file")
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="heads=4, model.add_norm=pre")
        command.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder of yours with a model/ in it")
        _add_plugins(command)
        command.set_defaults(run=run)
    blocks = commands.add_parser("blocks", help="the registered blocks", description="the registered blocks")
    blocks.add_argument("name", nargs="?", metavar="NAME", help="all about one block")
    _add_plugins(blocks)
    blocks.set_defaults(run=_blocks)
    translate = commands.add_parser("translate", help="translate lines", description="stdin to stdout, line by line")
    translate.add_argument("folder", type=Path, metavar="RUN", help="a run folder, such as runs/NAME")
    translate.add_argument(
        "--batch-tokens", type=_count, default=4096, metavar="N", help="source tokens at a time (4096)"
    )
    translate.add_argument("--device", default="cpu", help="cpu, cuda, … (cpu)")
    _add_plugins(translate)
    translate.set_defaults(run=_translate)
    return parser


def _add_plugins(command: argparse.ArgumentParser) -> None:
    help = "a module with blocks of yours, on the path or in this folder"
    command.add_argument("--plugins", action="append", default=[], metavar="MODULE", help=help)


def _check(arguments: argparse.Namespace) -> None:
    from tfm_blocks.network.build import check_model

    composed = _composed(arguments)
    spec = check_model(composed.model, composed.sources)
    print(f"{arguments.model}: fine, {len(spec.nodes)} nodes")


def _show(arguments: argparse.Namespace) -> None:
    from tfm_blocks.network.build import check_model
    from tfm_blocks.report.show import show_model

    composed = _composed(arguments)
    show_model(check_model(composed.model, composed.sources), arguments.model)


def _composed(arguments: argparse.Namespace) -> Composed:
    from tfm_blocks.compose.model import compose_model
    from tfm_blocks.registry.plugins import load_plugins

    composed = compose_model(arguments.model, arguments.overrides, arguments.config_dir)
    load_plugins(arguments.plugins)
    return composed


def _blocks(arguments: argparse.Namespace) -> None:
    import tfm_blocks.blocks  # noqa: F401  registers them
    from tfm_blocks.registry.plugins import load_plugins
    from tfm_blocks.report.blocks import show_block, show_blocks

    load_plugins(arguments.plugins)
    if arguments.name:
        show_block(arguments.name)
    else:
        show_blocks()


def _translate(arguments: argparse.Namespace) -> None:
    from tfm_blocks.translation.translator import Translator

    translator = Translator.load(arguments.folder, device=arguments.device, plugins=arguments.plugins)
    line = 1
    for chunk in _chunks(1 if sys.stdin.isatty() else CHUNK):
        for text in translator.translate(chunk, batch_tokens=arguments.batch_tokens, first_line=line):
            print(text.replace("\n", " "))
        sys.stdout.flush()
        line += len(chunk)


def _chunks(size: int) -> Iterator[list[str]]:
    """The lines of stdin. Raises DataError for one that is not UTF-8, after those before it."""
    chunk: list[str] = []
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            chunk.append(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n"))
        except UnicodeDecodeError:
            yield chunk
            raise DataError(Problem("stdin", "the line is not UTF-8 text", Place("stdin", number))) from None
        if len(chunk) == size:
            yield chunk
            chunk = []
    yield chunk


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, but is {text!r}")
    return int(text)
