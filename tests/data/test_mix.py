"""Several corpora as one: the rows of an epoch, tags, and settings."""

import pickle
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from tests.conftest import expect_problem
from tests.data.conftest import SENTENCES, pairs, prepared
from tfm_blocks.data.layout import PlainText, Sides
from tfm_blocks.data.mix import counts_of
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import with_saved_tokenizer
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.tokenizer_files import expect_special
from tfm_blocks.errors import ConfigError
from tfm_blocks.training.data import EvalStream, PlannedCorpus, TrainStream

LINES = {side: [f"{text} {number}" for number in range(7) for text in texts] for side, texts in SENTENCES.items()}
BACK = {"src": ["zwei boote fahren .", "ein mann rennt ."], "tgt": ["two boats go .", "a man runs ."]}
FILES = {f"train.{side}": lines for side, lines in LINES.items()} | {f"back.{side}": BACK[side] for side in BACK}
BACK_FILES = {"src": "back.src", "tgt": "back.tgt"}


def planned(settings):
    return PlannedCorpus(prepared(settings)[0].train, Sides(["src"]), settings)


def steps(feed, count, *, start=0, ranks=Ranks(), cursor=None):  # noqa: B008
    options = {} if cursor is None else {"cursor": cursor}
    return list(islice(TrainStream(feed, seed=5, start=start, ranks=ranks, **options), count))


def contents(steps):
    return [(step.tokens, step.rows, *(b.inputs["src"].tolist() for b in step.batches)) for step in steps]


def epoch_texts(feed, epoch):
    drawn = feed.corpus.drawn(5, epoch)
    rows = [row for step in feed.plan(seed=5, epoch=epoch) for row in step.rows_N.tolist()]
    return Counter((drawn.text["src"][row], drawn.text["tgt"][row]) for row in rows)


def test_a_mix_without_weights_equals_the_corpus_of_all_its_files_step_by_step(text):
    files = FILES | {f"more.{side}": [f"{line} !" for line in LINES[side]] for side in LINES}
    together = text(files, train={side: [f"train.{side}", f"more.{side}"] for side in LINES})
    mixed = text(files, mix={"a": {}, "b": {"train": {"src": "more.src", "tgt": "more.tgt"}, "val": None}})
    whole, parts = (contents(steps(planned(settings), 12)) for settings in (together, mixed))
    assert whole == parts and len({step[1][0] for step in whole}) > 1


def test_an_equal_mix_of_a_corpus_with_itself_reads_each_pair_as_often_as_two_epochs_of_the_corpus(text):
    alone = planned(text(FILES))
    mixed = planned(text(FILES, mix={"a": {"weight": 1}, "b": {"weight": 1}}))
    for epoch in range(2):
        assert epoch_texts(mixed, epoch) == epoch_texts(alone, 2 * epoch) + epoch_texts(alone, 2 * epoch + 1)


def test_an_epoch_reads_exact_counts_and_no_row_more_than_once_more_than_another(text):
    mix = {"a": {"weight": 1}, "b": {"train": BACK_FILES, "weight": 2, "val": None}}
    feed = planned(text(FILES, mix=mix))
    a, b = 8, 15  # of 21 + 2 rows, one third and two thirds
    total = Counter()
    for epoch in range(6):
        texts = epoch_texts(feed, epoch)
        of_b = sum(texts[pair] for pair in zip(BACK["src"], BACK["tgt"], strict=True))
        assert (texts.total() - of_b, of_b) == (a, b)
        total += texts
    counts = {"a": [total[pair] for pair in zip(LINES["src"], LINES["tgt"], strict=True)]}
    counts["b"] = [total[pair] for pair in zip(BACK["src"], BACK["tgt"], strict=True)]
    assert sum(counts["a"]) == 6 * a and set(counts["a"]) == {2, 3} and counts["b"] == [45, 45]


def test_the_counts_of_a_temperature_are_those_of_its_formula():
    sizes, temperature = [1000, 100, 10], 5
    parts = [size ** (1 / temperature) for size in sizes]
    exact = [1110 * part / sum(parts) for part in parts]
    counts = counts_of(sizes, parts)
    assert sum(counts) == 1110 and all(abs(count - value) < 1 for count, value in zip(counts, exact, strict=True))
    assert counts_of(sizes, sizes) == sizes and counts_of([3, 3, 1], [1, 1, 1]) == [3, 2, 2]
    assert counts_of([3, 3], [1e308, 1e308]) == [3, 3]


