"""In-context recall, against a dictionary that reads the sequence once."""

import pytest

from tests.probes.printed import printed
from tfm_blocks.errors import ConfigError
from tfm_blocks.probes.recall import InContextRecall, NoisyRecall


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


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: InContextRecall(vocab=3), "data.vocab: must be at least 4, but is 3"),
        (lambda: NoisyRecall(vocab=19), "data.vocab: must be at least 20, but is 19"),
        (lambda: NoisyRecall(noise_tokens=0), "data.noise_tokens: must be at least 1"),
        (lambda: NoisyRecall(noise=1.0), "data.noise: must be at least 0 and below 1, but is 1.0"),
    ],
)
def test_settings_without_enough_symbols_are_refused(make, rule):
    with pytest.raises(ConfigError, match=rule):
        make()
