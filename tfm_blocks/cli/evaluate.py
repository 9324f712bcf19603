"""The command `tfm evaluate`: score translations or a text, and with --test the runs, which keep their scores."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tfm_blocks.cli import options
from tfm_blocks.errors import ConfigError, DataError, Place, Problem, RunError, TfmError, printable
from tfm_blocks.translation.settings import BleuTokenizer, Search

if TYPE_CHECKING:
    from tfm_blocks.runs.records import Score
    from tfm_blocks.translation.translator import Translator

Row = tuple[str, ...]  # the source texts, then the reference

SEARCH = ("beam", "patient", "alpha", "penalty", "coverage", "max_tokens", "strict")
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
    command.add_argument("folder", type=Path, metavar="RUN", help=what)
    options.add_shared(command, "--checkpoint")
    what = "text to translate, plain, .gz or .zst; one file for each source of the model"
    command.add_argument("--src", type=Path, nargs="+", metavar="FILE", help=what)
    command.add_argument("--ref", type=Path, metavar="FILE", help="its translation, line by line")
    what = "score the run's own test set, or tab-separated sources and references, and keep the scores in the run"
    command.add_argument("--test", type=Path, nargs="?", const=Path(), metavar="FILE", help=what)
    what = "text whose perplexity is computed, in the format of the training text"
    command.add_argument("--text", type=Path, metavar="FILE", help=what)
    what = "with --text: context length in tokens (as in training, else 512 or the model's positions)"
    command.add_argument("--context", type=options.count, metavar="N", help=what)
    command.add_argument("--against", type=Path, metavar="RUN2", help="another run, to test the differences")
    command.add_argument("--tokenised", action="store_true", help="also compute BLEU of lower-cased, tokenised text")
    command.add_argument("--bleu", choices=get_args(BleuTokenizer), default="13a", help="sacreBLEU's tokenizer (13a)")
    options.add_shared(command, "--json")
    options.add_search(command)
    command.set_defaults(default_of=command.get_default)


def _evaluate(arguments: argparse.Namespace) -> None:
    from tfm_blocks.launch.process_settings import keep_freed_memory

    keep_freed_memory()
    _refuse_other_modes(arguments)
    if arguments.test is not None:
        _evaluate_tests(arguments)
        return
    if arguments.text is None and arguments.src is None and arguments.ref is None:
        rule = "needs --src and --ref, or --text or --test alone"
        raise ConfigError(Problem("evaluate", rule, help="--src FILE --ref FILE scores translations"))
    if arguments.text:
        _evaluate_text(arguments)
    elif arguments.src is None or arguments.ref is None:
        raise ConfigError(Problem("evaluate", "needs both --src and --ref", help="--src FILE --ref FILE"))
    else:
        _evaluate_translations(arguments)


def _refuse_other_modes(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options without effect in the mode, the first of --test, --text and --src."""
    mode = next((mode for mode in UNUSED if getattr(arguments, mode) is not None), "src")
    reason, names = UNUSED[mode]
    for name in names:
        if getattr(arguments, name) != arguments.default_of(name):
            option = options.flag_of(name)
            raise ConfigError(Problem(option, f"{reason}, so it cannot be combined with {option}", help="leave it out"))


def _evaluate_text(arguments: argparse.Namespace) -> None:
    from tfm_blocks.data.documents import read_documents
    from tfm_blocks.language.spec import TARGET, names
    from tfm_blocks.report.lists import show_perplexity
    from tfm_blocks.runs.model import read_spec
    from tfm_blocks.runs.saved_run import SavedRun
    from tfm_blocks.scoring.perplexity import perplexity, pseudo_perplexity
    from tfm_blocks.translation.fill import Filler

    settings = SavedRun(arguments.folder).settings
    kind = str(settings.get("data.documents", "lines")), str(settings.get("data.text_key", "text"))
    documents = read_documents(arguments.text, "--text", *kind)
    if TARGET not in names(read_spec(arguments.folder, arguments.plugins).inputs):
        if arguments.context:
            rule = "has no effect, because an encoder reads whole documents"
            raise ConfigError(Problem("--context", rule, help="leave it out"))
        filler = Filler.load(arguments.folder, **options.loading_of(arguments))
        with options.precision_of(arguments, filler.network):
            result = pseudo_perplexity(filler, documents, batch_tokens=arguments.batch_tokens)
        show_perplexity(result, str(arguments.folder), as_json=arguments.json)
        return
    translator = options.translator_of(arguments)
    context = _context(arguments, translator, settings.get("data.context"))
    with options.precision_of(arguments, translator.network):
        result = perplexity(translator, documents, context=context, batch_tokens=arguments.batch_tokens)
    translator.warn_of_unknown()
    show_perplexity(result, str(arguments.folder), as_json=arguments.json)


