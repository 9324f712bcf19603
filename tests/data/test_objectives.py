"""What the objectives hide and ask, against their definitions."""

import numpy as np
import pytest

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.encoding import write_corpus, write_packed
from tfm_blocks.data.noise import Flat, Masking, uniforms
from tfm_blocks.data.objective_layouts import layout_of
from tfm_blocks.data.objectives import MaskedSettings
from tfm_blocks.data.subwords import words
from tfm_blocks.data.tokenizer import MASK, Tokenizer
from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.errors import ConfigError

WORDS = [f"{first}{second}{third}" for first in "bdfgk" for second in "aeiou" for third in ("n", "ring", "st", "lo")]
MASKED = {"name": "masked", "rate": 0.15, "eval_rate": 0.15, "mask": 0.8, "random": 0.1}
MASKED |= {"static": False, "whole_words": False}
EOS = 2


def masked(**changes):
    return MaskedSettings(**MASKED | changes)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([" ".join(WORDS)] * 3, 400, special=[MASK])


def packed(folder, tokenizer, words, context=128):
    random = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    documents = (" ".join(random.choice(WORDS, 40)) for _ in range(words // 40))
    write_packed(folder, "tgt", documents, tokenizer, context=context)
    return Corpus(folder, tokenizer)


@pytest.fixture(scope="module")
def corpus(tokenizer, tmp_path_factory):
    return packed(tmp_path_factory.mktemp("packed"), tokenizer, 4000, context=64)


def test_uniform_draws_are_those_of_splitmix64():
    def splitmix(state):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    assert splitmix(0) == 0xE220A8397B1DCDAF  # the first output for seed 0 of the published code
    expected = [(splitmix((splitmix(7) + row) % 2**64) >> 11) / 2**53 for row in range(5)]
    assert uniforms(7, np.arange(5)).tolist() == expected


@pytest.mark.parametrize("size", [40_000, pytest.param(1_000_000, marks=pytest.mark.grid)])
def test_masking_has_the_rates_of_bert_and_the_count_of_roberta(tokenizer, tmp_path, size):
    corpus = packed(tmp_path, tokenizer, size)
    layout = layout_of(corpus, ["src"], masked()).drawn(3, 1)
    labels_N, hidden, kinds, replaced = layout.labels_N(corpus), [], [], []
    for row in range(len(corpus)):
        ids = corpus.ids("tgt", row).astype(np.int64)
        batch = layout.batch(corpus, [row])
        read, labels = batch.inputs["src"][0].numpy(), batch.labels_BT[0].numpy()
        at = labels != 0
        assert np.array_equal(labels[at], ids[at]) and np.array_equal(read[~at], ids[~at])
        n = int((ids > 4).sum())
        assert at.sum() == labels_N[row] and labels_N[row] in (max(1, int(0.15 * n)), int(0.15 * n) + 1)
        assert not at[ids == EOS].any()
        hidden.append((at.sum(), n))
        kinds += [np.where(read[at] == tokenizer.mask, 0, np.where(read[at] == ids[at], 2, 1))]
        replaced += [read[at][(read[at] != tokenizer.mask) & (read[at] != ids[at])]]
    hidden_N, total_N = np.array(hidden).T
    tokens, picked = total_N.sum(), hidden_N.sum()
    deviation = np.sqrt(0.25 * len(corpus)) / tokens  # of the rounding of each row, at most
    assert abs(picked / tokens - 0.15) < 4 * deviation + 1e-4
    parts = np.bincount(np.concatenate(kinds), minlength=3) / picked
    same = 0.1 / (tokenizer.size - 5)  # a random token can be the hidden one
    for part, expected in zip(parts, (0.8, 0.1 - same, 0.1 + same), strict=True):
        assert abs(part - expected) < 4 * np.sqrt(expected * (1 - expected) / picked)
    counts = np.bincount(np.concatenate(replaced), minlength=tokenizer.size)
    assert counts[:5].sum() == 0  # padding, bos, eos, unknown and the mask
    expected = counts.sum() / (tokenizer.size - 5)
    chi = ((counts[5:] - expected) ** 2 / expected).sum()
    assert abs(chi - (tokenizer.size - 6)) < 5 * np.sqrt(2 * (tokenizer.size - 6))


def test_the_places_of_hidden_tokens_are_uniform_and_independent_of_other_rows(tokenizer, corpus):
    layout = layout_of(corpus, ["src"], masked(rate=0.3))
    rows = list(range(len(corpus) - 1))  # the last row is shorter
    counts = sum((layout.drawn(1, epoch).batch(corpus, rows).labels_BT != 0).numpy().sum(0) for epoch in range(30))
    expected = counts.sum() / len(counts)
    assert ((counts - expected) ** 2 / expected).sum() < len(counts) + 5 * np.sqrt(2 * len(counts))
    whole = layout.drawn(1, 2).batch(corpus, rows)
    for row in (0, 3, len(rows) - 1):
        alone = layout.drawn(1, 2).batch(corpus, [row])
        assert alone.labels_BT[0].tolist() == whole.labels_BT[row].tolist()
        assert alone.inputs["src"][0].tolist() == whole.inputs["src"][row].tolist()


def test_static_masking_repeats_and_dynamic_masking_does_not(corpus):
    def labels(layout, *draw):
        return layout.drawn(*draw).batch(corpus, [0, 1]).labels_BT.tolist()

    dynamic, static = (layout_of(corpus, ["src"], masked(static=value)) for value in (False, True))
    assert labels(dynamic, 1, 0) != labels(dynamic, 1, 1) != labels(dynamic, 2, 1)
    assert labels(static, 1, 0) == labels(static, 1, 1) != labels(static, 2, 1)
    assert labels(dynamic, 1, 0) == labels(static, 1, 0)


def test_evaluation_has_its_own_rate(corpus):
    layout = layout_of(corpus, ["src"], masked(rate=0.6, eval_rate=0.15))
    share = [part.labels_N(corpus).sum() / corpus.lengths_NC.sum() for part in (layout, layout.evaluating)]
    assert 0.55 < share[0] < 0.6 and 0.14 < share[1] < 0.155  # eos is never hidden


def test_whole_words_are_hidden_whole(tokenizer, corpus):
    layout = layout_of(corpus, ["src"], masked(whole_words=True, rate=0.2))
    batch, labels_N = layout.batch(corpus, range(len(corpus))), layout.labels_N(corpus)
    words, chosen = 0, 0
    for row in range(len(corpus)):
        ids, at = corpus.ids("tgt", row), (batch.labels_BT[row] != 0).numpy()
        assert at.sum() == labels_N[row]
        starts = [place for place, id in enumerate(ids) if id == EOS or place == 0 or ids[place - 1] == EOS
                  or tokenizer.piece(int(id)).startswith("▁")]  # fmt: skip
        parts = [at[start:end] for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
        assert all(part.all() or not part.any() for part in parts)
        n = sum(ids[start] != EOS for start in starts)
        words, chosen = words + n, chosen + sum(part.all() for part in parts)
        assert sum(part.all() for part in parts) in (int(0.2 * n), int(0.2 * n) + 1)
    assert abs(chosen / words - 0.2) < 0.02


def test_a_side_of_pairs_ends_in_eos_and_a_row_always_has_a_label(tokenizer, tmp_path):
    write_corpus(
        tmp_path, ("src", "tgt"), [("ban", "den"), ("", "fa"), (" ".join(WORDS), "ga")], tokenizer, max_length=None
    )
    corpus = Corpus(tmp_path, tokenizer)
    layout = layout_of(corpus, ["src"], masked())
    assert layout.widths_NC(corpus)[:, 0].tolist() == [len(corpus.ids("src", row)) + 1 for row in range(3)]
    for epoch in range(5):
        drawn = layout.drawn(1, epoch)
        labels_BT = drawn.batch(corpus, [0, 1, 2]).labels_BT
        assert (labels_BT != 0).sum(1).tolist() == drawn.labels_N(corpus).tolist()
        assert labels_BT[1, 0] == EOS and (labels_BT[2] != EOS).all()
    assert not layout.batch(corpus, [2], empty=True).labels_BT.any()


def test_only_a_tokenizer_for_masking_has_a_mask_which_no_text_contains(tokenizer, tmp_path):
    assert Tokenizer.train(WORDS, 300).mask is None
    assert tokenizer.mask == 4 and 4 not in tokenizer.encode(f"a {MASK} b")
    assert tokenizer.decode(tokenizer.encode(f"a {MASK} b")) == f"a {MASK} b"
    tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").mask == 4
    with pytest.raises(ConfigError, match="must have room for 5 special tokens and 256 bytes, but is 260"):
        Tokenizer.train(WORDS, 260, special=[MASK])


@pytest.mark.parametrize("add_prefix_space", [False, True])
def test_a_mask_in_a_text_has_the_space_before_it(add_prefix_space):
    tokenizer = Tokenizer.train([" ".join(WORDS)] * 3, 400, special=[MASK], add_prefix_space=add_prefix_space)
    words = [" ban", " den", " fast", " go"]
    for text, hidden in (("ban <mask> fast go", [1]), ("<mask> den <mask> go", [0, 2]), ("ban den fast <mask>", [3])):
        ids = tokenizer.encode_masked(text)
        whole = [
            tokenizer.encode(word if number or not add_prefix_space else word[1:]) for number, word in enumerate(words)
        ]
        if add_prefix_space:
            whole = [tokenizer.encode(word[1:]) for word in words]
        expected = [token for number, part in enumerate(whole) for token in ([4] if number in hidden else part)]
        if not add_prefix_space and 0 not in hidden:
            expected = [*tokenizer.encode("ban"), *expected[len(whole[0]) :]]
        assert ids == expected


def test_a_text_with_number_signs_keeps_its_words_whole() -> None:
    learned = Tokenizer.train(["## the houses of the towns", "### the towns of the houses"] * 5, 300, special=[MASK])
    begins = words(learned)[:, 0]
    pieces = [learned.piece(id) for id in range(learned.size)]
    assert any(piece.startswith("##") for piece in pieces)
    assert {piece for piece, one in zip(pieces, begins, strict=True) if one} == {
        piece for piece in pieces if piece.startswith(("▁", "⏎"))
    }


def test_a_line_break_and_the_word_after_it_are_two_words() -> None:
    tokenizer = Tokenizer.train(["a red\nboat is\nred"] * 5, 300, special=[MASK])
    ids = np.array(tokenizer.encode("red\nboat is\n\nred"))
    plain_V, rates = np.arange(tokenizer.size) > 4, {"rate": 0.01, "eval_rate": 0.01, "mask": 1.0, "random": 0.0}
    noise = Masking(mask_id=4, plain_V=plain_V, words_V2=words(tokenizer), static=False, **rates)
    parts = set()
    for row in range(60):
        flat = Flat.of([ids], np.array([row]))
        parts.add(tokenizer.decode(ids[noise.hidden_L(flat)].tolist()))
    assert {part.strip(" ") for part in parts} == {"red", "\n", "boat", "is"}
