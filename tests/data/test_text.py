"""Invalid and unusual text files."""

import bz2
import gzip
import lzma

import pytest

from tfm_blocks.data.text import find_splits
from tfm_blocks.errors import ConfigError, DataError


def train_pairs(settings):
    return list(find_splits(settings)["train"].rows())


def train(src, tgt):
    return {"train.src": src, "train.tgt": tgt}


def test_lines_are_paired_as_written(text):
    assert train_pairs(text())[1] == ("two dogs run .", "zwei hunde laufen .")


def test_gzipped_and_plain_files_read_the_same(text):
    zipped = text({"z.src.gz": [" a  b ", ""], "z.tgt.gz": ["é", "🙂"]}, train={"src": "z.src.gz", "tgt": "z.tgt.gz"})
    assert train_pairs(zipped) == train_pairs(text(train([" a  b ", ""], ["é", "🙂"]))) == [(" a  b ", "é"), ("", "🙂")]


def test_only_line_feeds_end_a_line(text):
    odd = "a\u2028b\u0085c\x0bd\x0ce\x1cf\rg"
    assert train_pairs(text(train([odd], ["x"]))) == [(odd, "x")]


def test_windows_line_ends_and_a_byte_order_mark_are_no_text(text):
    assert train_pairs(text(train(b"\xef\xbb\xbfa\r\nb\r\n", ["x", "y"]))) == [("a", "x"), ("b", "y")]


def test_the_last_line_needs_no_end(text):
    assert train_pairs(text(train(b"a\nb", b"x\ny\n"))) == [("a", "x"), ("b", "y")]


def test_every_missing_file_is_named_with_its_key(text, tmp_path):
    settings = text()
    (tmp_path / "train.tgt").unlink()
    (tmp_path / "val.src").unlink()
    with pytest.raises(ConfigError) as error:
        find_splits(settings)
    assert [problem.address for problem in error.value.problems] == ["data.train.tgt", "data.val.src"]
    assert str(tmp_path / "train.tgt") in str(error.value) and "test.src" in error.value.problems[0].help


def test_a_missing_folder_is_an_error(text, tmp_path):
    with pytest.raises(ConfigError, match=r"folder .*nowhere does not exist either: write data\.dir=PATH"):
        find_splits(text(dir=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(("src", "tgt", "counts"), [(["a"] * 5, ["b"] * 3, "5 3"), (["a"] * 3, ["b"] * 5, "3 5")])
def test_unequal_line_counts_are_an_error_with_both_counts(text, src, tgt, counts):
    first, second = counts.split()
    with pytest.raises(DataError, match=rf"data\.train: .* has {first} and .* has {second} lines"):
        train_pairs(text(train(src, tgt)))


def test_a_byte_that_is_not_utf8_is_an_error_with_file_and_line(text, tmp_path):
    with pytest.raises(DataError) as error:
        train_pairs(text(train(["a", "b"], b"x\nM\xe4rz\n")))
    assert "0xe4" in str(error.value) and f"{tmp_path / 'train.tgt'}:2:2" in str(error.value)


@pytest.mark.parametrize(
    ("begin", "kind", "help"),
    [
        (
            gzip.compress(b"ein Haus\n" * 9, mtime=0),
            "compressed with gzip, but its name does not end in .gz",
            "mv train.tgt train.tgt.gz",
        ),
        (lzma.compress(b"ein Haus\n" * 9), "compressed with xz", "xz -d train.tgt"),
        (bz2.compress(b"ein Haus\n" * 9), "compressed with bzip2", "bzip2 -d train.tgt"),
        (bytes.fromhex("28b52ffd2400") + b"\xff\n", "compressed with zstd, but", "mv train.tgt train.tgt.zst"),
        ("Häuser\n".encode("utf-16"), "UTF-16 text", "iconv -f utf-16 -t utf-8 train.tgt"),
    ],
    ids=["gzip", "xz", "bzip2", "zstd", "utf-16"],
)
def test_a_file_of_another_kind_is_named(text, begin, kind, help):
    with pytest.raises(
        DataError, match=rf"must be UTF-8 text, plain, \.gz or \.zst, but the file is {kind}(.|\n)*{help}"
    ):
        train_pairs(text(train(["a", "b"], begin)))


def test_a_compressed_file_of_latin1_is_not_called_compressed(text):
    files = {"z.src.gz": "x\nMärz\n".encode("latin1"), "z.tgt.gz": b"a\nb\n"}
    with pytest.raises(DataError, match=r"must be UTF-8, but has the byte 0xe4 at position 2") as error:
        train_pairs(text(files, train={"src": "z.src.gz", "tgt": "z.tgt.gz"}))
    assert error.value.problems[0].help.startswith("decompress it, then iconv -f latin1 -t utf-8 z.src,")


def test_a_list_of_files_for_a_setting_of_one_is_an_error(text):
    with pytest.raises(ConfigError, match=r"data\.dir: must be a str, but is the list \['a', 'b'\]"):
        text(dir=["a", "b"])


def test_a_cut_gzip_is_an_error_with_file_and_line(text):
    whole = gzip.compress("".join(f"{number} {number * 7919}\n" for number in range(20_000)).encode())
    files = {"z.src.gz": whole[: len(whole) // 2], "z.tgt.gz": whole}
    with pytest.raises(DataError, match=r"damaged(.|\n)*z\.src\.gz:\d{2,}"):
        train_pairs(text(files, train={"src": "z.src.gz", "tgt": "z.tgt.gz"}))


def test_plain_text_called_gz_is_an_error(text, tmp_path):
    settings = text({"z.src.gz": ["a"], "z.tgt.gz": ["b"]}, train={"src": "z.src.gz", "tgt": "z.tgt.gz"})
    (tmp_path / "z.src.gz").write_text("a\n")
    with pytest.raises(DataError, match="damaged"):
        train_pairs(settings)


def test_the_fingerprint_follows_the_content(text):
    one, same, other = (find_splits(text(files))["train"].fingerprint for files in ({}, {}, train(["a"], ["b"])))
    assert one == same != other


def test_the_home_folder_of_nobody_is_a_wrong_setting(text):
    with pytest.raises(ConfigError, match=r"data\.dir: .* user that does not exist: ~nouser/x"):
        find_splits(text(dir="~nouser/x"))