def _context(arguments: argparse.Namespace, translator: Translator, trained: object) -> int:
    """Return the context length, at most the model's positions. Raises ConfigError for a longer --context."""
    from tfm_blocks.language.spec import TARGET
    from tfm_blocks.scoring.perplexity import DEFAULT_CONTEXT

    longest = translator.network.longest(TARGET).tokens
    if arguments.context and arguments.context > longest:
        rule = f"must be at most {longest}, the model's positions, but is {arguments.context}"
        raise ConfigError(Problem("--context", rule, help=f"--context {longest}"))
    return arguments.context or int(min((type(trained) is int and trained) or DEFAULT_CONTEXT, longest))


def _evaluate_translations(arguments: argparse.Namespace) -> None:
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
        raise ConfigError(Problem("--against", rule, help="leave it out"))
    scorers = metrics(arguments.bleu, tokenised=arguments.tokenised)
    rows = list(zip(*columns, strict=True))
    outputs = _outputs(arguments, arguments.folder, rows, search)
    if arguments.against:
        from tfm_blocks.scoring.paired_test import compare

        baseline = _outputs(arguments, arguments.against, rows, search)
        before, after = compare(baseline, outputs, references, scorers)
        systems = {str(arguments.against): before, str(arguments.folder): after}
    else:
        systems = {str(arguments.folder): score(outputs, references, scorers)}
    show_scores(systems, len(rows), as_json=arguments.json)


def _outputs(arguments: argparse.Namespace, folder: Path, rows: Sequence[tuple[str, ...]], search: Search) -> list[str]:
    translator = options.translator_of(arguments, None if folder == arguments.folder else folder)
    translator.expect_sources()
    if len(arguments.src) != len(translator.sources):
        rule = f"names {len(arguments.src)} files, but {folder} reads {', '.join(translator.sources)}"
        raise ConfigError(Problem("--src", rule, help="name a file for each of them, in this order"))
    return translate_rows(arguments, translator, rows, search, arguments.src[0])


def _evaluate_tests(arguments: argparse.Namespace) -> None:
    """Score every finished run below the folder, write the scores into the runs, and print them.

    Raises RunError for the runs that cannot be scored, after the others.
    """
    from tfm_blocks.runs.listing import find_runs

    search = options.search_of(arguments)
    name = _scores_name(arguments, search)
    runs = find_runs([arguments.folder])
    done = [run.folder for run in runs if run.state == "done"]
    if not done:
        rule = "contains no finished run, and only finished runs keep scores"
        raise RunError(Problem(str(arguments.folder), rule, help="tfm runs lists the states"))
    scored, problems = {}, []
    for folder in done:
        try:
            scored[str(folder)] = _evaluate_run(arguments, folder, name, search)
        except TfmError as error:
            for problem in error.problems:
                within = "" if problem.address.startswith(str(folder)) else f"{folder}: "
                problems.append(replace(problem, address=f"{within}{problem.address}".removesuffix(": ")))
    if scored:
        _show(arguments, name, scored, len(runs) - len(done))
    if problems:
        raise RunError(problems)


def _show(arguments: argparse.Namespace, name: str, scored: Mapping[str, tuple[list[Score], int]], rest: int) -> None:
    """Print the scores of each run and their name; `rest` runs are not done."""
    from tfm_blocks.report.lists import show_scores

    systems = {run: scores for run, (scores, _) in scored.items()}
    show_scores(systems, max(count for _, count in scored.values()), as_json=arguments.json)
    if not arguments.json:
        unfinished = f"; {rest} are not done" if rest else ""
        print(printable(f"saved as scores/{name} in {len(scored)} run{'s' * (len(scored) > 1)}{unfinished}"))
        print(printable(f"tfm compare {arguments.folder} --scores {name}"))


