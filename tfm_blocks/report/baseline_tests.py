"""Tests of groups of runs against a baseline: differences, 95 % intervals and p-values.

They need statistics of each line of a run's test set. Statistics of translations are cached in the user's cache.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import numpy as np

from tfm_blocks.data.cache import cache_folder, cache_key, find_or_build
from tfm_blocks.data.settings import LabelsSettings, read_data
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.metric_schema import FINAL_SCORES, PSEUDO, TOKEN_ACCURACY
from tfm_blocks.report.differences import Group, Groups, ModelGrid
from tfm_blocks.runs.folder import LOSSES, TRANSLATIONS
from tfm_blocks.runs.records import scores_folder
from tfm_blocks.runs.row_results import read_losses, read_losses_of_corpora, read_translations
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.scoring.corpus import MEASURES, Statistics, answer_statistics, line_statistics, loss_statistics
from tfm_blocks.scoring.labels import Floats, label_statistics, rank_statistics
from tfm_blocks.scoring.paired_test import System, interval_over_sentences, p_of_sacrebleu, p_over_sentences
from tfm_blocks.scoring.significance import correct, seed_test

FORMAT = 1  # version of the cached file; increase it when the statistics change
FILE = "statistics.npz"
CORPUS_SCORES = {score.name for score in FINAL_SCORES if score.kind == "corpus"}


@dataclass(frozen=True)
class BaselineTest:
    """The difference of a group's score from the baseline's. A value is None if it cannot be computed.

    `sentences` and `seeds` are p-values over test sentences and over seeds, each with the 95 % interval of the
    difference. The corrected p-values account for all rows of the same score. `sacrebleu` is the p-value of sacreBLEU's
    paired bootstrap, for one run on each side. `least` is the smallest p-value that this number of seeds can reach.
    `seeds_without_score` counts seeds of both sides, without which the difference may be too favourable.
    """

    group: Group
    score: str
    difference: float
    sentences: float | None = None
    sentences_interval: tuple[float, float] | None = None
    sentences_corrected: float | None = None
    seeds: float | None = None
    seeds_interval: tuple[float, float] | None = None
    seeds_corrected: float | None = None
    least: float = 0.0
    sacrebleu: float | None = None
    seeds_without_score: int = 0


def compare_groups(groups: Groups, baseline: Group, grid: ModelGrid) -> tuple[list[BaselineTest], list[str]]:
    """Test every group that has scores against the runs of the baseline's model on its test set.

    Return also why some groups are not tested.
    """
    notes: list[str] = []
    systems: dict[int, System] = {}
    tests: list[BaselineTest] = []
    for group in groups:
        counterpart = grid.counterpart(group, baseline) if len(grid.models) > 1 else baseline
        if group is counterpart:
            continue
        ours, theirs = ({run.test_set for run in side.counted if run.scored_on} for side in (group, counterpart))
        if not ours:
            continue  # which a note about the runs says
        if "" in ours | theirs:
            unknown = group if "" in ours else counterpart
            notes.append(f"the test set of {unknown.label} is not known, so they are not tested")
        elif ours != theirs or len(ours) != 1:
            notes.append(f"{group.label} was not scored on the test set of {counterpart.label}, so they are not tested")
        else:
            if id(counterpart) not in systems:
                systems[id(counterpart)] = _system(counterpart, notes)
            tests += _rows(group, counterpart, systems[id(counterpart)], _system(group, notes))
    # the p-values of all rows of a score are corrected together, separately for sentences and for seeds
    for name in dict.fromkeys(test.score for test in tests):
        rows = {place: test for place, test in enumerate(tests) if test.score == name}
        sentences = correct({place: test.sentences for place, test in rows.items() if test.sentences is not None})
        p_values = {place: test.seeds for place, test in rows.items() if test.seeds is not None}
        seeds = correct(p_values, {place: test.least for place, test in rows.items()})
        for place, test in rows.items():
            tests[place] = replace(test, sentences_corrected=sentences.get(place), seeds_corrected=seeds.get(place))
    return tests, notes


def _rows(group: Group, baseline: Group, before: System, after: System) -> Iterator[BaselineTest]:
    """Yield a row for each score that both groups have, computed in the same way."""
    p_values = p_over_sentences(before, after) if before and after else {}
    shown = {name for run in group.counted for name in (*run.scores, *run.values)}
    corpora = [name.partition("/")[2] for name in sorted(shown) if name.startswith("loss/")]  # of a mix
    for name in [*MEASURES, *(f"{name}/{corpus}" for corpus in corpora for name in MEASURES if name in shown)]:
        values, others = group.scores_over_seeds(name), baseline.scores_over_seeds(name)
        if values and others and group.methods(name) == baseline.methods(name):
            missing = len(group.counted) + len(baseline.counted) - len(values) - len(others)
            row = BaselineTest(group, name, fmean(values) - fmean(others), seeds_without_score=missing)
            if not missing and (test := seed_test(others, values)):
                row = replace(row, seeds=test.p, seeds_interval=test.interval, least=test.least)
            if name in p_values:
                single = len(before) == len(after) == 1 and name.partition("/")[0] in CORPUS_SCORES
                sacrebleu = p_of_sacrebleu(name, before[0], after[0]) if single else None
                interval = interval_over_sentences(name, before, after)
                row = replace(row, sentences=p_values[name], sentences_interval=interval, sacrebleu=sacrebleu)
            yield row


def _system(group: Group, notes: list[str]) -> list[Statistics]:
    """Return the line statistics of the runs that are done, with the tokenizer of their BLEU, from its signature."""
    done = [run for run in group.counted if run.scored_on]
    signatures = [run.scores["BLEU"].signature for run in done if "BLEU" in run.scores]
    known = re.search(r"tok:(13a|none|char|intl|zh)(?:\||$)", signatures[0]) if signatures else None
    return [run_statistics(run, known[1] if known else "13a", notes) for run in done]


def run_statistics(run: SavedRun, tokenizer: str, notes: list[str]) -> dict[str, Floats]:
    """Return the statistics by measure. A missing or damaged file adds a note and yields no statistics."""
    statistics: dict[str, Floats] = {}
    try:
        if run.settings.get("data.kind") == "labels" and run.scored_on:
            texts = _read_texts(run.folder)
            data = read_data(run.config["data"])
            assert isinstance(data, LabelsSettings), "it has the kind of labels"
            statistics |= label_statistics(*texts, data.coder)
        elif "accuracy" in run.scores:
            statistics |= answer_statistics(*_read_texts(run.folder))
        elif run.scores.keys() - {TOKEN_ACCURACY.name, PSEUDO}:
            statistics |= _of_translations(run.translated_in or run.folder, tokenizer)
        if PSEUDO in run.scores:
            losses_N6 = read_losses(run.translated_in or scores_folder(run.folder, PSEUDO))
            statistics |= {} if losses_N6 is None else {PSEUDO: losses_N6[:, [1, 2]]}
        losses_N6, corpora = (None, []) if run.translated_in else read_losses_of_corpora(run.folder)
    except (ConfigError, RunError) as error:
        notes.append(f"{error.problems[0].address} {error.problems[0].rule}")
        return statistics
    if losses_N6 is None and not run.translated_in and {"loss", "perplexity"} & {*run.scores, *run.values}:
        notes.append(f"{run.folder / LOSSES} is missing, so its losses are not tested over sentences")
    if losses_N6 is not None:
        of_losses = loss_statistics(losses_N6)
        statistics |= {name: of_losses[name] for name in of_losses if name in run.scores or name in run.values}
    return statistics | statistics_of_corpora(statistics, corpora)


def statistics_of_corpora(statistics: Mapping[str, Floats], corpora: Sequence[str]) -> dict[str, Floats]:
    """Return the statistics of the rows of each corpus of a mix, as `NAME/CORPUS`; ranks are among these rows."""
    parts: dict[str, Floats] = {}
    for corpus in dict.fromkeys(corpora):
        is_of_it_N = np.array(corpora) == corpus
        for name, stats_NK in statistics.items():
            if len(stats_NK) == len(corpora):
                part_NK = stats_NK[is_of_it_N]
                parts[f"{name}/{corpus}"] = rank_statistics(*part_NK.T[:2]) if name == "spearman" else part_NK
    return parts


def _of_translations(folder: Path, tokenizer: str) -> dict[str, Floats]:
    """Return the statistics of the translations, from the cache if it is usable, since TER is slow."""
    texts = _read_texts(folder)
    text = hashlib.sha256((folder / TRANSLATIONS).read_bytes()).hexdigest()
    key = cache_key(FORMAT, version("sacrebleu"), tokenizer, text)

    def build(place: Path) -> None:
        np.savez_compressed(place / FILE, **line_statistics(*texts, tokenizer))  # type: ignore[arg-type]

    kept = cache_folder(None) / "line-statistics" / key
    with suppress(ConfigError, OSError), np.load(find_or_build(kept, build) / FILE) as arrays:
        return dict(arrays)
    return line_statistics(*texts, tokenizer)


def _read_texts(folder: Path) -> tuple[list[str], list[str]]:
    """Return the outputs of a run, and the references."""
    lines = read_translations(folder)
    return [line.output for line in lines], [line.reference for line in lines]
