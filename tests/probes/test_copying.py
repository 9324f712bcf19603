"""Selective copying and compression, against the words of the question."""

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.probes.printed import printed
from tfm_blocks.errors import ConfigError
from tfm_blocks.probes.copying import Compression, SelectiveCopying


@pytest.mark.parametrize(("settings", "length"), [({}, 256), ({"tokens": 1, "vocab": 4}, 3), ({"tokens": 5}, 11)])
def test_the_scattered_tokens_are_due_in_order_after_the_copy_token(settings, length):
    task = SelectiveCopying(**settings)
    for one in printed(task, [length]):
        copy = one.question.index("copy")
        assert copy == length - task.tokens - 1 and set(one.question[copy + 1 :]) == {"_"}
        assert one.answer == [word for word in one.question[:copy] if word != "_"]
        assert one.positions == tuple(range(copy + 1, length))


def test_every_place_before_the_copy_token_is_equally_likely():
    rows = printed(SelectiveCopying(tokens=8), [64], count=4000)
    used = np.sum([[word != "_" for word in one.question[:55]] for one in rows], axis=0)
    assert chisquare(used).pvalue > 0.001


@pytest.mark.parametrize("length", [2, 32])
def test_compression_repeats_the_string_from_the_first_compression_token_on(length):
    for one in printed(Compression(), [length]):
        string = one.question[: one.question.index("=")]
        assert len(string) == length - 1 and one.answer == string
        assert set(one.question[length - 1 :]) == {"="}
        assert one.positions == tuple(range(length - 1, 2 * length - 2))


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: SelectiveCopying(vocab=3), "data.vocab: must be at least 4, but is 3"),
        (lambda: SelectiveCopying(tokens=0), "data.tokens: must be at least 1, but is 0"),
        (lambda: Compression(vocab=2), "data.vocab: must be at least 3, but is 2"),
    ],
)
def test_settings_without_enough_symbols_are_refused(make, rule):
    with pytest.raises(ConfigError, match=rule):
        make()
