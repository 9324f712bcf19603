"""The command `tfm view`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli import options
from tfm_blocks.cli.diff import split_models
from tfm_blocks.cli.models import read_model_or_run
from tfm_blocks.errors import ConfigError, Problem, printable, shown

if TYPE_CHECKING:
    from tfm_blocks.report.model_page import ViewedModel


def add_commands(commands: options.Commands) -> None:
    """Add the parser of `tfm view`."""
    what = "write one self-contained page about a model, or about two models and their difference"
    command = options.add_command(commands, "view", _view, "write a page about a model", what)
    what = "one or two models or run folders, each followed by its overrides"
    command.add_argument("words", nargs="+", metavar="MODEL|RUN", help=what)
    output = command.add_mutually_exclusive_group(required=True)
    output.add_argument("-o", type=Path, dest="path", metavar="FILE", help="write the page to this file, page.html")
    what = "serve the page on 127.0.0.1, and reload it when a model file changes"
    output.add_argument("--watch", action="store_true", help=what)
    command.add_argument("--port", type=int, default=0, metavar="N", help="port of --watch (0: a free one)")
    options.add_model_options(command)


def _view(arguments: argparse.Namespace) -> None:
    from tfm_blocks.report.model_page import render_view
    from tfm_blocks.runs.files import write_bytes

    words = split_models(arguments.words, (1, 2))
    if arguments.watch:
        from tfm_blocks.cli.view_server import serve

        serve(lambda: _viewed(words, arguments), arguments.port)
        return
    path: Path = arguments.path
    options.expect_html(path, "page.html")
    text = render_view(_viewed(words, arguments)).encode("utf-8", "replace")
    try:
        write_bytes(path, text)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise ConfigError(Problem(str(path), rule, help="choose a file in a folder that you can write")) from None
    print(f"{shown(str(path))[1:-1]}: {len(text) / 1e3:.0f} kB")


def _viewed(words: list[tuple[str, list[str]]], arguments: argparse.Namespace) -> list[ViewedModel]:
    from tfm_blocks.report.model_page import ViewedModel

    return [
        ViewedModel(printable(" ".join([name, *overrides])), *read_model_or_run(name, overrides, arguments))
        for name, overrides in words
    ]
