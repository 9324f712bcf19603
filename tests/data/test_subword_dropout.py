"""BPE-dropout: equal to a slow version, a function of seed, epoch and row, and absent from scores."""

import json
import pickle
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from tests.data.conftest import prepared
from tests.data.test_mix import BACK_FILES, FILES, contents, steps
from tfm_blocks.data.labels import LabelCoder
from tfm_blocks.data.layout import Sides
from tfm_blocks.data.noise import SUBWORD, uniforms
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.subword_dropout import SubwordDropout
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import ConfigError
from tfm_blocks.training.data import EvalStream, PlannedCorpus

WORDS = ["a  man in a blue shirt 's shirts.", "two dogs, two boats  run", "shirtshirtblue", "ein blaues  hemd"]
LINES = {f"train.{side}": [f"{line} {number}" for number in range(6) for line in WORDS] for side in ("src", "tgt")}


def slow(tokenizer, text, key, draw, rate):
    """Algorithm 1 of the paper, word by word, with the ids of single bytes at first."""
    merges = {tuple(pair): rank for rank, pair in enumerate(json.loads(tokenizer.text)["model"]["merges"])}
    normalizer, place, ids = tokenizer._pieces.normalizer, 0, []
    text = normalizer.normalize_str(text) if normalizer else text
    for word, _ in tokenizer._pieces.pre_tokenizer.pre_tokenize_str(text):
        symbols, places, step = list(word), [place + number for number in range(len(word))], 0
        place += len(word)
        while True:
            kept = []
            for left in range(len(symbols) - 1):
                rank = merges.get((symbols[left], symbols[left + 1]))
                if rank is not None and uniforms(*draw, key, SUBWORD, step, places[left])[0] >= rate:
                    kept.append((rank, left))
            if not kept:
                break
            _, left = min(kept)
            symbols[left : left + 2], places[left : left + 2] = [symbols[left] + symbols[left + 1]], [places[left]]
            step += 1
        ids += [tokenizer.ids[symbol] for symbol in symbols]
    return ids


def feed_of(settings):
    return PlannedCorpus(prepared(settings)[0].train, Sides(["src"]), settings)


@pytest.mark.grid
@pytest.mark.parametrize("space", [True, False])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_subwords_equal_those_of_a_slow_version_row_by_row(text, rate, space):
    settings = text(LINES, bpe_dropout=rate, add_prefix_space=space, max_length=200, step_tokens=900, batch_tokens=900)
    corpus = prepared(settings)[0].train
    for epoch in (0, 3):
        drawn = corpus.drawn(7, epoch)
        for row in range(len(corpus)):
            for number, name in enumerate(("src", "tgt")):
                expected = slow(corpus.tokenizer, corpus.text[name][row], row, (7, epoch, number), rate)
                assert drawn.ids(name, row).tolist() == expected
                assert corpus.tokenizer.decode(drawn.ids(name, row).tolist()) == corpus.text[name][row]


def test_a_rate_of_zero_leaves_the_usual_subwords_and_of_one_single_bytes(text):
    corpus = prepared(text(LINES, bpe_dropout=0.5, add_prefix_space=True, max_length=99))[0].train
    for rate in (0.0, 1.0):
        dropout = SubwordDropout(tokenizer=corpus.tokenizer, rate=rate, max_length=99)
        drawn = dropout(corpus, 1, 0)
        for row in range(len(corpus)):
            ids, usual = (x.ids("src", row).tolist() for x in (drawn, corpus))
            assert ids == usual if rate == 0 else len(ids) == len(corpus.text["src"][row].encode()) + 1


def test_the_fraction_of_merges_that_are_dropped_in_the_first_step_is_the_rate(text):
    """A word of two bytes has one merge, which is tried once."""
    settings = text({f"train.{side}": ["ab ab ab"] * 300 for side in ("src", "tgt")}, bpe_dropout=0.3)
    corpus = prepared(settings)[0].train
    pair = corpus.tokenizer.ids["ab"]
    rows = [
        corpus.drawn(1, epoch).ids(name, row) for epoch in range(3) for row in range(300) for name in ("src", "tgt")
    ]
    first_words = np.array([ids[0] == pair for ids in rows])
    assert abs(1 - first_words.mean() - 0.3) < 4 * np.sqrt(0.21 / len(rows))


