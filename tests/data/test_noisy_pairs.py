"""The objectives that make a source and a target of a row, or hide tokens of it, against slow versions."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from tests.data.test_objectives import WORDS, masked, packed
from tfm_blocks.compose.folders import CONF
from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.encoding import write_corpus
from tfm_blocks.data.noise import (
    CHOICE,
    COUNT,
    KEPT,
    KIND,
    LENGTH,
    NOISED,
    OFFSET,
    PLACE,
    SENTENCE,
    SHUFFLE,
    SLOT,
    SLOT_KIND,
    SLOT_TOKEN,
    TOKEN,
    TURN,
    uniforms,
)
from tfm_blocks.data.objective_layouts import layout_of
from tfm_blocks.data.objectives import (
    DenoisingSettings,
    MaskedDiffusionSettings,
    PrefixLmSettings,
    SpanCorruptionSettings,
    Ul2Settings,
)
from tfm_blocks.data.tokenizer import MASK, Tokenizer
from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.data.vocabulary import sentinel
from tfm_blocks.training.data import PlannedCorpus
from tfm_blocks.training.memory_check import smallest_cap

BOS, EOS = 1, 2
DRAW = (3, 1)
DENOISING = {"name": "denoising", "mask": 0.3, "span": 3.5, "random": 0.1, "permute": 1.0, "rotate": 0.0}
DENOISING |= {"insert": 0.0, "whole_words": True}
SPANS = SpanCorruptionSettings(name="span_corruption", density=0.15, span=3.0, sentinels=40)
PREFIX = PrefixLmSettings(name="prefix_lm")
DIFFUSION = MaskedDiffusionSettings(name="masked_diffusion", min_rate=0.001)


UL2 = Ul2Settings(**yaml.safe_load((CONF / "objective" / "ul2.yaml").read_text()) | {"sentinels": 40})


def denoising(**changes):
    return DenoisingSettings(**DENOISING | changes)


OBJECTIVES = {
    "spans": SPANS,
    "long spans": SpanCorruptionSettings(name="span_corruption", density=0.5, span=8.0, sentinels=3),
    "many spans": SpanCorruptionSettings(name="span_corruption", density=0.7, span=1.0, sentinels=40),
    "prefix": PREFIX,
    "denoising": denoising(),
    "all noise": denoising(mask=0.5, span=1.2, random=0.4, permute=0.6, rotate=0.5, insert=0.2),
    "tokens": denoising(whole_words=False, rotate=1.0, permute=0.0),
    "no masks": denoising(mask=0.0),
    "ul2": UL2,
}


@pytest.fixture(scope="module")
def tokenizer():
    text = " ".join(f"{word}." if number % 7 == 0 else word for number, word in enumerate(WORDS))
    return Tokenizer.train([text] * 3, 450, special=[MASK, *map(sentinel, range(40))])


@pytest.fixture(scope="module")
def corpus(tokenizer, tmp_path_factory):
    """Return rows of many lengths, sentences of several words among them."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("pairs")
    rows = [("", ""), ("a", "ba"), ("a", "ba. de"), ("a", "?!")]
    for length in (1, 2, 3, 5, 8, 13, 21, 34, 60):
        words = random.choice(WORDS, length)
        rows.append(("a", " ".join(f"{word}." if random.random() < 0.2 else word for word in words)))
    write_corpus(folder, ("src", "tgt"), rows, tokenizer, max_length=None)
    return Corpus(folder, tokenizer)


def pair_of(corpus, objective, row, draw=DRAW):
    """Return the source and the target of a row, without the special tokens around them."""
    batch = layout_of(corpus, ["src", "tgt"], objective).drawn(*draw).batch(corpus, [row])
    source, target = batch.inputs["src"][0].tolist(), batch.labels_BT[0].tolist()
    assert source.pop() == EOS and target.pop() == EOS and batch.inputs["tgt"][0].tolist() == [BOS, *target]
    return source, target


class Draws:
    """The draws of a row."""

    def __init__(self, row, draw=DRAW):
        self.words = (*draw, row)

    def __call__(self, stream, *place):
        return float(uniforms(*self.words, stream, *place)[0])


def smallest(count, keys):
    return sorted(range(len(keys)), key=keys.__getitem__)[: int(count)]


