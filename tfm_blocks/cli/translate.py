"""Commands that write text: translate and generate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli import options
from tfm_blocks.errors import ConfigError, DataError, Problem
from tfm_blocks.translation.settings import MOST_TOKENS

if TYPE_CHECKING:
    from tfm_blocks.translation.stream import Translating


def add_commands(commands: options.Commands) -> None:
    """Add the parsers of `tfm translate` and `tfm generate`."""
    what = "translate stdin to stdout, line by line; tabs separate the sources of a line"
    command = _add(commands, "translate", _translate, "translate lines", what)
    command.add_argument("--prefix", type=Path, metavar="FILE", help="the beginnings of the translations, line by line")
    what = "continue each prompt, one per line of stdin, and print both"
    command = _add(commands, "generate", _generate, "continue prompts", what)
    what = "maximum number of tokens to generate before eos (64)"
    command.add_argument("--tokens", type=options.count, default=64, metavar="N", help=what)


def _add(
    commands: options.Commands, name: str, run: Callable[[argparse.Namespace], None], help: str, about: str
) -> argparse.ArgumentParser:
    command = options.add_command(commands, name, run, help, about)
    command.set_defaults(prefix=None, data=True)
    options.add_run(command)
    options.add_checkpoint(command)
    options.add_search(command)
    options.add_generation(command)
    return command


def _translate(arguments: argparse.Namespace) -> None:
    from tfm_blocks.translation.stream import Translating

    _expect_streams("tfm translate RUN")
    search = options.search_of(arguments, nbest=arguments.nbest, sampling=options.sampling_of(arguments))
    translator = options.translator_of(arguments)
    translator.expect_sources()
    _write(arguments, Translating(translator, search, arguments.batch_tokens, arguments.strict))


def _generate(arguments: argparse.Namespace) -> None:
    from tfm_blocks.translation.stream import Generating

    _expect_streams("tfm generate RUN")
    if arguments.tokens > MOST_TOKENS:
        rule = f"must be at most {MOST_TOKENS:,}, but is {arguments.tokens:,}"
        raise ConfigError(Problem("--tokens", rule, help="--tokens 64"))
    search = options.search_of(arguments, nbest=arguments.nbest, sampling=options.sampling_of(arguments))
    translator = options.translator_of(arguments)
    _write(arguments, Generating(translator, search, arguments.batch_tokens, arguments.strict, tokens=arguments.tokens))


def _write(arguments: argparse.Namespace, work: Translating) -> None:
    from tfm_blocks.launch.process_settings import keep_freed_memory
    from tfm_blocks.report.screen import counting
    from tfm_blocks.translation.stream import chunks, stream, typed

    keep_freed_memory()
    source = typed() if sys.stdin.isatty() else chunks(sys.stdin.buffer, "stdin", strict=arguments.strict)
    with counting("lines") as tell, options.precision_of(arguments, work.translator.network):
        stream(work, source, sys.stdout, prefix=arguments.prefix, scores=arguments.scores, tell=tell)
    work.translator.warn_of_unknown()


def _expect_streams(command: str) -> None:
    for name, one in (("stdin", sys.stdin), ("stdout", sys.stdout)):
        if one is None:
            raise DataError(Problem(name, "is closed", help=f"echo 'your text' | {command}"))
