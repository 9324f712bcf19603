"""Fuzzy recall, against a parser of runs of key and value tokens."""

from collections import Counter
from itertools import groupby

import pytest
from scipy.stats import chisquare

from tests.probes.printed import printed
from tfm_blocks.errors import ConfigError
from tfm_blocks.probes.fuzzy_recall import FuzzyRecall


def runs(question):
    """Return the motifs, alternately keys and values, and the number of padding tokens after them."""
    groups = [(kind, tuple(words)) for kind, words in groupby(question, key=lambda word: word[0])]
    padding = len(groups.pop()[1]) if groups[-1][0] == "_" else 0
    assert [kind for kind, _ in groups] == ["k", "v"] * (len(groups) // 2)
    return [motif for _, motif in groups], padding


def recalled(motifs):
    values, due, place = {}, [], 0
    for key, value in zip(motifs[::2], motifs[1::2], strict=True):
        place += len(key)
        if key in values:
            due += [(place - 1 + offset, word) for offset, word in enumerate(values[key])]
        assert values.setdefault(key, value) == value, "a key keeps its value"
        place += len(value)
    return due


@pytest.mark.parametrize(
    ("settings", "length"), [({}, 128), ({"motif": 2}, 9), ({"motif": 1, "vocab": 5}, 4), ({"vocab": 7}, 12)]
)
def test_each_token_of_a_value_is_due_before_it_if_its_key_occurred_before(settings, length):
    task = FuzzyRecall(**settings)
    for one in printed(task, [length]):
        motifs, padding = runs(one.question)
        assert len(one.question) == length and padding <= 4 * task.motif
        assert all(len(set(motif)) == len(motif) <= task.motif for motif in motifs)
        assert list(zip(one.positions, one.answer, strict=True)) == recalled(motifs)
        assert one.positions[-1] == length - padding - 2, "the last key always occurred before"


def test_sizes_of_motifs_are_uniform():
    first = [runs(one.question)[0][:2] for one in printed(FuzzyRecall(), [128], count=3000)]
    for side in (0, 1):
        sizes = Counter(len(pair[side]) for pair in first)
        assert set(sizes) == {1, 2, 3} and chisquare(list(sizes.values())).pvalue > 0.001


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"vocab": 6}, "data.vocab: must be at least 7, for motifs of 3 different tokens, but is 6"),
        ({"motif": 0}, "data.motif: must be at least 1, but is 0"),
    ],
)
def test_settings_without_enough_symbols_are_refused(settings, rule):
    with pytest.raises(ConfigError, match=rule):
        FuzzyRecall(**settings)