def slow_spans(objective, tokenizer, ids, u):
    """Follow random_spans_noise_mask of T5: alternate segments of both kinds, and draw their boundaries."""
    n = len(ids)
    noise = min(max(round(n * objective.density), 1), n - 1)
    spans = max(1, min(round(noise / objective.span), noise, n - noise, objective.sentinels))

    def segments(items, stream):
        begins = {1 + place for place in smallest(spans - 1, [u(stream, place) for place in range(1, items)])}
        parts = []
        for place in range(items):
            parts += [0] if place == 0 or place in begins else []
            parts[-1] += 1
        return parts

    source, target, place = [], [], 0
    if not noise:
        return ids, [tokenizer.ids[sentinel(0)]]
    for number, (kept, hidden) in enumerate(zip(segments(n - noise, KEPT), segments(noise, NOISED), strict=True)):
        name = tokenizer.ids[sentinel(number)]
        source += [*ids[place : place + kept], name]
        target += [name, *ids[place + kept : place + kept + hidden]]
        place += kept + hidden
    return source, target


def slow_prefix(objective, tokenizer, ids, u):
    split = 1 + int(u(COUNT) * (len(ids) - 1))
    return ids[:split], ids[split:]


def slow_mixture(objective, tokenizer, ids, u):
    denoisers = list(objective.denoisers.values())
    place, rest = 0, u(CHOICE) * sum(one.weight for one in denoisers)
    while rest >= denoisers[place].weight:
        rest -= denoisers[place].weight
        place += 1
    one = denoisers[place]
    if one.span is None:
        split = max(1, len(ids) - max(1, round(one.density * len(ids))))
        source, target = ids[:split], ids[split:]
    else:
        spans = SPANS.model_copy(update={"density": one.density, "span": one.span, "sentinels": objective.sentinels})
        source, target = slow_spans(spans, tokenizer, ids, u)
    return [*tokenizer.encode(one.mode), *source], target


def slow_words(objective, tokenizer, ids):
    """Return the positions of each word, or of each token, of those that can be hidden: all if all are special."""
    special = tokenizer.special_ids
    can = [id not in special for id in ids] if any(id not in special for id in ids) else [True] * len(ids)
    words = []
    for place, id in enumerate(ids):
        piece = tokenizer.piece(id)
        after_break = place > 0 and tokenizer.piece(ids[place - 1]).endswith("⏎")
        begins = not objective.whole_words or piece.startswith(("▁", "⏎")) or place == 0 or not can[place - 1]
        begins = begins or after_break
        if can[place]:
            words += [[]] if begins else []
            words[-1].append(place)
    return words


def slow_masking(objective, rate, tokenizer, ids, u):
    """Return the ids with masks and random ids, and the labels: of RoBERTa, floor(rate · n + U) words are hidden."""
    plain = [id for id in range(tokenizer.size) if id not in tokenizer.special_ids]
    words = slow_words(objective, tokenizer, ids)
    count = max(1, math.floor(rate * len(words) + u(COUNT)))
    hidden = [place for word in smallest(count, [u(PLACE, word[0]) for word in words]) for place in words[word]]
    read, labels = list(ids), [0] * len(ids)
    for place in hidden:
        labels[place], kind = ids[place], u(KIND, place)
        if kind < objective.mask:
            read[place] = tokenizer.mask
        elif kind < objective.mask + objective.random:
            read[place] = plain[int(u(TOKEN, place) * len(plain))]
    return read, labels


