"""From settings to prepared data."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from string import ascii_lowercase

import pytest
import yaml

from tests.data.conftest import prepared, read_data
from tfm_blocks.data import prepare as prepare_module
from tfm_blocks.data.prepare import prepare
from tfm_blocks.data.tokenizer import MASK, Tokenizer
from tfm_blocks.data.vocabulary import sentinel
from tfm_blocks.errors import ConfigError, DataError

MULTI30K = os.environ.get("TFM_BLOCKS_MULTI30K")


def test_dates_come_with_a_language_for_each_held_out_pair(dates, tmp_path):
    data, lines = prepared(dates(cache=str(tmp_path)), vocab=2000)
    assert (len(data.train), len(data.val), len(data.test)) == (2000, 50, 50)
    assert set(data.test.groups) == {"en", "de", "fr", "es", "it"} and len(data.test.groups) == 50
    assert data.test.text["tgt"][0].count("-") == 2
    assert any(f"{data.tokenizer.size:,} subwords, 2,000 requested" in line for line in lines)


def test_a_corpus_in_another_cache_has_the_same_hash(dates, tmp_path):
    """A run resumes on another machine, or after its cache was deleted, and ranks may have separate caches."""
    one, other = (prepared(dates(cache=str(tmp_path / name)))[0] for name in ("one", "other"))
    changed, _ = prepared(dates(cache=str(tmp_path / "one"), seed=8))
    for split in ("train", "val", "test"):
        assert getattr(one, split).sha256 == getattr(other, split).sha256 != getattr(changed, split).sha256


def test_text_is_restored_and_has_no_groups(text, sentences):
    data, _ = prepared(text())
    assert list(data.val.text["src"]) == sentences["src"] and list(data.test.text["tgt"]) == sentences["tgt"]
    assert data.val.groups == ()


def test_add_prefix_space_is_a_setting_of_text_and_has_a_tokenizer_of_its_own_in_the_cache(text, sentences):
    without, with_space = (prepared(text(add_prefix_space=add))[0] for add in (False, True))
    assert without.tokenizer.encode("a a") != without.tokenizer.encode("a") * 2
    assert with_space.tokenizer.encode("a a") == with_space.tokenizer.encode("a") * 2
    assert list(with_space.val.text["src"]) == list(without.val.text["src"]) == sentences["src"]


def test_a_split_that_is_not_there_is_neither_read_nor_reported(text, tmp_path):
    settings = text(test=None)
    (tmp_path / "test.src").unlink()
    data, lines = prepared(settings)
    assert data.test is None and data.last_scored == ("val", data.val)
    assert not any(" test pairs" in line for line in lines)


def test_skipped_training_pairs_are_counted_aloud_and_held_out_lines_all_stay(text):
    src, tgt = ["a dog", "", "word " * 90, "x"], ["ein hund", "leer", "lang", " \t"]
    files = {f"{split}.{side}": lines for split in ("train", "val") for side, lines in (("src", src), ("tgt", tgt))}
    data, lines = prepared(text(files))
    assert "data: 1 train pairs (skipped: 2 with a blank side, 1 longer than 60 tokens)" in lines
    assert "data: 4 val pairs" in lines
    assert list(zip(data.val.text["src"], data.val.text["tgt"], strict=True)) == list(zip(src, tgt, strict=True))
    assert prepared(text(files))[1] == lines, "a second run, from the cache, says the same"


def test_lines_without_an_end_are_skipped_in_training_and_cut_where_they_are_held_out(text):
    src, tgt = ["".join(Random(1).choices(ascii_lowercase, k=1_000_000)), "a dog"], ["lang", "ein hund"]
    _, lines = prepared(text({"train.src": src, "train.tgt": tgt, "val.src": src, "val.tgt": tgt}))
    assert "data: 1 train pairs (skipped: 1 longer than 60 tokens)" in lines
    assert "data: 2 val pairs (cut: 1 to 4,096 tokens a side)" in lines


def test_a_second_run_trains_no_tokenizer_and_encodes_nothing(text, monkeypatch):
    first, _ = prepared(text())

    def never(*arguments, **keywords):
        raise AssertionError("was to come from the cache")

    monkeypatch.setattr(prepare_module, "write_corpus", never)
    monkeypatch.setattr(prepare_module.Tokenizer, "train", never)
    second, _ = prepared(text())
    assert second.tokenizer.text == first.tokenizer.text


def test_changed_text_is_read_again(text):
    prepared(text())
    data, _ = prepared(text({"val.src": ["other", "words", "here"]}))
    assert list(data.val.text["src"]) == ["other", "words", "here"]


def test_a_mistake_in_the_test_files_is_an_error_before_the_tokenizer_is_trained(text, tmp_path):
    with pytest.raises(DataError, match=r"data\.test"):
        prepared(text({"test.src": ["one line"]}))
    assert not list((tmp_path / "cache").glob("*/*"))


@pytest.mark.parametrize("content", [[], ["", " "], ["word " * 90]])
def test_a_training_text_without_a_usable_pair_is_an_error(text, content):
    with pytest.raises(DataError, match=r"data\.train: has no usable rows"):
        prepared(text({"train.src": content, "train.tgt": content}))


def test_a_small_vocabulary_is_refused(text):
    with pytest.raises(ConfigError, match="vocab"):
        prepared(text(), vocab=100)


@pytest.mark.parametrize(
    ("special", "rule", "help"),
    [
        ([MASK], "has no mask token", "data.tokenizer=null"),
        ([sentinel(number) for number in range(5)], "has 3 of the 5 sentinels", "write objective.sentinels=3"),
    ],
)
def test_a_tokenizer_without_the_tokens_of_an_objective_is_refused(text, tmp_path, special, rule, help):
    Tokenizer.train(["a b"], 300, special=[sentinel(number) for number in range(3)]).save(tmp_path / "tokenizer.json")
    settings = text(tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=rule) as caught:
        prepare(settings, 300, special=special)
    (problem,) = caught.value.problems
    assert problem.address == "data.tokenizer" and help in problem.help


def test_large_text_is_sampled_evenly_for_the_tokenizer(text, monkeypatch):
    lines = ["early early"] * 4 + ["lateword lateword"] * 4
    monkeypatch.setattr(prepare_module, "SAMPLE", 4)
    data, _ = prepared(text({"train.src": lines, "train.tgt": lines}))
    assert len(data.tokenizer.encode("lateword")) == len(data.tokenizer.encode("early")) == 1


@pytest.mark.grid
def test_two_processes_prepare_the_same_at_once(conf, tmp_path):
    code = f"""
