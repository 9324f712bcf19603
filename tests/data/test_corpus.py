"""Encoded corpora hold what was written."""

import numpy as np
import pytest

from tfm_blocks.data import corpus as corpus_module
from tfm_blocks.data.corpus import Corpus, write_corpus
from tfm_blocks.data.tokenizer import Tokenizer

PAIRS = [("two  dogs", "zwei hunde"), ("", "leer"), ("a " * 50, "lang"), ("\u2028 🙂", " x\t"), ("  ", "blank")]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([text for pair in PAIRS for text in pair], 270)


def written(folder, tokenizer, max_length):
    write_corpus(folder, PAIRS, tokenizer, max_length=max_length)
    return Corpus(folder, tokenizer)


def test_every_pair_comes_back_in_order_as_ids_and_as_text(tmp_path, tokenizer):
    corpus = written(tmp_path, tokenizer, None)
    assert len(corpus) == len(PAIRS)
    for pair, (src, tgt) in enumerate(PAIRS):
        assert corpus.src_ids(pair).tolist() == tokenizer.encode(src)
        assert corpus.tgt_ids(pair).tolist() == tokenizer.encode(tgt)
        assert (corpus.src_lengths_N[pair], corpus.tgt_lengths_N[pair]) == (
            len(tokenizer.encode(src)),
            len(tokenizer.encode(tgt)),
        )
    assert list(zip(corpus.sources, corpus.references, strict=True)) == PAIRS
    assert corpus.sources[-2:] == [src for src, _ in PAIRS[-2:]]


def test_blank_and_long_pairs_are_skipped_and_counted(tmp_path, tokenizer):
    corpus = written(tmp_path, tokenizer, 20)
    assert corpus.skipped == {"blank": 2, "long": 1}
    assert list(corpus.sources) == [PAIRS[0][0], PAIRS[3][0]]


def test_a_pair_of_just_the_cap_is_kept(tmp_path, tokenizer):
    longest = max(len(tokenizer.encode(text)) for text in PAIRS[0])
    write_corpus(tmp_path, PAIRS[:1], tokenizer, max_length=longest)
    assert len(Corpus(tmp_path, tokenizer)) == 1


def test_the_chunk_that_is_encoded_at_a_time_changes_nothing(tmp_path, tokenizer, monkeypatch):
    whole, chunked = tmp_path / "whole", tmp_path / "chunked"
    for folder in (whole, chunked):
        folder.mkdir()
        write_corpus(folder, PAIRS, tokenizer, max_length=20)
        monkeypatch.setattr(corpus_module, "CHUNK", 2)
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == {
        path.name: path.read_bytes() for path in chunked.iterdir()
    }


def test_ids_are_views_of_the_file(tmp_path, tokenizer):
    corpus = written(tmp_path, tokenizer, None)
    assert isinstance(corpus.src_ids(0), np.memmap)
    assert corpus.src_ids(0).dtype == np.uint16
