"""Formats of files of pairs: the same pairs through each, and the errors of wrong ones."""

import gzip
import importlib
import json
import sys

import numpy as np
import pytest

from tfm_blocks.data.layout import Sides
from tfm_blocks.data.plan import epoch_plan
from tfm_blocks.data.prepare import prepare
from tfm_blocks.data.text import find_splits
from tfm_blocks.errors import ConfigError, DataError

FIELDS = {"src": "translation.en", "tgt": "translation.de"}
PAIRS = [(f"two dogs run {number} .", "  zwei hunde \U0001f642 " * (number % 5) + f"{number}") for number in range(60)]
PAIRS[7], PAIRS[9] = ("", "nichts"), ("a line\u2028 of one", "eine zeile")


def records():
    return [{"id": number, "translation": {"en": src, "de": tgt}} for number, (src, tgt) in enumerate(PAIRS)]


def zstd_open():
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name).open
        except ImportError:
            continue
    return pytest.skip("no zstd")


def write_columns(folder, end, open_file):
    for place, side in enumerate(("src", "tgt")):
        with open_file(folder / f"pairs.{side}{end}", "wb") as file:
            file.write("".join(f"{pair[place]}\n" for pair in PAIRS).encode())
    return {"train": {"src": f"pairs.src{end}", "tgt": f"pairs.tgt{end}"}}


def write_plain(folder):
    return write_columns(folder, "", open)


def write_gzip(folder):
    return write_columns(folder, ".gz", gzip.open)


def write_zstd(folder):
    return write_columns(folder, ".zst", zstd_open())


def write_jsonl(folder):
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records()))
    return {"fields": FIELDS, "train": "pairs.jsonl"}


def write_tsv(folder):
    lines = ["id\tde\ten", *(f"{number}\t{tgt}\t{src}" for number, (src, tgt) in enumerate(PAIRS))]
    (folder / "pairs.tsv").write_text("".join(f"{line}\n" for line in lines))
    return {"fields": {"src": "en", "tgt": "de"}, "train": "pairs.tsv"}


def write_tsv_without_names(folder):
    (folder / "pairs.tsv").write_text("".join(f"{src}\t{tgt}\n" for src, tgt in PAIRS))
    return {"fields": {"src": 1, "tgt": 2}, "train": "pairs.tsv"}


def write_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(records())
    importlib.import_module("pyarrow.parquet").write_table(table, folder / "pairs.parquet", row_group_size=7)
    return {"fields": FIELDS, "train": "pairs.parquet"}


def write_dataset(folder):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(records()).save_to_disk(str(folder / "saved" / "train"), num_shards=3)
    return {"fields": FIELDS, "train": "saved/train"}


def write_shards(folder):
    for number in range(3):
        for place, side in enumerate(("src", "tgt")):
            (folder / f"part-{number}.{side}").write_text(
                "".join(f"{pair[place]}\n" for pair in PAIRS[number * 20 : number * 20 + 20])
            )
    return {"train": {"src": "part-*.src", "tgt": ["part-0.tgt", "part-[12].tgt"]}}


def write_folder(folder):
    (folder / "shards").mkdir()
    (folder / "shards" / ".hidden").write_text("no text\n")
    for number in range(2):
        lines = [json.dumps(record) + "\n" for record in records()[number * 30 : number * 30 + 30]]
        with gzip.open(folder / "shards" / f"{number}.jsonl.gz", "wt") as file:
            file.write("".join(lines))
    return {"fields": FIELDS, "train": "shards"}


FORMATS = [
    write_gzip, write_zstd, write_jsonl, write_tsv, write_tsv_without_names, write_parquet, write_dataset, write_shards,
    write_folder,
]  # fmt: skip


@pytest.fixture
def pairs(text, tmp_path):
    """Return a function that writes the pairs as training and validation text in a format, and returns the settings."""

    def write(write_format):
        changes = write_format(tmp_path)
        return text(val=changes["train"], test=None, **changes)

    return write