import yaml
from tfm_blocks.data.prepare import prepare
from tfm_blocks.data.pair_settings import (DatesSettings)
mapping = yaml.safe_load(open({str(conf / "dates.yaml")!r}))
changes = dict(train=3000, val=50, test=50, cache={str(tmp_path)!r})
data = prepare(DatesSettings(**mapping | changes), 1000)
print(data.train.text["src"][17], data.train.ids("src", 17).tolist())
"""
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    assert len(list((tmp_path / "corpora").iterdir())) == 3


@pytest.mark.skipif(not MULTI30K, reason="set TFM_BLOCKS_MULTI30K to the folder of the corpus")
@pytest.mark.parametrize("name", ["multi30k", "multi30k_raw"])
def test_multi30k_is_read_whole(name, conf, tmp_path):
    mapping = {}
    for file in ("text", name):
        mapping |= yaml.safe_load((conf / f"{file}.yaml").read_text())
    del mapping["defaults"]
    data, lines = prepared(read_data(mapping | {"dir": str(Path(MULTI30K)), "cache": str(tmp_path)}), vocab=10_000)
    assert (len(data.train), len(data.val), len(data.test)) == (29_000, 1014, 1000), lines
    assert data.tokenizer.size == 10_000


def test_of_each_split_the_first_rows_are_read_and_nothing_after_them(text, sentences, tmp_path):
    whole, _ = prepared(text())
    settings = text().model_copy(update={"first": 2})
    for split in ("train", "val", "test"):
        for side in ("src", "tgt"):
            path = tmp_path / f"{split}.{side}"
            path.write_bytes(path.read_bytes() + b"\xff not UTF-8, far below\n")
    data, _ = prepared(settings)
    for split in ("train", "val", "test"):
        few, all_of_them = getattr(data, split), getattr(whole, split)
        assert len(few) == 2 < len(all_of_them)
        assert list(few.text["src"]) == list(all_of_them.text["src"])[:2]


def test_dates_keep_their_languages_where_only_the_first_are_read(dates):
    data, _ = prepared(dates().model_copy(update={"first": 7}))
    assert len(data.val) == len(data.val.groups) == 7


NOISY = {
    "src": ["a house", "a house ", "same", "b", "1 2 3 x", "", "a boat", "one two three four five six", "a house"],
    "tgt": ["ein haus", "ein haus", " same", "ein b", "eins zwei", "leer", "e\u0301 \u0917\u093e", "x", "das haus"],
}


def slow_letters(text):
    kept = [char for char in text if char != " "]
    return sum(char.isalpha() or char in "\u0301\u093e" for char in kept) / len(kept)


@pytest.mark.parametrize(
    ("clean", "reason", "dropped", "report"),
    [
        ({}, "", [], ""),
        ({"duplicates": True}, "duplicate", [1], "1 equal to an earlier one"),
        ({"identical": True}, "identical", [2], "1 with identical sides"),
        ({"min_letters": 0.5}, "letters", [4], "1 with fewer letters than 50 %"),
        ({"min_length": 3}, "short", "tokens", "shorter than 3 tokens"),
        ({"max_ratio": 4}, "ratio", "tokens", "with a side more than 4 times as long as another"),
        ({"max_ratio": 1.0}, "ratio", "tokens", "with a side more than 1 times as long as another"),
    ],
)
def test_cleaning_skips_and_counts_training_pairs_and_keeps_held_out_ones(text, clean, reason, dropped, report):
    files = {f"{split}.{side}": lines for side, lines in NOISY.items() for split in ("train", "val")}
    data, lines = prepared(text(files, clean=clean))
    rows = [(src.strip(), tgt.strip()) for src, tgt in zip(NOISY["src"], NOISY["tgt"], strict=True)]
    if dropped == "tokens":
        lengths = [[len(data.tokenizer.encode(side)) for side in pair] for pair in zip(*NOISY.values(), strict=True)]
        least, ratio = clean.get("min_length", 1), clean.get("max_ratio", 1e9)
        dropped = [
            row for row, pair in enumerate(lengths) if min(pair) < least or max(pair) / max(min(pair), 1) > ratio
        ]
        assert 0 < len(dropped) < len(rows)
    dropped = [row for row in dropped if all(rows[row])]
    kept = [pair for row, pair in enumerate(rows) if all(pair) and row not in dropped]
    assert [(src.strip(), tgt.strip()) for src, tgt in zip(*data.train.text.values(), strict=True)] == kept
    assert data.train.skipped == {"blank": 1, "long": 0} | ({reason: len(dropped)} if dropped else {})
    assert len(data.val) == len(rows) and data.val.skipped == {"blank": 0, "long": 0}
    assert report in lines[0]
    if least_letters := clean.get("min_letters"):
        assert [row for row, pair in enumerate(rows) if all(pair) and min(map(slow_letters, pair)) < least_letters] == [
            4
        ]


def test_a_pair_is_counted_under_the_first_rule_that_it_breaks(text):
    files = {"train.src": ["x", "x", "1", "ok a"], "train.tgt": ["x", "x", "1", "ok b"]}
    rules = {"identical": True, "duplicates": True, "min_letters": 0.5}
    assert prepared(text(files, clean=rules))[0].train.skipped == {"blank": 0, "long": 0, "identical": 3}


def test_rules_that_skip_everything_are_an_error_that_names_them(text):
    files = {"train.src": ["x"], "train.tgt": ["x"]}
    with pytest.raises(DataError, match=r"data\.train: has no usable rows(.|\n)*or breaks a rule of data\.clean"):
        prepared(text(files, clean={"identical": True}))


@pytest.mark.parametrize(
    ("clean", "rule"),
    [
        ({"min_length": 0}, r"data\.clean\.min_length: must be at least 1, but is 0"),
        ({"min_length": 61}, r"data\.clean: min_length must be at most data\.max_length, 60, but is 61"),
        ({"max_ratio": 0.5}, r"data\.clean\.max_ratio: must be at least 1, but is 0\.5"),
        ({"min_letters": 50}, r"data\.clean\.min_letters: must be at most 1, but is 50"),
        ({"identical": "yes"}, r"data\.clean\.identical: must be a bool, but is 'yes'"),
        ({"duplicate": True}, r"data\.clean\.duplicate: no such setting(.|\n)*duplicates"),
        ({"min_length": "3"}, r"data\.clean\.min_length: must be an int or null"),
        (True, r"data\.clean: must be a mapping"),
    ],
)
def test_wrong_rules_are_errors(text, clean, rule):
    with pytest.raises(ConfigError, match=rule):
        text(clean=clean)


@pytest.mark.parametrize("predict", ["class", "several", "number", "words"])
def test_a_blank_line_of_held_out_labels_is_an_error_and_no_label(text, predict):
    right = {"class": "x", "several": "x y", "number": "1.5", "words": "x y"}[predict]
    files = {f"{split}.src": ["a b", "", "c d"] for split in ("train", "val")}
    files |= {f"{split}.tgt": [right, "", right] for split in ("train", "val")}
    base = text(files).model_dump() | {"kind": "labels", "predict": predict, "test": None}
    settings = read_data(base | {"labels": None if predict == "number" else ["x", "y"]})
    with pytest.raises(DataError, match=r"data\.val: row 2 (has|must be)"):
        prepared(settings)