def test_resumed_devices_and_caps_read_the_same_rows(text):
    mix = {"a": {}, "b": {"train": BACK_FILES, "val": None}}
    settings = text(FILES, mix=mix, temperature=4.0)
    feed = planned(settings)
    whole = steps(feed, 30)
    for start in (1, 7, 19):
        resumed = pickle.loads(pickle.dumps(feed))
        late = steps(resumed, 30 - start, start=start, cursor=whole[start - 1].cursor)
        assert contents(late) == contents(whole)[start:]
    small = PlannedCorpus(feed.corpus, feed.layout, settings.model_copy(update={"batch_tokens": 122}))
    shares = [steps(small, 12, ranks=Ranks(rank, 2)) for rank in range(2)]
    for step, (one, other) in zip(whole, zip(*shares, strict=True), strict=False):
        read = [
            sorted(row for b in part.batches for row in b.labels_BT.flatten().tolist() if row) for part in (one, other)
        ]
        assert sorted(read[0] + read[1]) == sorted(i for b in step.batches for i in b.labels_BT.flatten().tolist() if i)
        assert one.rows == other.rows == step.rows


def test_a_tag_of_a_source_is_one_token_of_its_text_and_outputs_hide_that_of_a_target(text, tmp_path):
    mix = {"a": {}, "b": {"train": BACK_FILES, "tag": "<bt>", "target_tag": "<2en>", "test": None}}
    settings = text(FILES, mix=mix, add_prefix_space=True)
    data, _ = prepared(settings)
    plain, tokenizer = Tokenizer.train([*LINES["src"]], 280), data.tokenizer
    tag, target = tokenizer.ids["<bt>"], tokenizer.ids["<2en>"]
    row = len(LINES["src"])
    assert data.train.ids("src", row).tolist() == [tag, *tokenizer.encode(BACK["src"][0])]
    assert data.train.ids("tgt", row).tolist() == [target, *tokenizer.encode(BACK["tgt"][0])]
    assert pairs(data.train)[row] == (f"<bt> {BACK['src'][0]}", BACK["tgt"][0])
    assert tokenizer.encode(f"<bt> {BACK['src'][0]}") == data.train.ids("src", row).tolist()
    assert tag not in tokenizer.encode("<2en> a") and target not in tokenizer.encode("<2en> a")
    assert not tokenizer.lossless and plain.lossless
    assert pairs(data.val)[:2] == [
        (SENTENCES["src"][0], SENTENCES["tgt"][0]),
        (f"<bt> {SENTENCES['src'][0]}", SENTENCES["tgt"][0]),
    ]
    assert data.test.mixed == ("a",) and data.val.groups == ["a", "b"] * 3
    tokenizer.save(tmp_path / "tokenizer.json")
    again, _ = prepared(with_saved_tokenizer(settings, tmp_path))
    assert np.array_equal(again.train.ids("src", row), data.train.ids("src", row))
    with pytest.raises(ConfigError, match=r"has no token <bt>, which is a tag of data\.mix"):
        plain.save(tmp_path / "tokenizer.json")
        prepared(with_saved_tokenizer(settings, tmp_path))


@pytest.mark.parametrize(
    ("of_text", "rule"),
    [
        (True, r"has <bt> as a tag of texts, which outputs show, but it is a target_tag of data\.mix"),
        (False, r"has <bt> as a target_tag, which no text contains, but it is a tag of data\.mix"),
    ],
)
def test_a_tag_of_a_tokenizer_is_a_tag_of_the_same_kind_in_a_mix(of_text, rule, tmp_path):
    tokenizer = Tokenizer.train(LINES["src"], 300, tags={"<bt>": of_text})
    expect_special(tokenizer, "here", (), {"<bt>": of_text})
    with pytest.raises(ConfigError, match=rule):
        expect_special(tokenizer, "here", (), {"<bt>": not of_text})


def test_documents_of_a_mix_begin_with_their_tag(tmp_path):
    from tests.data.conftest import read_data

    for name, words in (("a", "a red boat"), ("b", "two dogs")):
        (tmp_path / f"{name}.txt").write_text(f"{words}\n" * 40)
    base = {"kind": "lm", "dir": str(tmp_path), "train": "a.txt", "val": "a.txt", "test": None, "context": 8}
    sizes = {"step_tokens": 64, "batch_tokens": 64, "cache": str(tmp_path / "cache")}
    mix = {"a": {"weight": 3}, "b": {"train": "b.txt", "val": "b.txt", "tag": "<dogs>"}}
    settings = read_data(base | sizes | {"mix": mix})
    data, lines = prepared(settings, vocab=280)
    first = len(data.train.parts["a"])
    tag = data.tokenizer.ids["<dogs>"]
    assert data.train.ids("tgt", first)[0] == tag and tag not in data.train.ids("tgt", 0)
    assert data.tokenizer.encode("<dogs> two dogs") == [tag, *data.tokenizer.encode(" two dogs")]
    total = len(data.train)
    assert any(f"an epoch reads {round(0.75 * total)} rows of a (7" in line for line in lines)
    (batch, *_) = EvalStream(PlannedCorpus(data.val, PlainText(), settings), Ranks())
    assert {data.val.groups[row] for row in batch.rows} == {"a", "b"}


