"""Recall, against dictionaries that read the sequence once, and parsers of runs of tokens."""

from collections import Counter
from itertools import groupby

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.probes.printed import printed
from tfm_blocks.probes.recall import FuzzyRecall, InContextRecall, Memorisation, Mqar, NoisyRecall


def recalled(question):
    """Return the position and value of each key that occurred before."""
    values, due = {}, []
    for place in range(0, len(question), 2):
        key, value = question[place : place + 2]
        if key[0] == "n":
            assert value[0] == "n", "noise replaces whole pairs"
            continue
        assert key[0] == "k" and value[0] == "v"
        if key in values:
            due.append((place, values[key]))
        assert values.setdefault(key, value) == value, "a key keeps its value"
    return due


@pytest.mark.parametrize(
    "task",
    [
        InContextRecall(),
        InContextRecall(vocab=5),
        NoisyRecall(),
        NoisyRecall(noise=0.9),
        NoisyRecall(vocab=6, noise_tokens=2),
    ],
)
@pytest.mark.parametrize("length", [4, 6, 128])
def test_the_value_is_due_at_each_key_that_occurred_before(task, length):
    for one in printed(task, [length]):
        assert list(zip(one.positions, one.answer, strict=True)) == recalled(one.question)
        assert one.positions[-1] == length - 2, "the last key always occurred before"


def test_every_example_has_another_map():
    rows = printed(InContextRecall(), [128], count=50)
    maps = {
        tuple(sorted({(key, value) for key, value in zip(one.question[::2], one.question[1::2], strict=True)}))
        for one in rows
    }
    assert len(maps) == len(rows)


def test_the_share_of_noise_is_as_set():
    rows, pairs = printed(NoisyRecall(noise=0.2), [128], count=2000), 64
    share = sum(word[0] == "n" for one in rows for word in one.question[::2]) / (len(rows) * pairs)
    expected = 0.2 * (pairs - 2) / pairs  # the last pair and one before it are not noise
    deviation = (0.2 * 0.8 * (pairs - 2) / len(rows)) ** 0.5 / pairs
    assert abs(share - expected) < 4 * deviation


def runs(question):
    """Return the motifs, alternately keys and values, and the number of padding tokens after them."""
    groups = [(kind, tuple(words)) for kind, words in groupby(question, key=lambda word: word[0])]
    padding = len(groups.pop()[1]) if groups[-1][0] == "_" else 0
    assert [kind for kind, _ in groups] == ["k", "v"] * (len(groups) // 2)
    return [motif for _, motif in groups], padding


def recalled_motifs(motifs):
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
        assert list(zip(one.positions, one.answer, strict=True)) == recalled_motifs(motifs)
        assert one.positions[-1] == length - padding - 2, "the last key always occurred before"


@pytest.mark.grid
def test_sizes_of_motifs_are_uniform():
    first = [runs(one.question)[0][:2] for one in printed(FuzzyRecall(), [128], count=3000)]
    for side in (0, 1):
        sizes = Counter(len(pair[side]) for pair in first)
        assert set(sizes) == {1, 2, 3} and chisquare(list(sizes.values())).pvalue > 0.001


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


def test_the_length_must_hold_all_pairs_and_queries():
    task = Mqar(pairs=8)
    assert [length for length in range(40) if not task.misfit(length)] == [32, 34, 36, 38]


def facts(task, **draw):
    """Return the value of each key, which must be the same at each occurrence."""
    values = {}
    for one in printed(task, [32], **draw):
        assert one.positions == tuple(range(1, 32, 2)) and {one.question[place] for place in one.positions} == {"_"}
        for key, value in zip(one.question[::2], one.answer, strict=True):
            assert key[0] == "k" and value[0] == "v" and values.setdefault(key, value) == value
    return values


def test_all_splits_and_seeds_share_a_map_with_different_values():
    train = facts(Memorisation(), split="train", count=256)
    test = facts(Memorisation(), split="test", seed=7, count=256)
    assert len(train) == len(set(train.values())) == 127
    assert train == test


def test_another_map_has_other_values():
    one, other = facts(Memorisation(), count=256), facts(Memorisation(map=1), count=256)
    assert sum(one[key] == other[key] for key in one) < 10


def test_the_values_do_not_stand_in_the_question():
    assert not [word for one in printed(Memorisation(), [32]) for word in one.question if word[0] == "v"]