def slow_denoising(objective, tokenizer, ids, u):
    """Follow the denoising data set of fairseq: sentences, spans of words, inserted masks, rotation."""
    special = tokenizer.special_ids
    plain = [id for id in range(tokenizer.size) if id not in special]
    ends = [id == EOS or tokenizer.piece(id).endswith((".", "?", "!")) for id in range(tokenizer.size)]

    def mask_or_random(place, kind, token):
        return plain[int(u(token, place) * len(plain))] if u(kind, place) < objective.random else tokenizer.mask

    sentences = [[]]
    for place, id in enumerate(ids):
        sentences[-1].append(id)
        if ends[id] and place + 1 < len(ids) and not ends[ids[place + 1]]:
            sentences.append([])
    count = len(sentences)
    moved = sorted(smallest(math.ceil(round(objective.permute * count, 6)), [u(SENTENCE, s) for s in range(count)]))
    order = list(range(count))
    for place, sentence in zip(moved, sorted(moved, key=lambda s: u(SHUFFLE, s)), strict=True):
        order[place] = sentence
    ids = [id for place in order for id in sentences[place]]

    words = slow_words(objective, tokenizer, ids)
    budget, lengths, drawn = math.ceil(round(objective.mask * len(words), 6)), [], 0
    while sum(lengths) < budget:
        uniform, length, limit = u(LENGTH, drawn), 0, math.exp(-objective.span)
        while uniform >= limit:
            length += 1
            limit += math.exp(-objective.span) * objective.span**length / math.factorial(length)
        lengths.append(min(length, budget - sum(lengths)))
        drawn += 1
    full = [length for length in lengths if length]
    starts = smallest(len(full), [u(PLACE, word[0]) for word in words])
    inside = {word + k for word, length in zip(starts, full, strict=True) for k in range(1, length)}
    dropped = {place for word in inside if word < len(words) for place in words[word]}
    dropped |= {place for word in starts for place in words[word][1:]}
    masks = {words[word][0] for word in starts} - dropped
    left = [mask_or_random(place, KIND, TOKEN) if place in masks else id for place, id in enumerate(ids)]
    left = [id for place, id in enumerate(left) if place not in dropped]

    inserted = min(len(lengths) - len(full), len(ids) - len(left))
    inserted += math.ceil(round(objective.insert * len(left), 6))
    slots = set(smallest(inserted, [u(SLOT, slot) for slot in range(len(left) + inserted)]))
    rest = iter(left)
    left = [
        mask_or_random(slot, SLOT_KIND, SLOT_TOKEN) if slot in slots else next(rest)
        for slot in range(len(left) + inserted)
    ]
    turn = int(u(OFFSET) * len(left)) if u(TURN) < objective.rotate else 0
    return left[turn:] + left[:turn]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_row_becomes_what_a_slow_version_makes_of_it(corpus, tokenizer, name):
    objective = OBJECTIVES[name]
    slow = {"span_corruption": slow_spans, "prefix_lm": slow_prefix, "denoising": slow_denoising, "ul2": slow_mixture}
    slow = slow[objective.name]
    for draw in (DRAW, (3, 2), (8, 0)):
        for row in range(len(corpus)):
            ids = corpus.ids("tgt", row).tolist() or [EOS]
            expected = slow(objective, tokenizer, ids, Draws(row, draw))
            expected = (expected, ids) if objective.name == "denoising" else expected
            assert pair_of(corpus, objective, row, draw) == expected, row


