"""`tfm evaluate --test`: score finished runs, and keep the scores in their folders."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm_blocks.cli.options import precision_of, search_of, translator_of
from tfm_blocks.errors import DataError, Place, Problem, RunError, TfmError, printable
from tfm_blocks.translation.settings import Search

if TYPE_CHECKING:
    from tfm_blocks.runs.records import Score, ScoredSet
    from tfm_blocks.translation.translator import Translator

Row = tuple[str, ...]  # the source texts, then the reference


def evaluate_and_save(arguments: argparse.Namespace) -> None:
    """Score every finished run below the folder, write the scores into the runs, and print them.

    Raises RunError for the runs that cannot be scored, after the others.
    """
    from tfm_blocks.runs.listing import find_runs

    search = search_of(arguments)
    name = scores_name(arguments, search)
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
            problems += [_of_run(problem, str(folder)) for problem in error.problems]
    if scored:
        _show(arguments, name, scored, len(runs) - len(done))
    if problems:
        raise RunError(problems)


def _of_run(problem: Problem, run: str) -> Problem:
    """Return the problem with an address that begins with its run."""
    address = problem.address if problem.address.startswith(run) else f"{run}: {problem.address}".removesuffix(": ")
    return replace(problem, address=address)


def _show(arguments: argparse.Namespace, name: str, scored: Mapping[str, tuple[list[Score], int]], rest: int) -> None:
    """Print the scores of each run and their name; `rest` runs are not done."""
    from tfm_blocks.report.lists import print_scores_json, show_scores

    systems = {run: scores for run, (scores, _) in scored.items()}
    (print_scores_json if arguments.json else show_scores)(systems, max(count for _, count in scored.values()))
    if not arguments.json:
        unfinished = f"; {rest} are not done" if rest else ""
        print(printable(f"saved as scores/{name} in {len(scored)} run{'s' * (len(scored) > 1)}{unfinished}"))
        print(printable(f"tfm compare {arguments.folder} --scores {name}"))


def scores_name(arguments: argparse.Namespace, search: Search) -> str:
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
    """Translate and score the test set of a run, and write both into its folder. Return the scores and row count."""
    from tfm_blocks.runs.records import SavedScores, Status
    from tfm_blocks.runs.row_results import TranslatedLine, write_saved_scores
    from tfm_blocks.scoring.corpus import metrics, score

    translator = translator_of(arguments, folder)
    translator.expect_sources()
    rows = _read_rows(arguments.test, translator) if arguments.test.name else _own_rows(folder, translator)
    test_set = _describe_rows(rows)
    _expect_same_set(folder, name, test_set)
    where = arguments.test if arguments.test.name else folder
    outputs = translate_rows(arguments, translator, [row[:-1] for row in rows], search, where)
    scores = score(outputs, [row[-1] for row in rows], metrics(arguments.bleu, tokenised=arguments.tokenised))
    pairs = list(zip(rows, outputs, strict=True))
    saved = SavedScores(
        arguments.test.name,
        test_set,
        _settings(arguments, search),
        Status.read(folder).steps,
        sum(output == row[-1] for row, output in pairs) / len(rows),
        tuple(scores),
    )
    write_saved_scores(folder, name, saved, [TranslatedLine(" | ".join(row[:-1]), out, row[-1]) for row, out in pairs])
    return scores, len(rows)


def _expect_same_set(run: Path, name: str, test_set: ScoredSet) -> None:
    """Raise RunError if the scores with this name are of another test set, which would be overwritten."""
    from tfm_blocks.runs.records import SavedScores, scores_folder

    folder = scores_folder(run, name)
    if SavedScores.read_or_empty(folder).test_set.sha256 not in ("", test_set.sha256):
        rule = "has the scores of another test set, and they are not overwritten"
        raise RunError(Problem(str(folder), rule, help="rename the file of --test, or delete this folder"))


def translate_rows(
    arguments: argparse.Namespace, translator: Translator, rows: Sequence[Row], search: Search, where: Path
) -> list[str]:
    """Return the best output for the sources of each row; warnings name the rows by `where`."""
    from tfm_blocks.translation.stream import fitting

    fit = fitting(rows, translator, search, str(where), strict=arguments.strict)
    with precision_of(arguments, translator.network):
        nbest = translator.search(fit, search, batch_tokens=arguments.batch_tokens)
    translator.warn_of_unknown()
    return [best.text for best, *_ in nbest]


def _describe_rows(rows: Sequence[Row]) -> ScoredSet:
    """Return the number of rows and their hash, which is equal for runs that were scored on the same text."""
    from tfm_blocks.runs.records import ScoredSet
    from tfm_blocks.runs.row_results import hash_rows

    columns = [str(number) for number in range(len(rows[0]))]
    return ScoredSet(len(rows), hash_rows((dict(zip(columns, row, strict=True)) for row in rows), columns))


def _settings(arguments: argparse.Namespace, search: Search) -> dict[str, Any]:
    """Return the settings of the search that scores.json records."""
    settings = {key: value for key, value in asdict(search).items() if key not in ("nbest", "sampling")}
    return {**settings, "precision": arguments.precision}


def _own_rows(folder: Path, translator: Translator) -> list[Row]:
    """Return the run's test set. Raises RunError for several sources, which its translations do not separate."""
    from tfm_blocks.runs.row_results import read_translations

    if len(translator.sources) > 1:
        rule = f"reads {', '.join(translator.sources)}, but its translations do not separate their texts"
        raise RunError(Problem(str(folder), rule, help="--test FILE with the texts and the reference, tab-separated"))
    return [(line.source, line.reference) for line in read_translations(folder)]


def _read_rows(path: Path, translator: Translator) -> list[Row]:
    """Return the tab-separated texts of each line. Raises DataError for another number of texts."""
    from tfm_blocks.data.text import read_lines

    rows = [tuple(line.split("\t")) for line in read_lines(path, "--test")]
    columns = [*translator.sources, "the reference"]
    wrong = next((number for number, row in enumerate(rows, 1) if len(row) != len(columns)), None)
    if wrong is not None or not rows:
        rule = f"each line needs {len(columns)} tab-separated texts ({', '.join(columns)})"
        rule += f", but line {wrong} has {len(rows[wrong - 1])}" if wrong else ", but there is no line"
        help = "paste test.src test.tgt > test.tsv"
        raise DataError(Problem("--test", rule, Place(str(path), wrong), help=help))
    return rows
