"""Batches from pairs."""

import pytest
import torch

from tfm_blocks.data.collate import collate
from tfm_blocks.data.prepare import prepare

PAD, BOS, EOS = 0, 1, 2


@pytest.fixture
def corpus(text):
    return prepare(text(), 300, seed=1, tell=lambda line: None).train


def test_rows_are_source_eos_and_bos_target_and_target_eos(corpus):
    batch = collate(corpus, [2, 0, 1])
    for row, pair in enumerate([2, 0, 1]):
        src, tgt = corpus.src_ids(pair).tolist(), corpus.tgt_ids(pair).tolist()
        for tensor, ids in (
            (batch.src_BS, [*src, EOS]),
            (batch.tgt_BT, [BOS, *tgt]),
            (batch.labels_BT, [*tgt, EOS]),
        ):
            assert tensor.dtype == torch.int64
            assert tensor[row].tolist() == ids + [PAD] * (tensor.shape[1] - len(ids))


def test_a_batch_is_as_wide_as_its_longest_row(corpus):
    batch = collate(corpus, [0, 1])
    assert batch.src_BS.shape == (2, max(corpus.src_lengths_N[:2]) + 1)
    assert batch.tgt_BT.shape == batch.labels_BT.shape == (2, max(corpus.tgt_lengths_N[:2]) + 1)


def test_an_empty_batch_has_labels_of_padding_alone(corpus):
    batch, empty = collate(corpus, [0]), collate(corpus, [0], empty=True)
    assert not empty.labels_BT.any()
    assert torch.equal(batch.src_BS, empty.src_BS) and torch.equal(batch.tgt_BT, empty.tgt_BT)
