"""Multi-query associative recall, against a dictionary and the distribution of slots."""

from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.probes.printed import printed
from tfm_blocks.errors import ConfigError
from tfm_blocks.probes.mqar import Mqar


@pytest.mark.parametrize("filler", ["blank", "random"])
@pytest.mark.parametrize(("vocab", "pairs", "length"), [(8192, 4, 64), (64, 16, 256), (10, 4, 16), (512, 1, 8)])
def test_each_key_asks_once_for_the_value_that_followed_it(filler, vocab, pairs, length):
    for one in printed(Mqar(vocab=vocab, pairs=pairs, filler=filler), [length]):
        context, rest = one.question[: 2 * pairs], one.question[2 * pairs :]
        values = dict(zip(context[::2], context[1::2], strict=True))
        assert len(one.question) == length and len(values) == len(set(values.values())) == pairs
        assert all(key[0] == "k" and value[0] == "v" for key, value in values.items())
        keys = [one.question[position] for position in one.positions]
        assert sorted(keys) == sorted(values) and one.answer == [values[key] for key in keys]
        assert all(position >= 2 * pairs and position % 2 == 0 for position in one.positions)
        if filler == "blank":
            assert [word for word in rest if word != "_"] == keys


def test_random_filler_is_drawn_from_all_tokens():
    task = Mqar(vocab=20, pairs=2, filler="random")
    words = Counter()
    for one in printed(task, [32], count=2000):
        words.update(word for place, word in enumerate(one.question[4:], 4) if place not in one.positions)
    assert chisquare([words[word] for word in task.alphabet]).pvalue > 0.001


def slots_of_first_two_keys(pairs, length, count):
    places = []
    for one in printed(Mqar(pairs=pairs), [length], count=count):
        slot = {one.question[place]: (place - 2 * pairs) // 2 for place in one.positions}
        places.append((slot[one.question[0]], slot[one.question[2]]))
    return np.array(places)


def test_slots_have_the_power_law_without_replacement():
    pairs, length, count = 4, 64, 20_000
    weights = np.array([0.01 * slot ** (0.01 - 1) for slot in range(1, (length - 2 * pairs) // 2 + 1)])
    first = weights / weights.sum()
    both = first[:, None] * first[None, :] / (1 - first[:, None])
    np.fill_diagonal(both, 0)
    drawn = slots_of_first_two_keys(pairs, length, count)
    assert chisquare(np.bincount(drawn[:, 0], minlength=len(first)), first * count).pvalue > 0.001
    assert chisquare(np.bincount(drawn[:, 1], minlength=len(first)), both.sum(axis=0) * count).pvalue > 0.001
    uniform = np.full(len(first), count / len(first))
    assert chisquare(np.bincount(drawn[:, 0], minlength=len(first)), uniform).pvalue < 1e-9, "the test can tell"


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"vocab": 9}, "data.vocab: must be even and at least 10, for 4 different keys, but is 9"),
        ({"vocab": 8}, "at least 10"),
        ({"vocab": 33}, "must be even"),
        ({"pairs": 0}, "data.pairs: must be at least 1, but is 0"),
        ({"filler": "noise"}, "data.filler: must be blank or random, but is noise"),
    ],
)
def test_settings_without_enough_symbols_are_refused(settings, rule):
    with pytest.raises(ConfigError, match=rule):
        Mqar(**settings)


def test_the_length_must_hold_all_pairs_and_queries():
    task = Mqar(pairs=8)
    assert [length for length in range(40) if not task.misfit(length)] == [32, 34, 36, 38]