HIDDEN = {
    "bert": masked(),
    "words": masked(whole_words=True, rate=0.3),
    "modernbert": masked(rate=0.3, static=True),
    "most": masked(rate=0.9, mask=0.3, random=0.5, eval_rate=0.5),
    "electra": masked(mask=0.85, random=0.0),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_each_row_has_the_hidden_tokens_of_a_slow_version(corpus, tokenizer, name):
    objective, labelled = HIDDEN[name], 0
    layout = layout_of(corpus, ["tgt"], objective)
    draws = [(layout.drawn(*draw), objective.rate, draw) for draw in (DRAW, (3, 2), (8, 0))]
    for drawn, rate, (seed, epoch) in [*draws, (layout.evaluating, objective.eval_rate, (0, 0))]:
        for row in range(len(corpus)):
            ids = [*corpus.ids("tgt", row).tolist(), EOS]
            u = Draws(row, (seed, 0 if objective.static else epoch))
            batch = drawn.batch(corpus, [row])
            pair = batch.inputs["tgt"][0].tolist(), batch.labels_BT[0].tolist()
            assert pair == slow_masking(objective, rate, tokenizer, ids, u), row
            labelled += len(batch.kept_N)
    assert labelled > 60


@pytest.mark.parametrize("inputs", [["src", "tgt"], ["tgt"]], ids=["two sides", "one sequence"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_plan_has_the_widths_and_labels_of_the_batches_and_bounds_all_epochs(corpus, name, inputs):
    layout = layout_of(corpus, inputs, OBJECTIVES[name])
    assert layout.inputs == tuple(inputs)
    for epoch in range(4):
        drawn = layout.drawn(1, epoch)
        widths_NC, labels_N = drawn.widths_NC(corpus), drawn.labels_N(corpus)
        whole = drawn.batch(corpus, range(len(corpus)))
        for row in range(len(corpus)):
            batch = drawn.batch(corpus, [row])
            assert [batch.inputs[name].shape[1] for name in inputs] == widths_NC[row].tolist()
            labels = whole.labels_BT[row][whole.labels_BT[row] != 0]
            assert batch.labels_BT[batch.labels_BT != 0].tolist() == labels.tolist() and len(labels) == labels_N[row]
        assert (widths_NC <= layout.longest_C(corpus)).all()
        assert (drawn.tokens_N(corpus) == layout.tokens_N(corpus)).all()


def test_a_decoder_reads_the_source_before_the_target(corpus, tokenizer):
    source, target = pair_of(corpus, SPANS, 10)
    batch = layout_of(corpus, ["tgt"], SPANS).drawn(*DRAW).batch(corpus, [10])
    assert batch.inputs["tgt"][0].tolist() == [*source, EOS, BOS, *target]
    assert batch.labels_BT[0].tolist() == [0] * (len(source) + 1) + [*target, EOS]


@pytest.mark.parametrize("size", [30_000, pytest.param(1_000_000, marks=pytest.mark.grid)])
def test_568_tokens_become_512_inputs_and_114_targets(tokenizer, tmp_path, size):
    corpus = packed(tmp_path, tokenizer, size, context=568)
    layout = layout_of(corpus, ["src", "tgt"], SPANS).drawn(*DRAW)
    assert layout.widths_NC(corpus)[:-1].tolist() == [[512, 114]] * (len(corpus) - 1)
    spans, sentinels = [], tokenizer.sentinels
    for row in range(len(corpus) - 1):
        batch = layout.batch(corpus, [row])
        source, target = batch.inputs["src"][0].tolist(), batch.labels_BT[0].tolist()
        assert (len(source), len(target)) == (512, 114)
        names = [id for id in target if id in sentinels]
        assert names == [id for id in source if id in sentinels] == sentinels[:28]
        places = [target.index(name) for name in names]
        spans += [b - a - 1 for a, b in zip(places, [*places[1:], len(target) - 1], strict=True)]
    assert sum(spans) == 85 * (len(corpus) - 1)
    lengths = np.bincount(spans)  # of a composition of 85 into 28 parts: P(a part is k) = C(84 - k, 26) / C(84, 27)
    expected = [0, *(math.comb(84 - k, 26) / math.comb(84, 27) * len(spans) for k in range(1, 12))]
    for count, mean in zip(lengths, expected, strict=False):
        assert abs(count - mean) < 5 * math.sqrt(mean) + 1


@pytest.mark.parametrize("size", [40_000, pytest.param(1_000_000, marks=pytest.mark.grid)])
def test_denoising_masks_the_fraction_of_the_words_in_spans_of_the_poisson_distribution(tokenizer, tmp_path, size):
    corpus = packed(tmp_path, tokenizer, size, context=256)
    layout = layout_of(corpus, ["src", "tgt"], denoising(permute=0.0)).drawn(*DRAW)
    noise, counts = layout.noise, np.zeros(4)
    for flat in layout.parts(corpus):
        words_R = np.full(len(flat.rows_R), 1000)
        length_S, spans_R, empty_R = noise._spans(words_R, flat.rows_R)
        assert np.add.reduceat(length_S, np.cumsum(spans_R) - spans_R).tolist() == words_R.tolist()
        source, _ = noise.pairs(flat)
        counts += empty_R.sum(), (empty_R + spans_R).sum(), (source.ids_L == tokenizer.mask).sum(), len(source.ids_L)
        assert (flat.ids_L == EOS).sum() == (source.ids_L == EOS).sum()
    none, spans, masks, tokens = counts
    assert abs(none / spans - math.exp(-3.5)) < 5 * math.sqrt(math.exp(-3.5) / spans)
    assert abs(spans / len(corpus) - 1000 / 3.5) < 3
    assert 0.05 < masks / tokens < 0.12


def test_the_least_micro_batch_of_packed_text_has_a_row_with_its_sentinels(tokenizer, tmp_path):
    corpus = packed(tmp_path, tokenizer, 3000, context=64)
    layout, settings = layout_of(corpus, ["src", "tgt"], SPANS), SimpleNamespace(kind="lm", context=64)
    longest = max(layout.drawn(1, epoch).widths_NC(corpus).sum(1).max() for epoch in range(3))
    assert smallest_cap(PlannedCorpus(corpus, layout, settings)) == longest == 64 + 2 * 3 + 2  # eos and bos


@pytest.mark.parametrize("size", [40_000, pytest.param(1_000_000, marks=pytest.mark.grid)])
def test_each_denoiser_of_a_mixture_is_drawn_equally_often_and_has_its_density(tokenizer, tmp_path, size):
    corpus = packed(tmp_path, tokenizer, size, context=128)
    weighted = UL2.denoisers | {"suffix": UL2.denoisers["suffix"].model_copy(update={"weight": 2.0})}
    for denoisers, parts in ((UL2.denoisers, [1] * 7), (weighted, [1, 1, 2, 1, 1, 1, 1])):
        objective = UL2.model_copy(update={"denoisers": denoisers})
        layout = layout_of(corpus, ["src", "tgt"], objective).drawn(*DRAW)
        noise, (flat, *_) = layout.noise, layout.parts(corpus)
        counts = np.bincount(noise.choices(flat), minlength=7)
        expected_K = np.array(parts) * len(flat.rows_R) / sum(parts)
        assert ((counts - expected_K) ** 2 / expected_K).sum() < 6 + 5 * math.sqrt(2 * 6)
        source, target = noise.pairs(flat)
        for number, one in enumerate(denoisers.values()):
            rows_R = (noise.choices(flat) == number) & (flat.lengths_R == 128)
            predicted = round(one.density * 128)
            spans = max(1, round(predicted / one.span)) if one.span else 0
            assert (target.lengths_R[rows_R] == predicted + spans).all()
            mode = len(tokenizer.encode(one.mode))
            assert (source.lengths_R[rows_R] == 128 - predicted + spans + mode).all()


def test_the_split_of_a_prefix_is_uniform(corpus):
    row = len(corpus) - 1
    n = len(corpus.ids("tgt", row))
    layout = layout_of(corpus, ["src", "tgt"], PREFIX)
    splits = [int(layout.drawn(1, epoch).batch(corpus, [row]).inputs["src"].shape[1]) - 1 for epoch in range(2000)]
    expect_uniform(np.bincount(splits, minlength=n + 1), n)


def expect_uniform(counts, n):
    """Expect that the splits 1 to n - 1 are equally frequent, by a chi-squared test of five standard deviations."""
    assert counts[0] == counts[n] == 0
    expected = counts.sum() / (n - 1)
    assert ((counts[1:n] - expected) ** 2 / expected).sum() < n + 5 * math.sqrt(2 * n)


@pytest.mark.parametrize("size", [40_000, pytest.param(1_000_000, marks=pytest.mark.grid)])
def test_splits_rotations_and_insertions_of_many_rows_have_their_distribution(tokenizer, tmp_path, size):
    corpus = packed(tmp_path, tokenizer, size, context=32)

    def pairs(objective):
        """Return the ids and the source of each row of 32 tokens."""
        layout = layout_of(corpus, ["src", "tgt"], objective).drawn(*DRAW)
        both = [(flat, layout.noise.pairs(flat)[0]) for flat in layout.parts(corpus)]
        rows = [zip(*(side.split(side.ids_L) for side in part), strict=True) for part in both]
        return [(ids, source) for part in rows for ids, source in part if len(ids) == 32]

    splits = [len(source) for _, source in pairs(PREFIX)]
    expect_uniform(np.bincount(splits, minlength=33), 32)
    options = {"mask": 0.0, "permute": 0.0}
    rotated = [pair for pair in pairs(denoising(**options, rotate=0.3)) if not np.array_equal(*pair)]
    share, expected = len(rotated) / len(splits), 0.3 * 31 / 32
    assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / len(splits))
    offsets = [next(k for k in range(1, 32) if np.array_equal(np.roll(ids, -k), source)) for ids, source in rotated]
    expect_uniform(np.bincount(offsets, minlength=33), 32)
    inserted = [source for _, source in pairs(denoising(**options, insert=0.2, random=0.25))]
    assert {len(source) for source in inserted} == {32 + 7}
    masks = sum((source == tokenizer.mask).sum() for source in inserted) / (7 * len(inserted))
    assert abs(masks - 0.75) < 5 * math.sqrt(0.75 * 0.25 / (7 * len(inserted)))


@pytest.mark.grid
def test_diffusion_hides_each_token_with_a_probability_of_its_row_and_divides_by_it(tokenizer, tmp_path):
    corpus = packed(tmp_path, tokenizer, 1_000_000, context=64)
    layout = layout_of(corpus, ["src"], DIFFUSION).drawn(*DRAW)
    labels_N, weighted, fractions, special = layout.labels_N(corpus), 0.0, [], tokenizer.special_ids
    for row in range(len(corpus)):
        batch, ids = layout.batch(corpus, [row]), corpus.ids("tgt", row).astype(np.int64)
        u = Draws(row)
        p = (1 - 0.001) * u(COUNT) + 0.001
        hidden = [id not in special and u(PLACE, place) < p for place, id in enumerate(ids.tolist())]
        assert batch.labels_BT[0].tolist() == np.where(hidden, ids, 0).tolist()
        assert batch.inputs["src"][0].tolist() == np.where(hidden, tokenizer.mask, ids).tolist()
        assert batch.weights_B.tolist() == [pytest.approx(1 / p)]
        n = int((ids != EOS).sum())
        assert batch.tokens == labels_N[row] == n and batch.counts_B.tolist() == [n]
        weighted += sum(hidden) / p / n
        fractions.append(sum(hidden) / n)
    rows = len(corpus)
    assert abs(weighted / rows - 1) < 5 * math.sqrt(math.log(1000) / 60 / rows)  # the variance is E[(1 - p) / (p n)]
    assert abs(np.mean(fractions) - 0.5) < 5 * math.sqrt(1 / 12 / rows)
    assert abs(np.var(fractions) - 1 / 12 - 1 / 6 / 64) < 0.4 / math.sqrt(rows)
    assert layout.batch(corpus, [0], empty=True).tokens == 0


def test_sentinels_are_the_last_ids_which_no_text_contains(tokenizer, tmp_path):
    assert tokenizer.sentinels == [tokenizer.size - 1 - number for number in range(40)]
    assert tokenizer.mask == 4 and tokenizer.special_ids == {0, 1, 2, 3, 4, *tokenizer.sentinels}
    text = f"ban {sentinel(0)} den"
    assert not {*tokenizer.encode(text)} & {*tokenizer.sentinels} and tokenizer.decode(tokenizer.encode(text)) == text
    tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").sentinels == tokenizer.sentinels
    assert Tokenizer.train(WORDS, 300).sentinels == []


@pytest.mark.parametrize("columns", [("src", "tgt"), ("src", "hint", "tgt")])
def test_diffusion_of_pairs_hides_tokens_of_the_target_after_visible_sources(tokenizer, tmp_path, columns):
    random = np.random.default_rng(0)
    texts = [tuple(" ".join(random.choice(WORDS, random.integers(0, 9))) for _ in columns) for _ in range(60)]
    write_corpus(tmp_path, columns, texts, tokenizer, max_length=None)
    corpus = Corpus(tmp_path, tokenizer)
    layout, hides = layout_of(corpus, ["src"], DIFFUSION).drawn(*DRAW), 0
    whole = layout.batch(corpus, range(60))
    for row, text in enumerate(texts):
        *sources, target = map(tokenizer.encode, text)
        before = [id for source in sources for id in (*source, EOS)] + [BOS]
        u = Draws(row)
        p = (1 - 0.001) * u(COUNT) + 0.001
        ids = [*target, EOS]
        hidden = [(id != EOS or not target) and u(PLACE, place) < p for place, id in enumerate(ids)]
        labels = [0] * len(before) + [id if hide else 0 for id, hide in zip(ids, hidden, strict=True)]
        read = before + [tokenizer.mask if hide else id for id, hide in zip(ids, hidden, strict=True)]
        assert whole.labels_BT[row].tolist() == labels + [0] * (whole.labels_BT.shape[1] - len(labels))
        assert whole.inputs["src"][row].tolist() == read + [0] * (whole.inputs["src"].shape[1] - len(read))
        assert whole.weights_B[row] == pytest.approx(1 / p) and whole.tokens_B[row] == (len(target) or 1)
        assert layout.widths_NC(corpus)[row].tolist() == [len(read)]
        assert layout.tokens_N(corpus)[row] == len(ids) and layout.labels_N(corpus)[row] == (len(target) or 1)
        hides += sum(hidden)
    assert hides > 60
    assert layout.batch(corpus, [0], empty=True).tokens == 0