def read(settings):
    """Return ids and text of the corpora and the plan of an epoch."""
    prepared = prepare(settings, 300, tell=lambda line: None)
    train, layout = prepared.train, Sides(["src"])
    plan = epoch_plan(layout.widths_NC(train), layout.labels_N(train), seed=1, epoch=2, step_tokens=99, batch_tokens=99)
    ids = {(column, row): train.ids(column, row).tolist() for column in train.columns for row in range(len(train))}
    return ids, train.skipped, list(prepared.val.text["src"]), list(prepared.val.text["tgt"]), [
        step.rows_N.tolist() for step in plan
    ]  # fmt: skip


@pytest.mark.parametrize("write_format", FORMATS, ids=lambda function: function.__name__.removeprefix("write_"))
def test_the_same_pairs_have_the_same_plan_in_every_format(pairs, write_format):
    assert read(pairs(write_format)) == read(pairs(write_plain))


def test_one_file_may_have_lines_and_the_other_fields(text, tmp_path):
    write_tsv(tmp_path), write_plain(tmp_path)
    files = {"src": "pairs.src", "tgt": "pairs.tsv"}
    settings = text(fields={"src": "en", "tgt": "de"}, train=files, val=files, test=None)
    assert list(find_splits(settings)["train"].rows()) == PAIRS


def test_another_field_of_the_same_files_is_another_corpus(text, tmp_path):
    (tmp_path / "t.tsv").write_text("a\tb\tc\n" * 3)
    one, other = (
        text(fields={"src": 1, "tgt": tgt}, train="t.tsv", val="t.tsv", test=None, tokenizer=None) for tgt in (2, 3)
    )
    train, other = (prepare(settings, 300, tell=lambda line: None).train for settings in (one, other))
    assert (list(train.text["tgt"]), list(other.text["tgt"])) == (["b"] * 3, ["c"] * 3)
    assert np.array_equal(train.ids("src", 0), other.ids("src", 0))


J = {"fields": {"src": "en", "tgt": "de"}, "train": "x.jsonl", "val": "x.jsonl", "test": None}
T = J | {"train": "x.tsv", "val": "x.tsv"}
GOOD = '{"en": "a", "de": "b"}\n'


