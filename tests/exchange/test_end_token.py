"""The id that ends texts: of config.json, or else of the tokenizer."""

import json

import pytest
from transformers import AutoTokenizer

import tfm_blocks as tfm
from tests.exchange.doors import door
from tests.exchange.layouts import change_config
from tests.exchange.test_import import expect_restored, far_apart, logits_of_both
from tfm_blocks.errors import RunError
from tfm_blocks.exchange.importing import import_folder


def unended(folder, settings, generation=None, **eos):
    """Write an MPT whose tokenizer has settings, and whose config has at most the id `eos`. Return the model."""
    theirs = door("mpt", folder)
    ids = ("bos_token_id", "eos_token_id")
    change_config(folder, lambda config: {key: value for key, value in config.items() if key not in ids} | eos)
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    )
    return theirs


@pytest.mark.parametrize("eos", [{}, pytest.param({"eos_token_id": None}, marks=pytest.mark.grid)])
def test_a_decoder_without_an_end_takes_the_one_of_its_tokenizer(eos, tmp_path):
    theirs = unended(tmp_path / "theirs", {"eos_token": {"__type": "AddedToken", "content": "w36"}}, **eos)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    ours = tfm.load(tmp_path / "run")
    expected = AutoTokenizer.from_pretrained(tmp_path / "theirs").eos_token_id
    vocabulary = ours.tokenizer.vocabulary
    assert vocabulary.eos == vocabulary.start == expected == 36
    assert far_apart(*logits_of_both(theirs, ours)) < 1e-5
    expect_restored(tmp_path)


def test_a_setting_without_a_value_hides_no_token_of_the_older_file(tmp_path):
    unended(tmp_path / "theirs", {"eos_token": None})
    (tmp_path / "theirs" / "special_tokens_map.json").write_text('{"eos_token": "w35"}')
    import_folder(tmp_path / "theirs", tmp_path / "run")
    expected = AutoTokenizer.from_pretrained(tmp_path / "theirs").eos_token_id
    assert tfm.load(tmp_path / "run").tokenizer.vocabulary.eos == expected == 35


def test_the_end_of_the_settings_of_generation_comes_before_that_of_the_tokenizer(tmp_path):
    unended(tmp_path / "theirs", {"eos_token": "w36"}, {"eos_token_id": 5})
    import_folder(tmp_path / "theirs", tmp_path / "run")
    assert tfm.load(tmp_path / "run").tokenizer.vocabulary.written_eos == 5


@pytest.mark.parametrize("settings", [{}, {"eos_token": None}, {"eos_token": "w99"}, {"eos_token": 36}])
def test_a_tokenizer_without_an_end_is_refused_with_the_key_of_the_config(settings, tmp_path):
    unended(tmp_path / "theirs", settings)
    with pytest.raises(RunError, match=r"eos_token_id: must be a whole number from 0 to 36, but is None") as error:
        import_folder(tmp_path / "theirs", tmp_path / "run")
    assert "write the right eos_token_id into config.json" in str(error.value)
