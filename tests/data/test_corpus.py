"""Encoded corpora hold the rows that were written."""

import pickle

import numpy as np
import pytest
from tokenizers import Tokenizer as Pieces
from tokenizers import models, normalizers, pre_tokenizers

from tfm_blocks.data import encoding as encoding_module
from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.encoding import LONGEST, write_corpus, write_labelled, write_packed
from tfm_blocks.data.labels import LabelCoder
from tfm_blocks.data.published_libraries import published_tokenizer
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.vocabulary import Vocabulary

PAIRS = [("two  dogs", "zwei hunde"), ("", "leer"), ("a " * 50, "lang"), ("\u2028 🙂", " x\t"), ("  ", "blank")]

COLUMNS = ("src", "tgt")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([text for pair in PAIRS for text in pair], 270)


def written(folder, tokenizer, max_length):
    write_corpus(folder, COLUMNS, PAIRS, tokenizer, max_length=max_length)
    return Corpus(folder, tokenizer)


def test_every_pair_is_restored_in_order_as_ids_and_as_text(tmp_path, tokenizer):
    corpus = written(tmp_path, tokenizer, None)
    assert len(corpus) == len(PAIRS)
    for pair, (src, tgt) in enumerate(PAIRS):
        assert corpus.ids("src", pair).tolist() == tokenizer.encode(src)
        assert corpus.ids("tgt", pair).tolist() == tokenizer.encode(tgt)
        assert tuple(corpus.lengths_NC[pair]) == (
            len(tokenizer.encode(src)),
            len(tokenizer.encode(tgt)),
        )
    assert list(zip(corpus.text["src"], corpus.text["tgt"], strict=True)) == PAIRS
    assert corpus.text["src"][-2:] == [src for src, _ in PAIRS[-2:]]


def test_a_pickled_corpus_opens_its_folder_again(tmp_path, tokenizer):
    rows = [("two dogs " * 10, "zwei hunde " * 10)] * 5000
    write_corpus(tmp_path, COLUMNS, rows, tokenizer, max_length=None)
    corpus = Corpus(tmp_path, tokenizer, ["group"])
    pickled = pickle.dumps(corpus)
    assert len(pickled) < (tmp_path / "ids.bin").stat().st_size / 10
    copy = pickle.loads(pickled)
    assert copy.ids("tgt", 4999).tolist() == corpus.ids("tgt", 4999).tolist()
    assert copy.text["src"][4999] == rows[4999][0] and copy.groups == ["group"]


def test_held_out_text_is_the_original_with_a_tokenizer_that_normalises(tmp_path):
    pieces = Pieces(models.WordLevel({"two": 0, "dogs": 1, "?": 2}, unk_token="?"))
    pieces.pre_tokenizer, pieces.normalizer = pre_tokenizers.WhitespaceSplit(), normalizers.Lowercase()
    tokenizer = published_tokenizer(Vocabulary(5, 3, 4), {"tokenizer.json": pieces.to_str().encode()}, "words")
    pairs = [("Two  dogs", "Zwei Hunde"), ("", "dogs"), ("two", "dogs " * (LONGEST + 1))]
    write_corpus(tmp_path, COLUMNS, pairs, tokenizer, max_length=None)
    corpus = pickle.loads(pickle.dumps(Corpus(tmp_path, tokenizer)))
    cut = ("two", " ".join(["dogs"] * LONGEST))
    assert [tuple(row.values()) for row in corpus.rows(slice(None))] == [*pairs[:2], cut]
    assert tokenizer.decode(corpus.ids("src", 0).tolist()) == "two dogs"


def test_blank_and_long_pairs_are_skipped_and_counted(tmp_path, tokenizer):
    corpus = written(tmp_path, tokenizer, 20)
    assert corpus.skipped == {"blank": 2, "long": 1} and corpus.cut == 0
    assert list(corpus.text["src"]) == [PAIRS[0][0], PAIRS[3][0]]


def test_held_out_text_without_an_end_is_cut_and_counted(tmp_path, tokenizer):
    pairs = [("x" * 1_000_000, "short"), PAIRS[0], ("y" * LONGEST, "z" * (LONGEST + 1))]
    write_corpus(tmp_path, COLUMNS, pairs, tokenizer, max_length=None)
    corpus = Corpus(tmp_path, tokenizer)
    assert corpus.cut == 2 and len(corpus) == 3
    assert corpus.text["src"][:] == ["x" * LONGEST, PAIRS[0][0], "y" * LONGEST]
    assert corpus.text["tgt"][:] == ["short", PAIRS[0][1], "z" * LONGEST]


def test_a_pair_of_just_the_cap_is_kept(tmp_path, tokenizer):
    longest = max(len(tokenizer.encode(text)) for text in PAIRS[0])
    write_corpus(tmp_path, COLUMNS, PAIRS[:1], tokenizer, max_length=longest)
    assert len(Corpus(tmp_path, tokenizer)) == 1


def test_the_chunk_that_is_encoded_at_a_time_changes_nothing(tmp_path, tokenizer, monkeypatch):
    whole, chunked = tmp_path / "whole", tmp_path / "chunked"
    for folder in (whole, chunked):
        folder.mkdir()
        write_corpus(folder, COLUMNS, PAIRS, tokenizer, max_length=20)
        monkeypatch.setattr(encoding_module, "CHUNK", 2)
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == {
        path.name: path.read_bytes() for path in chunked.iterdir()
    }


def test_ids_are_views_of_the_file(tmp_path, tokenizer):
    corpus = written(tmp_path, tokenizer, None)
    assert isinstance(corpus.ids("src", 0).base.base, np.memmap)
    assert corpus.ids("src", 0).dtype == np.uint16


def test_more_classes_than_16_bits_count_are_stored(tmp_path, tokenizer):
    labels = LabelCoder("class", tuple(map(str, range(1 << 16))))
    rows = [("two dogs", "65535"), ("hunde", "0")]
    write_labelled(tmp_path, COLUMNS, rows, tokenizer, labels, "data.train", max_length=None)
    assert list(Corpus(tmp_path, tokenizer, labels=labels).text["tgt"]) == ["65535", "0"]


def test_plain_text_is_packed_into_rows_with_eos_after_each_line(tmp_path, tokenizer):
    lines = ["two  dogs", "", "zwei hunde", "lang"]
    write_packed(tmp_path, "tgt", lines, tokenizer, context=5)
    corpus = Corpus(tmp_path, tokenizer)
    expected = [id for line in lines if line for id in [*tokenizer.encode(line), tokenizer.EOS]]
    rows = [corpus.ids("tgt", row).tolist() for row in range(len(corpus))]
    assert [id for row in rows for id in row] == expected
    assert all(len(row) == 5 for row in rows[:-1]) and 0 < len(rows[-1]) <= 5
    assert corpus.skipped["blank"] == 1