@pytest.mark.parametrize(
    ("files", "changes", "place", "rule", "help"),
    [
        ({}, {"train": "a.jsonl"}, "data.train", "names no columns: 'a.jsonl'", "data.fields={src: FIELD"),
        ({}, J | {"fields": {"en": "a", "de": "b"}}, "data.fields", "must name a file for tgt", "{src: FILE"),
        ({}, J | {"train": {"src": "a", "style": "c", "tgt": "b"}}, "data.train", "but fields has src, tgt", "same order"),
        ({}, J | {"fields": {"src": "", "tgt": "b"}}, "data.fields.src", "must name a field, but is empty", "data.fields={src"),
        ({}, J, "data.train.src", "there is no file", "has test.src"),
        ({}, J | {"train": "x-*.jsonl"}, "data.train.src", "no file matches", "has test.src"),
        ({"1.src": ["a"], "2.src": ["b"]}, {"train": {"src": "?.src", "tgt": "train.tgt"}}, "data.train",
         "same number of files, but src has 2 and tgt has 1", "file N of a column"),
        ({"x.parquet": b"PAR1"}, {"train": {"src": "x.parquet", "tgt": "train.tgt"}}, "data.train",
         "x.parquet has fields, but data.fields does not name them", "data.fields={src: FIELD, tgt: FIELD}"),
        *(({name: [GOOD.strip()]}, {"train": {"src": name, "tgt": name}}, "data.train", f"{name} has fields, but", "data.fields={src")
          for name in ("x.jsonl", "x.tsv", "x.ndjson.gz")),
        ({"x.csv": ["en,de", "a,b"]}, J | {"train": "x.csv"}, "data.train", "x.csv would be read as plain lines", "to convert CSV"),
        ({"x.jsonl": [GOOD.strip(), '{"en": "a", "du": "b"}']}, J, "x.jsonl:2", "no key 'de'; its keys: 'en', 'du'", "data.fields"),
        ({"x.jsonl": ['{"en": "a", "de": ["b"]}']}, J, "x.jsonl:1", "'de' must be a string, but is ['b']", "data.fields"),
        ({"x.jsonl": ["a line"]}, J, "x.jsonl:1", "expects a JSON object, but the line is a line", "data.fields"),
        ({"x.tsv": ["en\tde", "a\tb", "a"]}, T, "x.tsv:3", "must have 2 cells, as the first line has, but has 1", "data.fields"),
        ({"x.tsv": ["en\tnl", "a\tb"]}, T, "x.tsv:2", "no key 'de'; its keys: 'en', 'nl'", "data.fields"),
        ({"x.tsv": ["a\tb"]}, T | {"fields": {"src": 1, "tgt": 3}}, "x.tsv:1", "no key '3'; its keys: '1', '2'", "data.fields"),
        ({"x.jsonl": [GOOD.strip()] * 4}, J | {"train": {"src": "x.jsonl", "tgt": "val.tgt"}}, "data.train",
         "same number of lines", "mixed versions"),
    ],
)  # fmt: skip
def test_wrong_formats_are_errors_with_place_rule_and_fix(text, files, changes, place, rule, help):
    with pytest.raises((ConfigError, DataError)) as error:
        list(find_splits(text(files, **changes))["train"].rows())
    assert place in str(error.value) and rule in str(error.value) and help in str(error.value)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("x.parquet", "pyarrow.parquet", "parquet"),
        ("x.tsv.zst", "backports.zstd", "zstd"),
        ("x", "datasets", "datasets"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(text, tmp_path, monkeypatch, name, package, extra):
    settings = text({} if name == "x" else {name: b"1"}, **T | {"train": name, "val": name})
    if name == "x":
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    for missing in (package, "compression.zstd"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        ConfigError, match=rf"needs the package {package.removesuffix('.parquet')}(.|\n)*tfm-blocks\[{extra}\]"
    ):
        list(find_splits(settings)["train"].rows())


def test_a_cut_zst_is_an_error_with_file_and_line(text, tmp_path):
    with zstd_open()(tmp_path / "whole.zst", "wb") as file:
        file.write("".join(f"{number} {number * 7919}\n" for number in range(200_000)).encode())
    whole = (tmp_path / "whole.zst").read_bytes()
    (tmp_path / "cut.zst").write_bytes(whole[: len(whole) // 2])
    files = {"src": "cut.zst", "tgt": "whole.zst"}
    with pytest.raises(DataError, match=r"the zstd file is damaged(.|\n)*cut\.zst:\d{2,}"):
        list(find_splits(text(train=files))["train"].rows())


def test_a_damaged_parquet_file_is_an_error_with_its_name(text):
    pytest.importorskip("pyarrow")
    settings = text({"x.parquet": b"PAR1 and no more"}, **J | {"train": "x.parquet", "val": "x.parquet"})
    with pytest.raises(DataError, match=r"cannot be read: (.|\n)*x\.parquet"):
        list(find_splits(settings)["train"].rows())


def test_a_column_that_parquet_lacks_is_named_with_its_columns(pairs, text, tmp_path):
    write_parquet(tmp_path)
    settings = text(fields={"src": "en", "tgt": "de"}, train="pairs.parquet", val="pairs.parquet", test=None)
    with pytest.raises(DataError, match=r"has no column en; its columns: id, translation"):
        list(find_splits(settings)["train"].rows())


def test_several_saved_datasets_are_named(text, tmp_path):
    write_dataset(tmp_path)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ConfigError, match=r"has several datasets: train(.|\n)*saved/train"):
        find_splits(text(**J | {"train": "saved"}))


def test_documents_are_read_from_tables(tmp_path):
    from tests.data.conftest import read_data
    from tfm_blocks.data.documents import find_document_splits

    write_parquet(tmp_path)
    sizes = {"step_tokens": 64, "batch_tokens": 64, "context": 8}
    files = {"dir": str(tmp_path), "train": "pairs.parquet", "val": "pairs.parquet", "test": None}
    settings = read_data({"kind": "lm", "text_key": "translation.de"} | files | sizes)
    assert [text for (text,) in find_document_splits(settings)["train"].rows()] == [tgt for _, tgt in PAIRS]