def test_what_each_corpus_has_and_how_often_it_is_read_are_reported(text):
    mix = {"a": {"weight": 1}, "b": {"train": BACK_FILES, "weight": 2, "val": None, "clean": {"min_length": 4}}}
    _, lines = prepared(text(FILES | {"back.src": ["x", *BACK["src"]], "back.tgt": ["y", *BACK["tgt"]]}, mix=mix))
    assert [line for line in "\n".join(lines).splitlines() if "train" in line or "epoch" in line] == [
        "data: 21 train pairs of a",
        "data: 2 train pairs of b (skipped: 1 shorter than 4 tokens)",
        "data: an epoch reads 8 rows of a (34.8% of 23), each 0.38 times",
        "data: an epoch reads 15 rows of b (65.2% of 23), each 7.50 times",
    ]


@pytest.mark.parametrize(
    ("changes", "address", "rule"),
    [
        ({"mix": {}}, "data.mix", "has no corpora"),
        ({"mix": {"a": {"val": None}}}, "data.mix", "has no validation text"),
        ({"mix": {"a b": {}}}, "data.mix.a b", "is no name of a corpus"),
        ({"mix": {"a": {"weight": 0}}}, "data.mix.a.weight", "must be above 0"),
        ({"mix": {"a": {"wieght": 1}}}, "data.mix.a.wieght", "no such setting"),
        ({"mix": {"a": {"tag": "bt"}}}, "data.mix.a.tag", "must be a name in angle brackets"),
        ({"mix": {"a": {"tag": "<eos>"}}}, "data.mix.a.tag", "that no other token has"),
        ({"mix": {"a": {"tag": "<x>", "target_tag": "<x>"}}}, "data.mix", "has <x> as a tag and as a target_tag"),
        (
            {"mix": {"a": {"train": {"x": "train.src", "tgt": "train.tgt"}}}},
            "data.mix.a.val",
            "has the columns src, tgt",
        ),
        ({"temperature": 5.0}, "data.temperature", "but data.mix is null"),
        ({"mix": {"a": {"weight": 2}}, "temperature": 5.0}, "data.temperature", "data.mix.a has a weight"),
        ({"mix": {"a": {"dir": "nowhere"}}}, "data.mix.a.train.src", "there is no file"),
        (
            {"mix": {"a": {"weight": 1e-9}, "b": {}}},
            "data.mix.a.weight",
            "an epoch of 6 rows reads none of the 3 rows of a",
        ),
        (
            {"mix": {"a": {}, "b": {"first": 1}}, "temperature": 0.0001},
            "data.temperature",
            "an epoch of 4 rows reads none of the 1 rows of b",
        ),
    ],
)
def test_a_wrong_mix_is_an_error_with_its_key_and_rule(text, changes, address, rule):
    with expect_problem(address, rule, among=True):
        prepared(text(**changes))


@pytest.mark.parametrize(
    ("changes", "address", "rule"),
    [
        ({"mix": {"a": {"weight": -1}, "b": {}}, "temperature": 5.0}, "data.mix.a.weight", "must be above 0"),
        ({"fields": {"src": "", "tgt": "b"}, "train": "a", "val": "b"}, "data.fields.src", "must name a field"),
    ],
)
def test_settings_that_depend_on_a_wrong_one_add_no_error(text, changes, address, rule):
    with expect_problem(address, rule):
        text(**changes)


def test_a_corpus_has_its_own_folder_within_that_of_the_data(text, tmp_path):
    (tmp_path / "more").mkdir()
    settings = text(FILES)
    for name in ("train.src", "train.tgt"):
        (tmp_path / "more" / name).write_bytes((tmp_path / name).read_bytes())
    data, _ = prepared(text({}, mix={"a": {}, "b": {"dir": "more", "val": None, "test": None}}))
    assert len(data.train) == 24 and settings.dir == str(tmp_path)
    named = text({}, dir="hub:wmt/wmt14:de-en", mix={"a": {}, "b": {"dir": "more"}, "c": {"dir": "hub:other"}})
    assert [corpus.dir for corpus in named.mix.values()] == ["hub:wmt/wmt14:de-en", "more", "hub:other"]
