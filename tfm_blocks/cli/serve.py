"""The command `tfm serve`."""

from __future__ import annotations

import argparse

from tfm_blocks.cli import options
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.serving import Limits


def add_commands(commands: options.Commands) -> None:
    """Add the parser of this command."""
    what = "serve a run over HTTP: POST /translate, POST /generate, GET /health, GET /metrics"
    command = options.add_command(commands, "serve", _serve, "serve a run over HTTP", what)
    options.add_run(command)
    options.add_checkpoint(command)
    add = command.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all addresses (%(default)s)")
    add("--port", type=int, default=8000, metavar="N", help="port to listen on; 0: a free one (%(default)s)")
    what = "maximum number of waiting and running requests; others get status 429 (%(default)s)"
    add("--max-requests", type=options.count, default=Limits.requests, metavar="N", help=what)
    what = "maximum bytes of a request; above this limit and the next ones, the status is 413 (%(default)s)"
    add("--max-bytes", type=options.count, default=Limits.bytes, metavar="N", help=what)
    what = "maximum number of texts of a request (%(default)s)"
    add("--max-texts", type=options.count, default=Limits.texts, metavar="N", help=what)
    what = "maximum number of tokens of a text, and of its output (%(default)s)"
    add("--max-tokens", type=options.count, default=Limits.tokens, metavar="N", help=what)
    add("--max-beam", type=options.count, default=Limits.beam, metavar="K", help="largest beam (%(default)s)")
    what = "milliseconds to wait for further requests before a batch starts (5)"
    add("--wait", type=float, default=1000 * Limits.wait, metavar="MS", help=what)
    options.add_computing(command)


def _serve(arguments: argparse.Namespace) -> None:
    from tfm_blocks.launch.process_settings import keep_freed_memory

    try:
        from tfm_blocks.serving.batcher import Batcher, Metrics
        from tfm_blocks.serving.server import listen, run_server, within_file_limit
    except ModuleNotFoundError as error:
        help = "pip install -c constraints.txt -e '.[serve]'"
        raise ConfigError(Problem("tfm serve", f"needs {error.name}, which is not installed", help=help)) from None

    keep_freed_memory()
    translator = options.translator_of(arguments)
    precision, limits = options.precision_of(arguments, translator.network), within_file_limit(limits_of(arguments))
    with listen(arguments.host, arguments.port) as server_socket:  # raises before the batcher has started its thread
        run_server(Batcher(translator, limits, Metrics(), lambda: precision), server_socket)


def limits_of(arguments: argparse.Namespace) -> Limits:
    """Return the limits of the command line. Raises ConfigError."""
    if not 0 <= arguments.wait <= 1000:
        raise ConfigError(Problem("--wait", f"must be from 0 to 1000, but is {arguments.wait:g}", help="--wait 5"))
    named = {name: vars(arguments)[f"max_{name}"] for name in ("requests", "bytes", "texts", "tokens", "beam")}
    return Limits(**named, wait=arguments.wait / 1000, batch_tokens=arguments.batch_tokens)
