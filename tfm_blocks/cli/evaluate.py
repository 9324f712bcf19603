"""The command `tfm evaluate`: score translations or a text, and with --test the runs, which keep their scores."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tfm_blocks.cli import options
from tfm_blocks.cli.saved_scores import SEARCH, refuse, score_runs, translate_rows
from tfm_blocks.errors import DataError, Problem, config_error, counted
from tfm_blocks.translation.settings import BleuTokenizer, Search

if TYPE_CHECKING:
    from tfm_blocks.network.graph import Network

UNUSED = {  # options without effect in each mode, and the reason
    "test": (
        "--test scores the final weights on one test set",
        ("src", "ref", "text", "against", "checkpoint", "context"),
    ),
    "text": ("--text computes a perplexity without a search", ("src", "ref", "against", "bleu", "tokenised", *SEARCH)),
    "src": ("--src and --ref score translations", ("context",)),
}


def add_commands(commands: options.Commands) -> None:
    """Add the parser of `tfm evaluate`."""
    what = "compute BLEU, chrF and TER of translations, or the perplexity of a text"
    command = options.add_command(commands, "evaluate", _evaluate, "score a run", what)
    what = "a run folder, such as runs/NAME; with --test also the folder of a sweep"
    command.add("folder", what, type=Path, metavar="RUN")
    command.add_shared("--checkpoint")
    what = "text to translate, plain, .gz or .zst; one file for each source of the model"
    command.add("--src", what, type=Path, nargs="+", metavar="FILE")
    command.add("--ref", "its translation, line by line", type=Path, metavar="FILE")
    what = "score the run's own test set, or tab-separated sources and references, and keep the scores in the run; "
    what += "for an encoder, its test set or a text, by the pseudo-perplexity"
    command.add("--test", what, type=Path, nargs="?", const=Path(), metavar="FILE")
    what = "text whose perplexity is computed, in the format of the training text"
    command.add("--text", what, type=Path, metavar="FILE")
    what = "with --text: context length in tokens (as in training, else 512 or the model's positions)"
    command.add("--context", what, type=options.count, metavar="N")
    command.add("--against", "another run, to test the differences", type=Path, metavar="RUN2")
    command.add_flag("--tokenised", "also compute BLEU of lower-cased, tokenised text")
    command.add("--bleu", "sacreBLEU's tokenizer (13a)", choices=get_args(BleuTokenizer), default="13a")
    command.add_shared("--json")
    options.add_search(command)
    command.set_defaults(default_of=command.get_default)


def _evaluate(arguments: Namespace) -> None:
    from tfm_blocks.launch.process_settings import keep_freed_memory

    keep_freed_memory()
    mode = next((mode for mode in UNUSED if getattr(arguments, mode) is not None), "src")  # the first of several
    refuse(arguments, *UNUSED[mode])
    if arguments.test is not None:
        score_runs(arguments)
        return
    if arguments.text is None and arguments.src is None and arguments.ref is None:
        rule = "needs --src and --ref, or --text or --test alone"
        raise config_error("evaluate", rule, "--src FILE --ref FILE scores translations")
    if arguments.text:
        _evaluate_text(arguments)
    elif arguments.src is None or arguments.ref is None:
        raise config_error("evaluate", "needs both --src and --ref", "--src FILE --ref FILE")
    else:
        _evaluate_translations(arguments)


def _evaluate_text(arguments: Namespace) -> None:
    from tfm_blocks.data.documents import read_in_format_of
    from tfm_blocks.language.spec import TARGET, names
    from tfm_blocks.report.lists import show_perplexity
    from tfm_blocks.runs.model import read_spec
    from tfm_blocks.runs.saved_run import SavedRun
    from tfm_blocks.scoring.perplexity import perplexity, pseudo_perplexity
    from tfm_blocks.translation.fill import Filler

    run, spec = SavedRun(arguments.folder), read_spec(arguments.folder, arguments.plugins)
    trained = run.settings.get("data.context")
    documents = read_in_format_of(run.config, arguments.text, "--text")
    if TARGET not in names(spec.inputs):
        filler = Filler.load(arguments.folder, **options.loading_of(arguments))
        context = _context(arguments, filler.network, filler.input, trained)
        with options.precision_of(arguments, filler.network):
            result = pseudo_perplexity(filler, documents, context=context, batch_tokens=arguments.batch_tokens)
    else:
        translator = options.translator_of(arguments)
        context = _context(arguments, translator.network, TARGET, trained)
        with options.precision_of(arguments, translator.network):
            sizes = {"context": context, "batch_tokens": arguments.batch_tokens}
            inside = bool(run.settings.get("data.inside_documents"))
            result = perplexity(translator, documents, **sizes, inside=inside)
        translator.warn_of_unknown()
    show_perplexity(result, str(arguments.folder), as_json=arguments.json)


def _context(arguments: Namespace, network: Network, input: str, trained: object) -> int:
    """Return the context length, at most the model's positions. Raises ConfigError for a longer --context."""
    from tfm_blocks.scoring.perplexity import usual_context

    longest = network.longest(input).tokens
    if arguments.context and arguments.context > longest:
        rule = f"must be at most {longest}, the model's positions, but is {arguments.context}"
        raise config_error("--context", rule, f"--context {longest}")
    return arguments.context or usual_context(trained, longest)


def _evaluate_translations(arguments: Namespace) -> None:
    from tfm_blocks.data.files import read_lines
    from tfm_blocks.report.lists import show_scores
    from tfm_blocks.scoring.corpus import metrics, score

    search = options.search_of(arguments)
    columns = [list(read_lines(path, "--src")) for path in arguments.src]
    references = list(read_lines(arguments.ref, "--ref"))
    counts = [len(column) for column in columns]
    if any(length != len(references) for length in counts) or not references:
        listed = " and ".join(map(str, counts))
        rule = f"needs the same number of lines as --src, at least one: they have {len(references)} and {listed}"
        raise DataError(Problem("--ref", rule, help="line N of --ref translates line N of --src"))
    if arguments.against and arguments.against.resolve() == arguments.folder.resolve():
        rule = f"must be a different run from {arguments.folder}, or there is nothing to compare"
        raise config_error("--against", rule, "leave it out")
    scorers = metrics(arguments.bleu, tokenised=arguments.tokenised)
    rows = list(zip(*columns, strict=True))
    outputs = _outputs(arguments, arguments.folder, rows, search)
    if arguments.against:
        from tfm_blocks.scoring.paired_test import compare

        before, after = compare(_outputs(arguments, arguments.against, rows, search), outputs, references, scorers)
        systems = {str(arguments.against): before, str(arguments.folder): after}
    else:
        systems = {str(arguments.folder): score(outputs, references, scorers)}
    show_scores(systems, dict.fromkeys(systems, len(rows)), as_json=arguments.json)


def _outputs(arguments: Namespace, folder: Path, rows: Sequence[tuple[str, ...]], search: Search) -> list[str]:
    translator = options.translator_of(arguments, None if folder == arguments.folder else folder)
    translator.expect_sources()
    if len(arguments.src) != len(translator.sources):
        rule = f"names {counted(len(arguments.src), 'file')}, but {folder} reads {', '.join(translator.sources)}"
        raise config_error("--src", rule, "name a file for each of them, in this order")
    return translate_rows(arguments, translator, rows, search, arguments.src[0])
