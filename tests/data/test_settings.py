"""The rules of the group `data`."""

import contextlib

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


@pytest.mark.parametrize("tokens", [100, 101])
def test_a_micro_batch_of_labels_holds_the_longest_text(tokens):
    files = {"src": ["x"], "tgt": ["y"]}
    splits = dict.fromkeys(("train", "val", "test"), files)
    sizes = {"max_length": 100, "step_tokens": 101, "batch_tokens": tokens}
    data = {"kind": "labels", "dir": "d", "predict": "class", "labels": ["a", "b"], **splits, **sizes}
    with pytest.raises(ConfigError, match="101, to fit the longest text") if tokens < 101 else contextlib.nullcontext():
        assert read_data(data).batch_tokens == 101


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({"train": ""}, "data.train"),
        ({"test": ["a.txt", ""]}, "data.test"),
        ({"dir": ""}, "data.dir"),
        ({"tokenizer": ""}, "data.tokenizer"),
        ({"cache": ""}, "data.cache"),
        ({"mix": {"web": {"dir": ""}}}, "data.mix.web.dir"),
    ],
)
def test_an_empty_name_is_refused_and_not_the_same_as_a_missing_one(changes, address):
    plain = {"kind": "lm", "dir": "d", "train": "t", "val": "v", "test": None, "context": 8}
    with pytest.raises(ConfigError) as error:
        read_data(plain | {"step_tokens": 8, "batch_tokens": 8} | changes)
    assert [(problem.address, problem.rule) for problem in error.value.problems] == [(address, "is empty")]


def test_the_longest_row_of_three_columns_fits_a_micro_batch(text):
    train = {"src": "a", "doc": "b", "tgt": "c"}
    splits = {"train": train, "val": train, "test": None, "max_length": 100, "step_tokens": 200}
    assert text(**splits, batch_tokens=303).batch_tokens == 303
    with pytest.raises(ConfigError, match=r"data\.train: has 3 columns, whose longest row has 303 tokens"):
        text(**splits, batch_tokens=302)


@pytest.mark.parametrize("tokenizer", ["", {"source": "", "target": "runs/a"}])
def test_an_empty_tokenizer_of_pairs_is_refused(text, tokenizer):
    with pytest.raises(ConfigError, match=r"data\.tokenizer: must be a path"):
        text(tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"data\.train\.src: is empty"):
        text(train={"src": "", "tgt": "train.tgt"})
