"""Batches from the rows of a corpus, as each kind of model reads them."""

import numpy as np
import pytest
import torch

from tfm_blocks.data.corpus import Corpus, write_corpus, write_packed
from tfm_blocks.data.layout import OneSequence, PlainText, Sides, layout_of
from tfm_blocks.data.tokenizer import Tokenizer

PAD, BOS, EOS = 0, 1, 2
ROWS = [("a red house", "a page", "ein rotes Haus"), ("dogs", "two pages", "hunde"), ("a", "b", "c d e")]
COLUMNS = ("src", "doc", "tgt")
tokenizer = Tokenizer.train([text for row in ROWS for text in row], 280)


@pytest.fixture
def corpus(tmp_path):
    write_corpus(tmp_path, COLUMNS, ROWS, tokenizer, max_length=None)
    return Corpus(tmp_path, tokenizer)


def ids(row, column):
    return tokenizer.encode(ROWS[row][COLUMNS.index(column)])


def padded(rows):
    width = max(map(len, rows))
    return [row + [PAD] * (width - len(row)) for row in rows]


def test_sources_end_in_eos_and_the_target_is_shifted_by_one(corpus):
    batch = Sides(["src", "doc"]).batch(corpus, [2, 0])
    assert list(batch.inputs) == ["src", "doc", "tgt"]
    for name in ("src", "doc"):
        assert batch.inputs[name].tolist() == padded([[*ids(row, name), EOS] for row in (2, 0)])
    assert batch.inputs["tgt"].tolist() == padded([[BOS, *ids(row, "tgt")] for row in (2, 0)])
    assert batch.labels_BT.tolist() == padded([[*ids(row, "tgt"), EOS] for row in (2, 0)])
    assert all(tensor.dtype == torch.int64 for tensor in (*batch.inputs.values(), batch.labels_BT))


def test_without_sources_all_columns_are_one_sequence_of_which_the_target_counts(corpus):
    batch = OneSequence().batch(corpus, [0, 1])
    rows, labels = [], []
    for row in (0, 1):
        before = [*ids(row, "src"), EOS, *ids(row, "doc"), EOS]
        rows.append([*before, BOS, *ids(row, "tgt")])
        labels.append([PAD] * len(before) + [*ids(row, "tgt"), EOS])
    assert batch.inputs["tgt"].tolist() == padded(rows)
    assert batch.labels_BT.tolist() == padded(labels)


def test_packed_text_is_predicted_whole(tmp_path):
    write_packed(tmp_path, "tgt", [row[2] for row in ROWS], tokenizer, context=4)
    corpus = Corpus(tmp_path, tokenizer)
    batch = PlainText().batch(corpus, [0, len(corpus) - 1])
    rows = [corpus.ids("tgt", row).tolist() for row in (0, len(corpus) - 1)]
    assert batch.labels_BT.tolist() == padded(rows)
    assert batch.inputs["tgt"].tolist() == padded([[BOS, *row[:-1]] for row in rows])


@pytest.mark.parametrize(
    "layout", [Sides(["src", "doc"]), Sides(["doc"]), OneSequence()], ids=["two sources", "one source", "one sequence"]
)
def test_widths_and_labels_are_those_of_the_batches(corpus, layout):
    for row in range(len(ROWS)):
        batch = layout.batch(corpus, [row])
        assert [batch.inputs[name].shape[1] for name in layout.inputs] == layout.widths_NC(corpus)[row].tolist()
        assert (batch.labels_BT != 0).sum() == layout.labels_N(corpus)[row]


@pytest.mark.parametrize("layout", [Sides(["src"]), OneSequence()], ids=["one source", "one sequence"])
def test_an_empty_batch_has_labels_of_padding_alone(corpus, layout):
    batch, empty = layout.batch(corpus, [0]), layout.batch(corpus, [0], empty=True)
    assert batch.labels_BT.any() and not empty.labels_BT.any()
    assert all(torch.equal(batch.inputs[name], empty.inputs[name]) for name in batch.inputs)


def test_the_model_and_the_columns_decide_how_a_corpus_is_read():
    assert isinstance(layout_of(("src", "tgt"), ["src"]), Sides)
    assert isinstance(layout_of(("src", "tgt"), []), OneSequence)
    assert isinstance(layout_of(("tgt",), []), PlainText)
    assert np.array_equal(layout_of(("src", "doc", "tgt"), ["doc"]).inputs, ("doc", "tgt"))
