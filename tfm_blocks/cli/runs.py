"""Commands on run folders: translate, evaluate, attention, average."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tfm_blocks.cli.options import add_plugins, add_run, add_search, count
from tfm_blocks.errors import ConfigError, DataError, Problem
from tfm_blocks.translation.settings import BleuTokenizer, Sampling, Search

if TYPE_CHECKING:
    from tfm_blocks.cli.options import Commands


def add_commands(commands: Commands) -> None:
    """The parsers of these commands."""
    _add_translate(commands)
    _add_evaluate(commands)
    _add_attention(commands)
    command = commands.add_parser("average", help="average a run's last weights", description="into a folder beside it")
    add_run(command)
    command.add_argument("--last", type=count, default=5, metavar="K", help="of how many validations (5)")
    command.set_defaults(run=_average, plugins=[])


def _add_attention(commands: Commands) -> None:
    what = "every layer and head, of at most 64 tokens a side"
    command = commands.add_parser("attention", help="picture what a model looks at", description=what)
    add_run(command)
    command.add_argument("sentence", metavar="SENTENCE", help="what is translated")
    command.add_argument("-o", type=Path, required=True, dest="path", metavar="FILE", help="out.html or out.png")
    command.add_argument("--target", metavar="TEXT", help="its translation, in place of the model's own")
    command.add_argument("--device", default="cpu", help="cpu, cuda, … (cpu)")
    add_plugins(command)
    command.set_defaults(run=_attention)


def _add_translate(commands: Commands) -> None:
    command = commands.add_parser("translate", help="translate lines", description="stdin to stdout, line by line")
    add_run(command)
    add_search(command)
    command.add_argument(
        "--nbest", type=count, default=Search.nbest, metavar="K", help="print the K best: line, score, text (1)"
    )
    command.add_argument("--sample", action="store_true", help="draw tokens instead of searching")
    command.add_argument("--temperature", type=float, metavar="T", help="of --sample (1)")
    command.add_argument("--top-k", type=int, metavar="K", help="of --sample: of the K likeliest (0: all)")
    command.add_argument("--top-p", type=float, metavar="P", help="of --sample: of the share P (1)")
    command.add_argument("--seed", type=int, help="of --sample (1)")
    command.add_argument("--prefix", type=Path, metavar="FILE", help="how each translation begins, line by line")
    command.add_argument(
        "--scores", action="store_true", help="print the score before the text: log probability over length penalty"
    )
    command.set_defaults(run=_translate)


def _add_evaluate(commands: Commands) -> None:
    command = commands.add_parser("evaluate", help="score a run", description="BLEU, chrF and TER of translations")
    add_run(command)
    command.add_argument("--src", type=Path, required=True, metavar="FILE", help="text to translate, plain or .gz")
    command.add_argument("--ref", type=Path, required=True, metavar="FILE", help="its translation, line by line")
    command.add_argument("--against", type=Path, metavar="RUN2", help="another run, for the paired bootstrap test")
    command.add_argument("--tokenised", action="store_true", help="also BLEU of tokenised text in lower case")
    command.add_argument("--bleu", choices=get_args(BleuTokenizer), default="13a", help="sacreBLEU's tokenizer (13a)")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_search(command)
    command.set_defaults(run=_evaluate)


def _translate(arguments: argparse.Namespace) -> None:
    from tfm_blocks.network.memory import keep_freed_memory
    from tfm_blocks.report.screen import counting
    from tfm_blocks.translation.stream import Stream, chunks, typed
    from tfm_blocks.translation.translator import Translator

    for name, stream in (("stdin", sys.stdin), ("stdout", sys.stdout)):
        if stream is None:
            raise DataError(Problem(name, "is closed", help="echo 'your text' | tfm translate RUN"))
    keep_freed_memory()
    search = _search(arguments, nbest=arguments.nbest, sampling=_sampling(arguments))
    translator = Translator.load(arguments.folder, device=arguments.device, plugins=arguments.plugins)
    settings = {name: vars(arguments)[name] for name in ("batch_tokens", "strict", "scores")}
    lines = Stream(translator=translator, search=search, **settings)
    source = typed() if sys.stdin.isatty() else chunks(sys.stdin.buffer, "stdin")
    with counting("lines") as tell, _precision(arguments):
        lines.run(source, sys.stdout, arguments.prefix, tell)


def _search(arguments: argparse.Namespace, *, nbest: int = 1, sampling: Sampling | None = None) -> Search:
    names = ("beam", "alpha", "penalty", "coverage", "max_tokens")
    try:
        return Search(**{name: vars(arguments)[name] for name in names}, nbest=nbest, sampling=sampling)
    except ValueError as error:
        raise ConfigError(Problem("", str(error), help="--help tells what each option does")) from None


def _sampling(arguments: argparse.Namespace) -> Sampling | None:
    given = {name: vars(arguments)[name] for name in ("temperature", "top_k", "top_p", "seed")}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not arguments.sample:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(Problem("", f"{options}: nothing is drawn without --sample", help="add --sample"))
    try:
        return Sampling(**given) if arguments.sample else None
    except ValueError as error:
        raise ConfigError(Problem("", str(error), help="--help tells what each option does")) from None


def _precision(arguments: argparse.Namespace) -> AbstractContextManager[object]:
    import torch

    return torch.autocast(torch.device(arguments.device).type, torch.bfloat16, enabled=arguments.precision == "bf16")


def _evaluate(arguments: argparse.Namespace) -> None:
    from tfm_blocks.data.text import read_lines
    from tfm_blocks.network.memory import keep_freed_memory
    from tfm_blocks.report.scores import print_json, show_scores
    from tfm_blocks.translation.evaluate import compare, metrics, score

    keep_freed_memory()
    search = _search(arguments)
    sources, references = list(read_lines(arguments.src, "--src")), list(read_lines(arguments.ref, "--ref"))
    if len(sources) != len(references) or not sources:
        rule = f"needs as many lines as --src, and at least one: there are {len(references)} and {len(sources)}"
        raise DataError(Problem("--ref", rule, help="line N of --ref translates line N of --src"))
    if arguments.against and arguments.against.resolve() == arguments.folder.resolve():
        rule = f"must be another run than {arguments.folder}, or there is nothing to compare"
        raise ConfigError(Problem("--against", rule, help="leave it out"))
    asked = metrics(arguments.bleu, tokenised=arguments.tokenised)
    outputs = _outputs(arguments, arguments.folder, sources, search)
    if arguments.against:
        baseline = _outputs(arguments, arguments.against, sources, search)
        before, after = compare(baseline, outputs, references, asked)
        systems = {str(arguments.against): before, str(arguments.folder): after}
    else:
        systems = {str(arguments.folder): score(outputs, references, asked)}
    (print_json if arguments.json else show_scores)(systems, len(sources))


def _outputs(arguments: argparse.Namespace, folder: Path, sources: Sequence[str], search: Search) -> list[str]:
    from tfm_blocks.translation.stream import fitting
    from tfm_blocks.translation.translator import Translator

    translator = Translator.load(folder, device=arguments.device, plugins=arguments.plugins)
    lines = fitting(sources, translator.tokenizer, search, str(arguments.src), strict=arguments.strict)
    with _precision(arguments):
        return [found[0].text for found in translator.search(lines, search, batch_tokens=arguments.batch_tokens)]


def _attention(arguments: argparse.Namespace) -> None:
    from tfm_blocks.report.attention import check_path, save_attention
    from tfm_blocks.translation.attention import attention_of
    from tfm_blocks.translation.translator import Translator

    check_path(arguments.path)
    translator = Translator.load(arguments.folder, device=arguments.device, plugins=arguments.plugins)
    attention = attention_of(translator, arguments.sentence, arguments.target)
    for warning in save_attention(attention, arguments.path):
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{attention.target}\n{arguments.path}")


def _average(arguments: argparse.Namespace) -> None:
    from tfm_blocks.runs.average import average

    print(f"folder: {average(arguments.folder, arguments.last)}")
