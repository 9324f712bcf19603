"""Datasets by name, which the library datasets reads; a folder stands for a name, because tests have no network."""

import json
import sys

import pytest

from tests.data.conftest import SENTENCES, pairs, read_data
from tfm_blocks.data.prepare import prepare
from tfm_blocks.errors import ConfigError, DataError

PAIRS = [{"en": src, "de": tgt} for src, tgt in zip(SENTENCES["src"], SENTENCES["tgt"], strict=True)]
SPLITS = {"train": "train", "val": "validation", "test": "test"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "named").mkdir()
    for number, name in enumerate(SPLITS.values()):
        rows = PAIRS[number:] + PAIRS[:number]
        (tmp_path / "named" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path / "named"


def settings_of(folder, **changes):
    sizes = {"step_tokens": 200, "batch_tokens": 200, "max_length": 60, "cache": str(folder.parent / "cache")}
    return read_data({"kind": "text", "fields": {"src": "en", "tgt": "de"}} | sizes | changes)


def test_a_dataset_by_name_has_the_rows_of_its_splits(folder):
    pytest.importorskip("datasets")
    named = prepare(settings_of(folder, dir=f"hub:{folder}", **SPLITS), 300, lambda text: None)
    files = {split: f"{name}.jsonl" for split, name in SPLITS.items()}
    read = prepare(settings_of(folder, dir=str(folder), **files), 300, lambda text: None)
    for split in SPLITS:
        assert pairs(getattr(named, split)) == pairs(getattr(read, split))
    again = prepare(settings_of(folder, dir=f"hub:{folder}", **SPLITS), 300, lambda text: None)
    assert again.train.sha256 == named.train.sha256 == read.train.sha256
    mixed = {"dir": ".", "mix": {"a": {"dir": f"hub:{folder}", **SPLITS}, "b": {"dir": str(folder), **files}}}
    together = prepare(settings_of(folder, **files | mixed), 300, lambda text: None)
    assert pairs(together.train) == pairs(read.train) * 2


def test_a_cache_in_the_working_folder_and_a_home_folder_work_and_each_dataset_is_read_once(folder, monkeypatch):
    datasets, reads = pytest.importorskip("datasets"), []
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *name, split: reads.append((name, split)) or load(*name, split=split)
    )
    settings = settings_of(folder, dir="hub:~/named", cache="cache", **SPLITS | {"test": None})
    assert pairs(prepare(settings, 300, lambda text: None).train) == [tuple(pair.values()) for pair in PAIRS]
    assert reads == [((str(folder),), ["train", "validation"])]


def test_a_wrong_column_or_configuration_is_an_error_with_the_setting_that_names_it(folder):
    pytest.importorskip("datasets")
    sizes = {"step_tokens": 64, "batch_tokens": 64, "cache": str(folder.parent / "cache"), "test": None}
    plain = {"kind": "lm", "dir": f"hub:{folder}", "train": "train", "val": "validation", "context": 16}
    with pytest.raises(ConfigError, match=r"data\.dir: names no dataset(.|\n)*data\.dir=hub:NAME"):
        prepare(settings_of(folder, dir="hub:", **SPLITS), 300, lambda text: None)
    with pytest.raises(ConfigError, match=r"cannot be read(.|\n)*load_dataset\('.*named', 'other'\)\.save_to_disk"):
        prepare(settings_of(folder, dir=f"hub:{folder}:other", **SPLITS), 300, lambda text: None)
    with pytest.raises(DataError, match=r"has no column text; its columns: en, de(.|\n)*data\.text_key=COLUMN"):
        prepare(read_data(plain | sizes), 300, lambda text: None)


def test_an_unknown_split_or_name_is_an_error_with_a_fix(folder, monkeypatch):
    pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match=r"has no split nothing; its splits: '?train"):
        prepare(settings_of(folder, dir=f"hub:{folder}", **SPLITS | {"train": "nothing"}), 300, lambda text: None)
    with pytest.raises(
        ConfigError, match=r"data\.dir: the dataset .*elsewhere cannot be read(.|\n)*save_to_disk"
    ) as error:
        prepare(settings_of(folder, dir=f"hub:{folder}/elsewhere", **SPLITS), 300, lambda text: None)
    assert "data.dir=PATH reads it" in error.value.problems[0].help


def test_without_the_package_a_name_is_an_error_with_its_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"needs the package datasets, which is not installed(.|\n)*tfm-blocks\[datasets\]"
    ):
        prepare(settings_of(folder, dir=f"hub:{folder}", **SPLITS), 300, lambda text: None)