def test_a_side_that_would_be_longer_than_the_maximum_keeps_its_subwords(text):
    settings = text(LINES, bpe_dropout=0.9, max_length=30)
    corpus = prepared(settings)[0].train
    drawn = corpus.drawn(1, 0)
    assert (drawn.lengths_NC <= 30).all() and (corpus.longest.lengths_NC == 30).all()
    long = [row for row in range(len(corpus)) if len(corpus.text["src"][row]) > 31]
    assert any(drawn.ids("src", row).tolist() == corpus.ids("src", row).tolist() for row in long)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_resumed_run_reads_the_same_subwords_and_each_epoch_has_others(text, mixed):
    mix = {"a": {}, "b": {"train": BACK_FILES, "val": None, "tag": "<bt>", "target_tag": "<x>"}} if mixed else None
    settings = text(FILES | LINES, bpe_dropout=0.3, mix=mix, **({"temperature": 3.0} if mixed else {}))
    feed = feed_of(settings)
    whole, length = steps(feed, 24), len(feed.plan(seed=5, epoch=0))
    assert length < 12
    for start in (1, 9, 17):
        resumed = pickle.loads(pickle.dumps(feed))
        assert (
            contents(steps(resumed, 24 - start, start=start, cursor=whole[start - 1].cursor)) == contents(whole)[start:]
        )
    totals = [
        Counter(i for step in whole[a:b] for x in step.batches for i in x.labels_BT.flatten().tolist() if i)
        for a, b in ((0, length), (length, 2 * length))
    ]
    assert totals[0] != totals[1] or contents(whole[:length]) != contents(whole[length : 2 * length])
    for step in whole:
        assert all(sum(x.shape[1] for x in b.inputs.values()) * len(b.labels_BT) <= 200 for b in step.batches)
    if mixed:
        tags = [
            int((b.inputs["src"] == feed.corpus.tokenizer.ids["<bt>"]).sum()) for step in whole for b in step.batches
        ]
        assert sum(tags) > 0


def test_scores_use_the_usual_subwords(text):
    settings = text(LINES, bpe_dropout=0.9)
    val = prepared(settings)[0].val
    batches = list(islice(EvalStream(PlannedCorpus(val, Sides(["src"]), settings), Ranks()), 9))
    read = sorted(tuple(row[row > 2].tolist()) for batch in batches for row in batch.labels_BT)
    assert read == sorted(tuple(val.ids("tgt", row).tolist()) for row in range(len(val)))


def test_labels_stay_and_their_texts_change(tmp_path, text):
    from tests.data.conftest import read_data

    settings = text({"train.tgt": ["good", "bad"] * 12, "train.src": LINES["train.src"], "val.tgt": ["bad"] * 3})
    base = settings.model_dump() | {"kind": "labels", "predict": "class", "labels": ["bad", "good"], "test": None}
    data = prepared(read_data(base | {"bpe_dropout": 0.5, "mix": None}))[0]
    drawn = data.train.drawn(1, 0)
    assert [drawn.ids("tgt", row).tolist() for row in range(4)] == [[2], [1], [2], [1]]
    assert any(drawn.ids("src", row).tolist() != data.train.ids("src", row).tolist() for row in range(24))
    assert isinstance(data.train.labels, LabelCoder)


def test_combinations_that_cannot_work_are_errors(text, tmp_path):
    from tokenizers import Tokenizer as Pieces
    from tokenizers import models

    from tests.data.conftest import read_data

    base = text(LINES).model_dump() | {"kind": "labels", "predict": "words", "labels": ["x", "y"], "bpe_dropout": 0.1}
    with pytest.raises(
        ConfigError, match=r"labels the first subword of each word, which data\.bpe_dropout=0\.1 changes"
    ):
        read_data(base)
    with pytest.raises(ConfigError, match=r"data\.bpe_dropout: must be at most 1"):
        text(LINES, bpe_dropout=1.5)
    Pieces(models.WordLevel({"</s>": 0, "a": 1}, unk_token="a")).save(str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match=r"other\.json does not have the merges of a learned tokenizer"):
        prepared(text(LINES, bpe_dropout=0.1, tokenizer=str(tmp_path / "other.json")))
    Tokenizer.of_words(["a", "b"]).save(tmp_path / "words.json")  # of a probe task
    with pytest.raises(ConfigError, match=r"data\.bpe_dropout: is 0\.1, but .*words\.json does not have the merges"):
        prepared(text(LINES, bpe_dropout=0.1, tokenizer=str(tmp_path / "words.json")))
