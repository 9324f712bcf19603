"""`tfm evaluate --test`: score finished runs, and keep the scores in their folders."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm_blocks.cli.options import precision_of, search_of, translator_of
from tfm_blocks.errors import ConfigError, DataError, Place, Problem, RunError, printable
from tfm_blocks.translation.settings import Search

if TYPE_CHECKING:
    from tfm_blocks.runs.status import Score, ScoredSet
    from tfm_blocks.translation.translator import Translator

Row = tuple[str, ...]  # the source texts, then the reference


def evaluate_and_save(arguments: argparse.Namespace) -> None:
    """Score every finished run below the folder, write the scores into the runs, and print them."""
    from tfm_blocks.report.scores import print_scores_json, show_scores
    from tfm_blocks.runs.record import find_runs

    _refuse_other_modes(arguments)
    search = search_of(arguments)
    name = scores_name(arguments, search)
    members = find_runs([arguments.folder])
    done = [member.folder for member in members if member.state()[0] == "done"]
    if not done:
        rule = "contains no finished run, and only finished runs keep scores"
        raise RunError(Problem(str(arguments.folder), rule, help="tfm runs lists the states"))
    counts, systems = [], {}
    for folder in done:
        systems[str(folder)], count = _evaluate_run(arguments, folder, name, search)
        counts.append(count)
    (print_scores_json if arguments.json else show_scores)(systems, max(counts))
    if not arguments.json:
        unfinished = f"; {len(members) - len(done)} are not done" if len(members) > len(done) else ""
        print(printable(f"saved as scores/{name} in {len(done)} run{'s' * (len(done) > 1)}{unfinished}"))
        print(printable(f"tfm compare {arguments.folder} --scores {name}"))


def _refuse_other_modes(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that --test replaces."""
    for option in ("src", "ref", "text", "against", "checkpoint"):
        if getattr(arguments, option) is not None:
            rule = f"--test scores the final weights on one test set, so it cannot be combined with --{option}"
            raise ConfigError(Problem(f"--{option}", rule, help="leave one of them out"))


def scores_name(arguments: argparse.Namespace, search: Search) -> str:
    """Return a name made of the settings that differ from their defaults, such as `beam4` or `beam4-alpha1-news`."""
    parts = [f"beam{search.beam}" if search.beam > 1 else "greedy"]
    default = Search(beam=search.beam)
    for key in ("patient", "alpha", "penalty", "coverage", "max_tokens"):
        if (value := getattr(search, key)) != getattr(default, key):
            parts.append(key if value is True else f"{key}{value:g}" if isinstance(value, float) else f"{key}{value}")
    parts += [value for value, usual in ((arguments.precision, "fp32"), (arguments.bleu, "13a")) if value != usual]
    parts += [arguments.test.name.removesuffix(".gz").partition(".")[0]] if arguments.test.name else []
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join(parts))[:80]


def _evaluate_run(arguments: argparse.Namespace, folder: Path, name: str, search: Search) -> tuple[list[Score], int]:
    """Translate and score the test set of a run, and write both into its folder. Return the scores and row count."""
    from tfm_blocks.runs.row_results import TranslatedLine
    from tfm_blocks.runs.saved_scores import SavedScores, write_saved_scores
    from tfm_blocks.runs.status import Status
    from tfm_blocks.scoring.corpus import metrics, score

    translator = translator_of(arguments, folder)
    translator.expect_sources()
    rows = _read_rows(arguments.test, translator) if arguments.test.name else _own_rows(folder, translator)
    outputs = _translate(arguments, translator, rows, search, arguments.test if arguments.test.name else folder)
    scores = score(outputs, [row[-1] for row in rows], metrics(arguments.bleu, tokenised=arguments.tokenised))
    pairs = list(zip(rows, outputs, strict=True))
    saved = SavedScores(
        arguments.test.name,
        _describe_rows(rows),
        _settings(arguments, search),
        Status.read(folder).steps,
        sum(output == row[-1] for row, output in pairs) / len(rows),
        tuple(scores),
    )
    write_saved_scores(folder, name, saved, [TranslatedLine(" | ".join(row[:-1]), out, row[-1]) for row, out in pairs])
    return scores, len(rows)


def _translate(
    arguments: argparse.Namespace, translator: Translator, rows: Sequence[Row], search: Search, where: Path
) -> list[str]:
    from tfm_blocks.translation.stream import fitting

    fit = fitting([row[:-1] for row in rows], translator, search, str(where), strict=arguments.strict)
    with precision_of(arguments):
        return [best.text for best, *_ in translator.search(fit, search, batch_tokens=arguments.batch_tokens)]


def _describe_rows(rows: Sequence[Row]) -> ScoredSet:
    """Return the number of rows and their hash, which is equal for runs that were scored on the same text."""
    from tfm_blocks.runs.row_results import hash_rows
    from tfm_blocks.runs.status import ScoredSet

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
