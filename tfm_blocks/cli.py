"""The command `tfm`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.errors import ConfigError, DataError, Problem, TfmError

if TYPE_CHECKING:
    from tfm_blocks.compose.resolve import Composed
    from tfm_blocks.translation.translator import Search


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
    _add_translate(
        commands.add_parser("translate", help="translate lines", description="stdin to stdout, line by line")
    )
    evaluate = commands.add_parser(
        "evaluate", help="score a run", description="BLEU, chrF and TER of a run's translations"
    )
    _add_evaluate(evaluate)
    average = commands.add_parser(
        "average", help="average a run's last weights", description="a new run folder beside it"
    )
    average.add_argument("folder", type=Path, metavar="RUN", help="a run folder, such as runs/NAME")
    average.add_argument("--last", type=_count, default=5, metavar="K", help="of how many validations (5)")
    average.set_defaults(run=_average, plugins=[])
    return parser


def _add_translate(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, metavar="RUN", help="a run folder, such as runs/NAME")
    _add_search(command)
    command.add_argument("--nbest", type=_count, default=1, metavar="K", help="print the K best: line, score, text (1)")
    command.add_argument("--sample", action="store_true", help="draw tokens instead of searching")
    command.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of --sample (1)")
    command.add_argument("--top-k", type=int, default=0, metavar="K", help="of --sample: of the K likeliest (0: all)")
    command.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of --sample: of the share P (1)")
    command.add_argument("--seed", type=int, default=1, help="of --sample (1)")
    command.add_argument("--prefix", type=Path, metavar="FILE", help="how each translation begins, line by line")
    command.add_argument("--scores", action="store_true", help="print the score before the text")
    command.add_argument("--strict", action="store_true", help="refuse a line of more tokens rather than cut it")
    command.set_defaults(run=_translate)


def _add_evaluate(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, metavar="RUN", help="a run folder, such as runs/NAME")
    command.add_argument("--src", type=Path, required=True, metavar="FILE", help="text to translate, plain or .gz")
    command.add_argument("--ref", type=Path, required=True, metavar="FILE", help="its translation, line by line")
    command.add_argument("--against", type=Path, metavar="RUN2", help="another run, for the paired bootstrap test")
    command.add_argument("--tokenised", action="store_true", help="also BLEU of tokenised text in lower case")
    command.add_argument("--bleu", default="13a", metavar="TOKENIZER", help="of sacreBLEU (13a)")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_search(command)
    command.set_defaults(run=_evaluate)


def _add_search(command: argparse.ArgumentParser) -> None:
    command.add_argument("--beam", type=_count, default=1, metavar="K", help="hypotheses a sentence; 1: greedy (1)")
    command.add_argument("--alpha", type=float, default=0.6, help="exponent of the length penalty (0.6)")
    command.add_argument("--penalty", choices=("gnmt", "plain"), default="gnmt", help="((5+n)/6)^alpha, n^alpha (gnmt)")
    command.add_argument("--max-tokens", type=_count, default=1024, metavar="N", help="of a line, and its translation")
    command.add_argument("--batch-tokens", type=_count, default=4096, metavar="N", help="tokens at a time (4096)")
    command.add_argument("--device", default="cpu", help="cpu, cuda, … (cpu)")
    command.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the computation (fp32)")
    _add_plugins(command)


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
    from tfm_blocks.report.screen import counting
    from tfm_blocks.translation.stream import Stream
    from tfm_blocks.translation.translator import Translator

    if sys.stdin is None:
        raise DataError(Problem("stdin", "is closed", help="echo 'your text' | tfm translate RUN"))
    search = _search(arguments, nbest=arguments.nbest, sample=arguments.sample)
    translator = Translator.load(arguments.folder, device=arguments.device, plugins=arguments.plugins)
    settings = {name: vars(arguments)[name] for name in ("batch_tokens", "max_tokens", "strict", "scores")}
    stream = Stream(translator=translator, search=search, **settings)
    with counting("lines") as tell, _precision(arguments):
        stream.run(sys.stdin.buffer, sys.stdout, arguments.prefix, tell)


def _search(arguments: argparse.Namespace, *, nbest: int = 1, sample: bool = False) -> Search:
    from tfm_blocks.translation.sampling import Sampling
    from tfm_blocks.translation.translator import Search

    given = vars(arguments)
    try:
        draw = Sampling(**{name: given[name] for name in ("temperature", "top_k", "top_p", "seed")}) if sample else None
        asked = {name: given[name] for name in ("beam", "alpha", "penalty")}
        return Search(**asked, nbest=nbest, cap=arguments.max_tokens, sampling=draw)
    except ValueError as error:
        raise ConfigError(Problem("", str(error), help="tfm translate --help tells what each option does")) from None


def _precision(arguments: argparse.Namespace) -> AbstractContextManager[object]:
    import torch

    return torch.autocast(torch.device(arguments.device).type, torch.bfloat16, enabled=arguments.precision == "bf16")


def _evaluate(arguments: argparse.Namespace) -> None:
    from tfm_blocks.data.text import read_lines
    from tfm_blocks.report.scores import print_json, show_scores
    from tfm_blocks.translation.evaluate import compare, metrics, score

    search = _search(arguments)
    sources, references = list(read_lines(arguments.src, "--src")), list(read_lines(arguments.ref, "--ref"))
    if len(sources) != len(references) or not sources:
        rule = f"needs as many lines as --src, and at least one: there are {len(references)} and {len(sources)}"
        raise DataError(Problem("--ref", rule, help="line N of --ref translates line N of --src"))
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
    from tfm_blocks.translation.translator import Translator

    translator = Translator.load(folder, device=arguments.device, plugins=arguments.plugins)
    with _precision(arguments):
        return [found[0].text for found in translator.search(sources, search, batch_tokens=arguments.batch_tokens)]


def _average(arguments: argparse.Namespace) -> None:
    from tfm_blocks.runs.average import average

    print(f"folder: {average(arguments.folder, arguments.last)}")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, but is {text!r}")
    return int(text)
