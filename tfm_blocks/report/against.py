"""Groups of runs against a baseline: by how much they differ, and how sure that is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from tfm_blocks.errors import RunError
from tfm_blocks.report.differences import Group
from tfm_blocks.runs.record import RunRecord
from tfm_blocks.runs.translations import TranslatedLine, read_translations
from tfm_blocks.translation.significance import (
    Measure,
    Resampled,
    correct,
    measures,
    p_over_seeds,
    p_over_sentences,
    resample,
)

TESTED = ("exact match", "BLEU", "chrF", "TER")

Resamples = dict[str, Sequence[Resampled]]  # of each run of a group, by score


@dataclass(frozen=True)
class Against:
    """A score of a group beside the baseline's. The p are of other sentences and of other seeds; the corrected ones
    count the other groups. None where there is nothing to compute them from.
    """

    group: Group
    score: str
    difference: float
    sentences: float | None
    seeds: float | None
    sentences_corrected: float | None = None
    seeds_corrected: float | None = None


def compare_groups(groups: Sequence[Group], baseline: Group) -> tuple[list[Against], list[str]]:
    """Every other group that has scores against the baseline, and why some of it is not tested."""
    notes: list[str] = []
    before = _resampled(baseline, notes)
    found: list[Against] = []
    for group in groups:
        if group is baseline:
            continue
        if why := _why_untested(group, baseline):
            notes.append(f"{why}, so they are not tested")
            continue
        after = _resampled(group, notes) if before else {}
        found += [_against(group, baseline, name, before, after) for name in _scores(group, baseline)]
    return _corrected(found), notes


def _why_untested(group: Group, baseline: Group) -> str:
    """Empty where all runs that have scores have them of one test set, which is known."""
    ours, theirs = ({run.test_set for run in one.counted if run.scores} for one in (group, baseline))
    if "" in ours | theirs:
        return f"the test set of {(group if '' in ours else baseline).label} is not known"
    if ours == theirs and len(ours) == 1:
        return ""
    return f"{group.label} was not scored on the test set of {baseline.label}"


def _scores(group: Group, baseline: Group) -> list[str]:
    """Those that both have, and that were computed in one way."""
    ways = {name: _signatures(group, name) | _signatures(baseline, name) for name in TESTED}
    both = (name for name in TESTED if group.over_seeds(name) and baseline.over_seeds(name))
    return [name for name in both if len(ways[name]) == 1]


def _signatures(group: Group, name: str) -> set[str]:
    return {run.scores[name].signature for run in group.counted if name in run.scores}


def _against(group: Group, baseline: Group, name: str, before: Resamples, after: Resamples) -> Against:
    values, others = group.over_seeds(name), baseline.over_seeds(name)
    sure = p_over_sentences(before[name], after[name]) if name in before and name in after else None
    return Against(group, name, fmean(values) - fmean(others), sure, p_over_seeds(others, values))


def _corrected(found: Sequence[Against]) -> list[Against]:
    sentences = _correct_each(found, lambda one: one.sentences)
    seeds = _correct_each(found, lambda one: one.seeds)
    return [
        replace(one, sentences_corrected=sentences.get(place), seeds_corrected=seeds.get(place))
        for place, one in enumerate(found)
    ]


def _correct_each(found: Sequence[Against], of: Callable[[Against], float | None]) -> dict[int, float]:
    """By place, for the number of groups that have the same score."""
    corrected: dict[int, float] = {}
    for name in TESTED:
        corrected |= correct(
            {place: p for place, one in enumerate(found) if one.score == name and (p := of(one)) is not None}
        )
    return corrected


def _resampled(group: Group, notes: list[str]) -> Resamples:
    """Of the runs that are done; nothing where one of them has no translations, which is noted."""
    done = [run for run in group.counted if run.scores]
    try:
        texts = [(run, read_translations(run.folder)) for run in done]
    except RunError as error:
        notes.append(f"{error.problems[0].address} {error.problems[0].rule}")
        return {}
    asked = measures(_tokenizer(done))
    return {name: [_resample(lines, measure) for _, lines in texts] for name, measure in asked.items() if texts}


def _tokenizer(runs: Sequence[RunRecord]) -> str:
    """The one with which the BLEU of these runs was computed, as its signature says."""
    signatures = [run.scores["BLEU"].signature for run in runs if "BLEU" in run.scores]
    known = re.search(r"tok:(13a|none|char|intl|zh)(?:\||$)", signatures[0]) if signatures else None
    return known[1] if known else "13a"


def _resample(lines: Sequence[TranslatedLine], measure: Measure) -> Resampled:
    return resample([one.output for one in lines], [one.reference for one in lines], measure)
