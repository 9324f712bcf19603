"""Commands that write text: translate and generate."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli.options import add_checkpoint, add_run, add_search, count, translator_of
from tfm_blocks.cli.search_options import add_output, add_sampling, precision_of, sampling_of, search_of
from tfm_blocks.errors import DataError, Problem

if TYPE_CHECKING:
    from tfm_blocks.cli.options import Commands
    from tfm_blocks.translation.stream import Translating


def add_commands(commands: Commands) -> None:
    """Add the parsers of `tfm translate` and `tfm generate`."""
    what = "translate stdin to stdout, line by line; tabs separate the sources of a line"
    command = commands.add_parser("translate", help="translate lines", description=what)
    add_run(command)
    add_checkpoint(command)
    add_search(command)
    add_output(command)
    add_sampling(command)
    command.add_argument("--prefix", type=Path, metavar="FILE", help="the beginnings of the translations, line by line")
    command.set_defaults(run=_translate, data=True)
    what = "continue each prompt, one per line of stdin, and print both"
    command = commands.add_parser("generate", help="continue prompts", description=what)
    add_run(command)
    add_checkpoint(command)
    command.add_argument(
        "--tokens", type=count, default=64, metavar="N", help="maximum number of tokens to generate before eos (64)"
    )
    add_search(command)
    add_output(command)
    add_sampling(command)
    command.set_defaults(run=_generate, prefix=None, data=True)


def _translate(arguments: argparse.Namespace) -> None:
    from tfm_blocks.translation.stream import Translating

    _expect_streams("tfm translate RUN")
    search = search_of(arguments, nbest=arguments.nbest, sampling=sampling_of(arguments))
    translator = translator_of(arguments)
    translator.expect_sources()
    _write(arguments, Translating(translator, search, arguments.batch_tokens, arguments.strict))


def _generate(arguments: argparse.Namespace) -> None:
    from tfm_blocks.translation.stream import Generating

    _expect_streams("tfm generate RUN")
    search = search_of(arguments, nbest=arguments.nbest, sampling=sampling_of(arguments))
    translator = translator_of(arguments)
    _write(arguments, Generating(translator, search, arguments.batch_tokens, arguments.strict, tokens=arguments.tokens))


def _write(arguments: argparse.Namespace, work: Translating) -> None:
    from tfm_blocks.launch.memory import keep_freed_memory
    from tfm_blocks.report.screen import counting
    from tfm_blocks.translation.stream import chunks, stream, typed

    keep_freed_memory()
    source = typed() if sys.stdin.isatty() else chunks(sys.stdin.buffer, "stdin", strict=arguments.strict)
    with counting("lines") as tell, precision_of(arguments):
        stream(work, source, sys.stdout, prefix=arguments.prefix, scores=arguments.scores, tell=tell)


def _expect_streams(command: str) -> None:
    for name, one in (("stdin", sys.stdin), ("stdout", sys.stdout)):
        if one is None:
            raise DataError(Problem(name, "is closed", help=f"echo 'your text' | {command}"))