def _scores_name(arguments: argparse.Namespace, search: Search) -> str:
    """Return a name made of the settings that differ from their defaults, such as `beam4` or `beam4-alpha1-news`."""
    parts = [f"beam{search.beam}" if search.beam > 1 else "greedy"]
    default = Search(beam=search.beam)
    for key in ("patient", "alpha", "penalty", "coverage", "max_tokens"):
        if (value := getattr(search, key)) != getattr(default, key):
            parts.append(key if value is True else f"{key}{value:g}" if isinstance(value, float) else f"{key}{value}")
    parts += [value for value, usual in ((arguments.precision, "fp32"), (arguments.bleu, "13a")) if value != usual]
    parts += [Path(arguments.test.name.removesuffix(".gz")).stem] if arguments.test.name else []
    return re.sub(r"[^\w.-]+", "_", "-".join(parts))[:60]  # a character has up to 4 bytes, a folder name up to 255


def _evaluate_run(arguments: argparse.Namespace, folder: Path, name: str, search: Search) -> tuple[list[Score], int]:
    """Translate and score the test set of a run, and write both into its folder. Return the scores and row count.

    Raises RunError if the scores with this name are of another test set, which would be overwritten.
    """
    from tfm_blocks.runs.records import SavedScores, ScoredSet, Status, scores_folder
    from tfm_blocks.runs.row_results import TranslatedLine, hash_rows, write_saved_scores
    from tfm_blocks.scoring.corpus import metrics, score

    translator = options.translator_of(arguments, folder)
    translator.expect_sources()
    rows = _read_rows(arguments.test, translator) if arguments.test.name else _own_rows(folder, translator)
    columns = [str(number) for number in range(len(rows[0]))]
    digest = hash_rows((dict(zip(columns, row, strict=True)) for row in rows), columns)  # equal for the same text
    if SavedScores.read_or_empty(scores_folder(folder, name)).test_set.sha256 not in ("", digest):
        rule = "has the scores of another test set, and they are not overwritten"
        help = "rename the file of --test, or delete this folder"
        raise RunError(Problem(str(scores_folder(folder, name)), rule, help=help))
    where = arguments.test if arguments.test.name else folder
    outputs = translate_rows(arguments, translator, [row[:-1] for row in rows], search, where)
    scores = score(outputs, [row[-1] for row in rows], metrics(arguments.bleu, tokenised=arguments.tokenised))
    pairs = list(zip(rows, outputs, strict=True))
    settings = {key: value for key, value in asdict(search).items() if key not in ("nbest", "sampling")}
    saved = SavedScores(
        arguments.test.name,
        ScoredSet(len(rows), digest),
        {**settings, "precision": arguments.precision},
        Status.read(folder).steps,
        sum(output == row[-1] for row, output in pairs) / len(rows),
        tuple(scores),
    )
    write_saved_scores(folder, name, saved, [TranslatedLine(" | ".join(row[:-1]), out, row[-1]) for row, out in pairs])
    return scores, len(rows)


def translate_rows(
    arguments: argparse.Namespace, translator: Translator, rows: Sequence[Row], search: Search, where: Path
) -> list[str]:
    """Return the best output for the sources of each row; warnings name the rows by `where`."""
    from tfm_blocks.translation.stream import fitting

    fit = fitting(rows, translator, search, str(where), strict=arguments.strict)
    with options.precision_of(arguments, translator.network):
        nbest = translator.search(fit, search, batch_tokens=arguments.batch_tokens)
    translator.warn_of_unknown()
    return [best.text for best, *_ in nbest]


def _own_rows(folder: Path, translator: Translator) -> list[Row]:
    """Return the run's test set. Raises RunError for several sources, which its translations do not separate."""
    from tfm_blocks.runs.row_results import read_translations

    if len(translator.sources) > 1:
        rule = f"reads {', '.join(translator.sources)}, but its translations do not separate their texts"
        raise RunError(Problem(str(folder), rule, help="--test FILE with the texts and the reference, tab-separated"))
    return [(line.source, line.reference) for line in read_translations(folder)]


def _read_rows(path: Path, translator: Translator) -> list[Row]:
    """Return the tab-separated texts of each line. Raises DataError for another number of texts."""
    from tfm_blocks.data.files import read_lines

    rows = [tuple(line.split("\t")) for line in read_lines(path, "--test")]
    columns = [*translator.sources, "the reference"]
    wrong = next((number for number, row in enumerate(rows, 1) if len(row) != len(columns)), None)
    if wrong is not None or not rows:
        rule = f"each line needs {len(columns)} tab-separated texts ({', '.join(columns)})"
        rule += f", but line {wrong} has {len(rows[wrong - 1])}" if wrong else ", but there is no line"
        help = "paste test.src test.tgt > test.tsv"
        raise DataError(Problem("--test", rule, Place(str(path), wrong), help=help))
    return rows
