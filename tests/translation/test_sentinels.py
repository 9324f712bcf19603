"""Sentinels in texts of a run that fills spans: read and written as in its training, and nowhere else."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Pieces

from tests.conftest import sentences
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.noise import Flat
from tfm_blocks.data.objectives import SpanCorruptionSettings
from tfm_blocks.data.published_tokenizer import with_sentinels
from tfm_blocks.data.tokenizer import MASK, Tokenizer
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.job import train
from tfm_blocks.translation.translator import Translator

TEXTS = [*sentences(30, 4), "Ä😀 ñandú", "a  b   c"]
OBJECTIVE = SpanCorruptionSettings(name="span_corruption", density=0.4, span=2.0, sentinels=9)


@pytest.fixture(scope="module", params=[False, True])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.train(TEXTS, 330, add_prefix_space=request.param, special=OBJECTIVE.special)


def test_texts_with_sentinels_have_the_ids_of_the_training(tokenizer: Tokenizer) -> None:
    """Spans of whole words are compared: parts of a word, alone, can have other subwords than within it."""
    reading, checked = with_sentinels(tokenizer), 0
    rows = [np.array(tokenizer.encode(text)) for text in TEXTS] * 4
    sides = OBJECTIVE.noise(tokenizer).drawn(1, 0).pairs(Flat.of(rows, np.arange(len(rows))))
    for row in range(len(rows)):
        pair = [side.ids_L[side.row_L == row].tolist() for side in sides]
        texts = [reading.decode(ids) for ids in pair]
        assert all((f"<extra_id_{n}>" in texts[0]) == (id in pair[0]) for n, id in enumerate(tokenizer.sentinels))
        after = [id for ids in pair for before, id in pairwise(ids) if before in tokenizer.sentinels]
        if all(tokenizer.piece(id).startswith("▁") for id in after):
            assert list(map(reading.encode, texts)) == pair
            checked += 1
    assert checked > 3


def test_the_output_of_t5s_example_is_read_back(tokenizer: Tokenizer) -> None:
    reading = with_sentinels(tokenizer)
    source = "Thank you <extra_id_0> me to your party <extra_id_1> week."
    ids = reading.encode(source)
    first, second = tokenizer.sentinels[:2]
    parts = ["Thank you", " me to your party", " week."]
    continued = Pieces.from_str(tokenizer.text)
    continued.normalizer = None
    encoded = [tokenizer.encode(parts[0]), *(continued.encode(part).ids for part in parts[1:])]
    assert ids == [*encoded[0], first, *encoded[1], second, *encoded[2]]
    assert reading.decode(ids) == source and reading.encode_batch([source, "you"]) == [ids, tokenizer.encode("you")]
    assert reading.decode(ids[-3:], ids[:-3]) == reading.decode(ids)[len(reading.decode(ids[:-3])) :]
    assert first not in tokenizer.encode(source) and tokenizer.decode(tokenizer.encode(source)) == source
    assert reading.encode("<extra_id_9>") == tokenizer.encode("<extra_id_9>")  # the run has nine


@pytest.mark.grid
def test_only_runs_that_fill_spans_read_sentinels(small: Callable[..., Composed], tmp_path: Path) -> None:
    options = ["vocab=400", "trainer.steps=1", "trainer.validate_every=1"]
    train(check_run(small("objective=span_corruption", "objective.sentinels=9", *options)), tmp_path / "spans")
    spans = Translator.load(tmp_path / "spans" / "run")
    first = spans.tokenizer.sentinels[0]
    assert first in spans.encode(["1 <extra_id_0> 2"])[0] and spans.translate(["1 <extra_id_0> 2"])
    tuned = small(f"data.tokenizer={tmp_path / 'spans' / 'run'}", *options)
    train(check_run(tuned), tmp_path / "tuned")
    dates = Translator.load(tmp_path / "tuned" / "run")
    assert dates.tokenizer.sentinels == spans.tokenizer.sentinels
    assert first not in dates.encode(["1 <extra_id_0> 2"])[0]


@pytest.mark.parametrize("add_prefix_space", [False, True])
def test_names_of_special_tokens_and_tags_inside_a_text_are_text(add_prefix_space: bool) -> None:
    options = {"special": [MASK, "<extra_id_0>"], "tags": {"<bt>": True, "<2en>": False}}
    tokenizer = Tokenizer.train(["a b <bt> c"] * 3, 400, add_prefix_space=add_prefix_space, **options)
    tag, special = tokenizer.ids["<bt>"], {*range(4), tokenizer.mask, *tokenizer.sentinels, tokenizer.ids["<2en>"]}
    text = "a <bt> <2en> <eos> <mask> <extra_id_0> <unk><pad>b<bt>"
    for ids in (tokenizer.encode(text), tokenizer.encode_batch([text])[0]):
        assert special.isdisjoint(ids) and tag not in ids and tokenizer.decode(ids) == text
    ids = tokenizer.encode(f"<bt> {text}")
    assert (
        ids == [tag, *tokenizer.encode(text if add_prefix_space else f" {text}")]
        and tokenizer.decode(ids) == f"<bt> {text}"
    )
    assert [len(words) for words in tokenizer.words_of([f"<bt> {text}", text])] == [
        len(ids),
        len(tokenizer.encode(text)),
    ]
    hidden = tokenizer.encode_masked("<bt> a <mask> <eos> <bt> b <mask>")
    assert hidden.count(tokenizer.mask) == 2 and hidden.count(tag) == 1 and Tokenizer.EOS not in hidden
