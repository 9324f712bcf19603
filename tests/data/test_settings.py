"""The rules of the group `data`."""

import pytest

from tests.data.conftest import read_data
from tfm_blocks.data.pair_settings import DatesSettings
from tfm_blocks.data.settings import TextSettings
from tfm_blocks.errors import ConfigError


def test_the_kind_chooses_the_settings(dates, text):
    assert isinstance(dates(), DatesSettings)
    assert isinstance(text(), TextSettings)


def test_an_unknown_kind_is_an_error_that_lists_the_known_kinds():
    with pytest.raises(ConfigError, match=r"data\.kind(.|\n)*did you mean dates"):
        read_data({"kind": "date"})


def test_a_misspelt_key_is_an_error_with_its_address(text):
    with pytest.raises(ConfigError, match=r"data\.val: has the columns src, tgt, but train has scr, tgt"):
        text(train={"scr": "a", "tgt": "b"})


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({"max_length": 0}, r"data\.max_length"),
        ({"max_length": 100, "batch_tokens": 201}, r"data\.batch_tokens: .*202, to fit the longest pair, but is 201"),
        (
            {"max_length": 100, "step_tokens": 100, "batch_tokens": 202},
            r"data\.step_tokens: .*101, to fit the longest pair, but is 100",
        ),
    ],
)
def test_caps_that_the_longest_pair_exceeds_are_refused(text, changes, address):
    with pytest.raises(ConfigError, match=address):
        text(**changes)
