"""The command `tfm evaluate --test`: score finished runs, and keep the scores in their folders."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli import options
from tfm_blocks.errors import (
    DataError,
    Place,
    Problem,
    RunError,
    TfmError,
    config_error,
    counted,
    file_error,
    print_line,
)
from tfm_blocks.metric_schema import HIDING, PSEUDO
from tfm_blocks.translation.settings import Search

if TYPE_CHECKING:
    from tfm_blocks.runs.records import Score, ScoredSet
    from tfm_blocks.runs.saved_run import SavedRun
    from tfm_blocks.translation.fill import Filler
    from tfm_blocks.translation.translator import Translator

Row = tuple[str, ...]  # the source texts, then the reference
SEARCH = (*options.SEARCH, "strict")
MADE = {"saved": "imported or saved from Python", "averaged": "averaged from weights", "merged": "merged with adapters"}


def refuse(arguments: Namespace, reason: str, names: Sequence[str]) -> None:
    """Raise ConfigError for options without effect."""
    for name in names:
        if getattr(arguments, name) != arguments.default_of(name):
            option = options.flag_of(name)
            raise config_error(option, f"{reason}, so it cannot be combined with {option}", "leave it out")


def score_runs(arguments: Namespace) -> None:
    """Score every finished run below the folder, write the scores into the runs, and print them.

    Raises RunError for the runs that cannot be scored, after the others.
    """
    from tfm_blocks.runs.listing import find_runs

    search, runs = options.search_of(arguments), find_runs([arguments.folder])
    done = [run for run in runs if run.state == "done"]
    if not done:
        raise RunError(_nothing_finished(arguments.folder, {run.state for run in runs}))
    problems: list[Problem] = []
    for run in [run for run in done if run.settings.get("objective.name") == "label"]:
        rule = "is a classifier, and its scores of the test set were computed at the end of the training"
        help = f"tfm compare {run.folder} prints them; tfm classify RUN FILE predicts the labels of another text"
        problems.append(Problem(str(run.folder), rule, help=help))
        done.remove(run)
    kinds = {run.settings.get("objective.name") in HIDING: run.folder for run in done}
    if len(kinds) > 1:
        rule = f"{kinds[True]} hides tokens, but {kinds[False]} does not, so they do not have the same scores"
        raise RunError(Problem(str(arguments.folder), rule, help="evaluate them in separate commands"))
    hides_tokens = True in kinds
    if hides_tokens:
        refuse(arguments, "a pseudo-perplexity is computed without a search", ("bleu", "tokenised", *SEARCH))
    name = _scores_name(arguments, search, PSEUDO if hides_tokens else "")
    scored = {}
    for folder in (run.folder for run in done):
        try:
            if hides_tokens:
                scored[str(folder)] = _evaluate_encoder(arguments, folder, name)
            else:
                scored[str(folder)] = _evaluate_run(arguments, folder, name, search)
        except (TfmError, OSError) as error:
            problems += _problems_of(error, folder)
    if scored:
        _show(arguments, name, scored, sum(run.state != "done" for run in runs))
    if problems:
        raise RunError(problems)


def _problems_of(error: TfmError | OSError, folder: Path) -> list[Problem]:
    """Return the problems of a run, with its folder; raise an OSError that does not come from the file system."""
    known = file_error(error, str(folder)) if isinstance(error, OSError) else error
    if known is None:
        raise error
    problems = []
    for problem in known.problems:
        within = "" if problem.address.startswith(str(folder)) else f"{folder}: "
        problems.append(replace(problem, address=f"{within}{problem.address}".removesuffix(": ")))
    return problems


def _nothing_finished(folder: Path, states: Collection[str]) -> Problem:
    """Return the problem of a folder whose runs have these states, none of which is "done"."""
    if set(states) <= MADE.keys():
        rule = f"contains a model that was {' or '.join(sorted(MADE[state] for state in states))}"
        help = f"tfm evaluate {folder} --src FILE --ref FILE prints its scores, and --text FILE its perplexity"
        return Problem(str(folder), f"{rule}, and only a training run keeps scores", help=help)
    rule = "contains no finished run, and only finished runs keep scores"
    return Problem(str(folder), rule, help="tfm runs lists the states")


def _show(arguments: Namespace, name: str, scored: Mapping[str, tuple[list[Score], int]], rest: int) -> None:
    """Print the scores of each run and their name; `rest` runs are not done."""
    from tfm_blocks.report.lists import show_scores

    systems = {run: scores for run, (scores, _) in scored.items()}
    counts = {run: count for run, (_, count) in scored.items()}
    show_scores(systems, counts, as_json=arguments.json)
    if not arguments.json:
        unfinished = f"; {rest} are not done" if rest else ""
        print_line(f"saved as scores/{name} in {counted(len(scored), 'run')}{unfinished}")
        print_line(f"tfm compare {arguments.folder} --scores {name}")


def _scores_name(arguments: Namespace, search: Search, kind: str) -> str:
    """Return a name made of the settings that differ from their defaults, such as `beam4` or `beam4-alpha1-news`.

    It begins with `kind`, if it is not empty.
    """
    from tfm_blocks.data.files import COMPRESSED

    parts = [kind or (f"beam{search.beam}" if search.beam > 1 else "greedy")]
    default = Search(beam=search.beam)
    for key in options.SEARCH[1:]:
        if (value := getattr(search, key)) != getattr(default, key):
            parts.append(key if value is True else f"{key}{value:g}" if isinstance(value, float) else f"{key}{value}")
    parts += [value for value, usual in ((arguments.precision, "fp32"), (arguments.bleu, "13a")) if value != usual]
    test = arguments.test.with_suffix("") if arguments.test.suffix in COMPRESSED else arguments.test
    parts += [test.stem] if test.name else []
    return re.sub(r"[^\w.-]+", "_", "-".join(parts))[:60]  # a character has up to 4 bytes, a folder name up to 255


def _evaluate_run(arguments: Namespace, folder: Path, name: str, search: Search) -> tuple[list[Score], int]:
    """Translate and score the test set of a run, and write both into its folder. Return the scores and row count.

    Raises RunError if the scores with this name are of another test set, which would be overwritten.
    """
    from tfm_blocks.runs.records import SavedScores, ScoredSet, Status
    from tfm_blocks.runs.row_results import TranslatedLine, hash_rows, write_saved_scores
    from tfm_blocks.scoring.corpus import metrics, score

    translator = options.translator_of(arguments, folder)
    translator.expect_sources()
    rows = _read_rows(arguments.test, translator) if arguments.test.name else _own_rows(folder, translator)
    columns = [str(number) for number in range(len(rows[0]))]
    digest = hash_rows((dict(zip(columns, row, strict=True)) for row in rows), columns)  # equal for the same text
    _expect_test_set(folder, name, digest)
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


def _evaluate_encoder(arguments: Namespace, folder: Path, name: str) -> tuple[list[Score], int]:
    """Write the pseudo-perplexity of a run into its folder, with the losses of each text. Return it and their number.

    Raises RunError as `_evaluate_run`, and if the test set has changed since the training.
    """
    from tfm_blocks.runs.records import SavedScores, Status
    from tfm_blocks.runs.row_results import write_saved_scores
    from tfm_blocks.runs.saved_run import SavedRun
    from tfm_blocks.scoring.perplexity import pseudo_losses, pseudo_score, usual_context
    from tfm_blocks.translation.fill import Filler

    run, filler = SavedRun(folder), Filler.load(folder, **options.loading_of(arguments) | {"checkpoint": None})
    texts, test_set = _read_texts(arguments.test, run, filler) if arguments.test.name else _own_texts(run, filler)
    _expect_test_set(folder, name, test_set.sha256)
    context = usual_context(run.settings.get("data.context"), filler.network.longest(filler.input).tokens)
    with options.precision_of(arguments, filler.network):
        losses_D2 = pseudo_losses(filler, texts, context=context, batch_tokens=arguments.batch_tokens)
    result = pseudo_score(losses_D2, filler, context=context)
    if result is None:
        rule = "has no words that the tokenizer of the run knows"
        raise DataError(Problem("--test", rule, help="name a file with text"))
    score, losses_D2 = result
    search = {"precision": arguments.precision, "context": context}
    saved = SavedScores(arguments.test.name, test_set, search, Status.read(folder).steps, None, (score,))
    write_saved_scores(folder, name, saved, losses_D2=losses_D2)
    return [score], len(losses_D2)


def _read_texts(path: Path, run: SavedRun, filler: Filler) -> tuple[list[list[int]], ScoredSet]:
    """Return the ids of each document of a file in the format of the training text, without blank ones."""
    from tfm_blocks.data.documents import read_in_format_of
    from tfm_blocks.runs.records import ScoredSet
    from tfm_blocks.runs.row_results import hash_rows

    texts = [text for text in read_in_format_of(run.config, path, "--test") if text.strip()]
    digest = hash_rows(({filler.input: text} for text in texts), [filler.input])
    return [filler.tokenizer.encode(text) for text in texts], ScoredSet(len(texts), digest)


def _own_texts(run: SavedRun, filler: Filler) -> tuple[list[list[int]], ScoredSet]:
    """Return the ids of each document, or row, of the run's test set. Raises RunError if it has changed."""
    from tfm_blocks.data.objective_layouts import HiddenTokens, layout_of
    from tfm_blocks.data.prepare import prepare, with_saved_tokenizer
    from tfm_blocks.launch.finalize import scored_set
    from tfm_blocks.training.settings import read_run

    settings = read_run(run.config)
    prepared = prepare(with_saved_tokenizer(settings.data, run.folder), run.start.vocab, tell=lambda text: None)
    _, corpus = prepared.last_scored
    layout, test_set = layout_of(corpus, [filler.input], settings.objective), scored_set(corpus)
    assert isinstance(layout, HiddenTokens), "it is the layout of an objective that hides tokens"
    if test_set.sha256 != run.test_set:
        rule = "its test set has changed since the training"
        raise RunError(Problem(str(run.folder), rule, help="restore it, or name a text: --test FILE"))
    return [*corpus.texts(layout.column)], test_set


def _expect_test_set(folder: Path, name: str, digest: str) -> None:
    """Raise RunError if the run has scores with this name of another test set."""
    from tfm_blocks.runs.records import SavedScores, scores_folder

    if SavedScores.read_or_empty(scores_folder(folder, name)).test_set.sha256 not in ("", digest):
        rule = "has the scores of another test set, and they are not overwritten"
        help = "rename the file of --test, or delete this folder"
        raise RunError(Problem(str(scores_folder(folder, name)), rule, help=help))


def translate_rows(
    arguments: Namespace, translator: Translator, rows: Sequence[Row], search: Search, where: Path
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
        raise DataError(Problem("--test", rule, Place(str(path), wrong), help="paste test.src test.tgt > test.tsv"))
    return rows
