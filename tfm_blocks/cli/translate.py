"""Commands that read lines of text with a run: translate, generate, fill, classify, embed and serve."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm_blocks.cli import options
from tfm_blocks.errors import DataError, Problem, config_error, print_line
from tfm_blocks.launch.process_settings import keep_freed_memory
from tfm_blocks.serving import Limits
from tfm_blocks.translation.settings import MOST_TOKENS

if TYPE_CHECKING:
    from tfm_blocks.network.graph import Network
    from tfm_blocks.translation.stream import Translating


def add_commands(commands: options.Commands) -> None:
    """Add the parsers of these commands."""
    what = "translate stdin to stdout, line by line; tabs separate the sources of a line"
    command = _add(commands, "translate", _translate, "translate lines", what)
    what = "the beginnings of the translations, line by line; if the run has a target_tag, begin each line with it"
    command.add("--prefix", what, type=Path, metavar="FILE")
    what = "continue each prompt, one per line of stdin, and print both"
    command = _add(commands, "generate", _generate, "continue prompts", what, limited="a prompt")
    what = "maximum number of tokens to generate before eos (64)"
    command.add("--tokens", what, type=options.count, default=64, metavar="N")
    what = "replace each <mask> in the lines of stdin by the most probable token; tabs separate sources from the target"
    command = options.add_command(commands, "fill", _fill, "fill in hidden tokens", what, ["folder", "--checkpoint"])
    command.set_defaults(data=True, text=None)
    what = "print a JSON object for each line, with the K most probable tokens of each <mask>"
    command.add("--top", what, type=options.count, metavar="K")
    what = "fill the masks of a line in N steps, the most probable tokens first (1: each on its own)"
    command.add("--steps", what, type=options.count, default=1, metavar="N")
    command.add_flag("--strict", "fail on a line that is not UTF-8")
    options.add_computing(command)
    what = "print the label of each line of a file or of stdin, with a run of objective=label"
    classify = options.add_command(commands, "classify", _classify, "predict labels", what)
    classify.add_flag("--scores", "print a JSON object with the probability of each class")
    what = "print the vector of each line of a file or of stdin as JSON, with a run of an encoder"
    embed = options.add_command(commands, "embed", _embed, "compute vectors of texts", what)
    what = "vector of a text: the mean of its positions, or its first position (%(default)s)"
    embed.add("--pooling", what, choices=("mean", "first"), default="mean")
    embed.add_argument("-o", "--output", type=Path, metavar="FILE.npy", help="write all vectors as an array instead")
    for one in (classify, embed):
        one.set_defaults(data=True)
        one.add_shared("folder")
        one.add("text", "lines of text (stdin)", nargs="?", type=Path, metavar="FILE")
        one.add_shared("--checkpoint")
        one.add_flag("--strict", "fail on a line that is not UTF-8")
        options.add_computing(one)
    _add_serve(commands)


def _lines_of_stdin(arguments: Namespace) -> Iterator[list[str]]:
    """Return chunks of the lines of stdin; on a terminal, each line as it is typed."""
    from tfm_blocks.translation.stream import chunks, typed

    return typed() if sys.stdin.isatty() else chunks(sys.stdin.buffer, "stdin", strict=arguments.strict)


def _outputs(arguments: Namespace, command: str, network: Network, read: Callable[..., Iterable[Any]]) -> Iterator[Any]:
    """Yield the output of `read` for each line of the file, or of stdin, and flush stdout after each chunk.

    Raises DataError.
    """
    from tfm_blocks.translation.stream import chunks

    _expect_streams(command, reads_stdin=arguments.text is None)
    first, path = 1, arguments.text
    try:
        opened = path.open("rb") if path else nullcontext()
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise DataError(Problem(str(path), rule, help="name a file with lines of text")) from None
    with options.precision_of(arguments, network), opened as file:
        for lines in chunks(file, str(path), strict=arguments.strict) if file else _lines_of_stdin(arguments):
            yield from read(lines, first=first, name=str(path or "stdin"), batch_tokens=arguments.batch_tokens)
            sys.stdout.flush()
            first += len(lines)


def _classify(arguments: Namespace) -> None:
    from tfm_blocks.translation.classify import Classifier

    classifier = Classifier.load(arguments.folder, **options.loading_of(arguments))
    for one in _outputs(arguments, "tfm classify RUN", classifier.network, classifier.classify):
        print(json.dumps(one.to_json(classifier.coder), ensure_ascii=False) if arguments.scores else one.label)


def _embed(arguments: Namespace) -> None:
    import numpy as np

    from tfm_blocks.runs.files import write_bytes
    from tfm_blocks.translation.encoder import Encoder

    if path := arguments.output:
        options.expect_file(path, "vectors.npy")
    encoder = Encoder.load(arguments.folder, **options.loading_of(arguments))
    embed = partial(encoder.embed, pooling=arguments.pooling)
    vectors = _outputs(arguments, "tfm embed RUN", encoder.network, embed)
    if path:
        kept = [x_D.numpy() for x_D in vectors]
        array = BytesIO()
        np.save(array, np.stack(kept) if kept else np.zeros((0, 0), np.float32))
        write_bytes(path, array.getvalue())
        print_line(f"{path}: {len(kept):,} vectors")
    else:
        for x_D in vectors:
            print(json.dumps(x_D.tolist()))


def _fill(arguments: Namespace) -> None:
    from tfm_blocks.translation.fill import Filler

    filler = Filler.load(arguments.folder, **options.loading_of(arguments))
    fill = partial(filler.fill, top=arguments.top or 1, steps=arguments.steps)
    for filled in _outputs(arguments, "tfm fill RUN", filler.network, fill):
        print(json.dumps(filled.to_json(), ensure_ascii=False) if arguments.top else filled.text)


def _add(
    commands: options.Commands, name: str, run: Callable[[Namespace], None], help: str, about: str, **search: str
) -> options.Command:
    command = options.add_command(commands, name, run, help, about, ["folder", "--checkpoint"])
    command.set_defaults(prefix=None, data=True)
    options.add_search(command, **search)
    options.add_generation(command)
    return command


def _translate(arguments: Namespace) -> None:
    from tfm_blocks.translation.stream import Translating

    _expect_streams("tfm translate RUN")
    search = options.search_of(arguments, nbest=arguments.nbest, sampling=options.sampling_of(arguments))
    translator = options.translator_of(arguments)
    translator.expect_sources()
    _write(arguments, Translating(translator, search, arguments.batch_tokens, arguments.strict))


def _generate(arguments: Namespace) -> None:
    from tfm_blocks.translation.stream import Generating

    _expect_streams("tfm generate RUN")
    if arguments.tokens > MOST_TOKENS:
        raise config_error("--tokens", f"must be at most {MOST_TOKENS:,}, but is {arguments.tokens:,}", "--tokens 64")
    search = options.search_of(arguments, nbest=arguments.nbest, sampling=options.sampling_of(arguments))
    translator = options.translator_of(arguments)
    _write(arguments, Generating(translator, search, arguments.batch_tokens, arguments.strict, tokens=arguments.tokens))


def _write(arguments: Namespace, work: Translating) -> None:
    from tfm_blocks.report.screen import counting
    from tfm_blocks.translation.stream import stream

    keep_freed_memory()
    with counting() as tell, options.precision_of(arguments, work.translator.network):
        lines = _lines_of_stdin(arguments)
        stream(work, lines, sys.stdout, prefix=arguments.prefix, scores=arguments.scores, tell=tell)
    work.translator.warn_of_unknown()


def _expect_streams(command: str, *, reads_stdin: bool = True) -> None:
    streams = {"stdin": sys.stdin, "stdout": sys.stdout} if reads_stdin else {"stdout": sys.stdout}
    for name, stream in streams.items():
        if stream is None:
            raise DataError(Problem(name, "is closed", help=f"echo 'your text' | {command}"))


def _add_serve(commands: options.Commands) -> None:
    what = "serve a run over HTTP: POST /translate, /generate, /classify, /embed and /fill, GET /health and /metrics"
    shared = ["folder", "--checkpoint"]
    command = options.add_command(commands, "serve", _serve, "serve a run over HTTP", what, shared)
    add = command.add
    add("--host", "address to listen on; 0.0.0.0: all addresses (%(default)s)", default="127.0.0.1")
    add("--port", "port to listen on; 0: a free one (%(default)s)", type=int, default=8000, metavar="N")
    for name, metavar, what in (
        ("requests", "N", "maximum number of waiting and running requests; others get status 429"),
        ("bytes", "N", "maximum number of bytes of a request; larger requests get status 413"),
        ("texts", "N", "maximum number of texts of a request; more get status 413"),
        ("tokens", "N", "maximum number of tokens of a text, and of its output; longer texts get status 413"),
        ("beam", "K", "largest beam"),
    ):
        default, what = getattr(Limits, name), f"{what} (%(default)s)"
        add(f"--max-{name}", what, type=options.count, default=default, metavar=metavar)
    what = "milliseconds to wait for further requests before a batch starts (5)"
    add("--wait", what, type=float, default=1000 * Limits.wait, metavar="MS")
    options.add_computing(command)


def _serve(arguments: Namespace) -> None:
    from tfm_blocks.translation.classify import load_any
    from tfm_blocks.translation.encoder import Encoder

    try:
        from tfm_blocks.serving.batcher import Batcher, Metrics
        from tfm_blocks.serving.readers import TextReader
        from tfm_blocks.serving.server import listen, run_server, within_file_limit
    except ModuleNotFoundError as error:
        help = "pip install -c constraints.txt -e '.[serve]'"
        raise config_error("tfm serve", f"needs {error.name}, which is not installed", help) from None

    keep_freed_memory()
    loaded = load_any(arguments.folder, **options.loading_of(arguments))
    model = TextReader(loaded) if isinstance(loaded, Encoder) else loaded
    if not 0 <= arguments.wait <= 1000:
        raise config_error("--wait", f"must be from 0 to 1000, but is {arguments.wait:g}", "--wait 5")
    named = {name: vars(arguments)[f"max_{name}"] for name in ("requests", "bytes", "texts", "tokens", "beam")}
    limits = Limits(**named, wait=arguments.wait / 1000, batch_tokens=arguments.batch_tokens)
    precision, limits = options.precision_of(arguments, model.network), within_file_limit(limits)
    with listen(arguments.host, arguments.port) as server_socket:  # raises before the batcher has started its thread
        run_server(Batcher(model, limits, Metrics(), lambda: precision), server_socket, arguments.host)
