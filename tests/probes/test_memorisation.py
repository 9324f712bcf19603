"""Memorisation: one map for all splits."""

import pytest

from tests.probes.printed import printed
from tfm_blocks.errors import ConfigError
from tfm_blocks.probes.memorisation import Memorisation


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


@pytest.mark.parametrize(
    ("settings", "rule"),
    [({"vocab": 3}, "data.vocab: must be at least 4"), ({"map": -1}, "data.map: must be at least 0")],
)
def test_invalid_settings_are_refused(settings, rule):
    with pytest.raises(ConfigError, match=rule):
        Memorisation(**settings)
