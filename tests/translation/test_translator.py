"""Translating: order, blanks and batches, against a loop that runs the whole forward for every token."""

import copy
import math

import pytest
import torch

import tfm_blocks as tfm
from tests.conftest import published_words, save, sentences
from tests.translation.test_any_graph import naive_greedy
from tfm_blocks.data.tokenizer import MASK, Tokenizer
from tfm_blocks.data.vocabulary import BOS, EOS
from tfm_blocks.errors import DataError, RunError
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.matching import weights_of
from tfm_blocks.runs.folder import TOKENIZER
from tfm_blocks.runs.model import write_model, write_weights
from tfm_blocks.translation.fill import Filler
from tfm_blocks.translation.sentence_attention import attention_of
from tfm_blocks.translation.settings import Sampling, Search
from tfm_blocks.translation.translator import Translator


def test_greedy_equals_running_the_whole_model_for_every_token(translator):
    texts = sentences(6, 2)
    sources = [torch.tensor([[*translator.tokenizer.encode(text), EOS]]) for text in texts]
    most = [Search().most(src_BS.shape[1]) for src_BS in sources]
    naive = [naive_greedy(translator.network, [BOS], count, src=src) for count, src in zip(most, sources, strict=True)]
    assert translator.translate(texts) == [translator.tokenizer.decode(ids) for ids in naive]
    assert any(naive)


SEARCHES = [
    Search(),
    Search(beam=4, nbest=4),
    Search(beam=3, alpha=1.0, penalty="plain"),
    Search(sampling=Sampling(seed=3)),
]


@pytest.mark.grid
@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "beam", "plain", "sampling"])
def test_a_sentence_is_translated_alike_in_any_batch_at_any_place(translator, search):
    texts = sentences(40, 1)
    whole = [[one.text for one in hypotheses] for hypotheses in translator.search(texts, search)]
    for batch_tokens in (1, 40, 200, 1000):
        again = translator.search(texts, search, batch_tokens=batch_tokens)
        assert [[one.text for one in hypotheses] for hypotheses in again] == whole
    if not search.sampling:  # a sampled translation depends on the number of its sentence
        again = translator.search(texts[::-1], search, batch_tokens=300)[::-1]
        assert [[one.text for one in hypotheses] for hypotheses in again] == whole


@pytest.mark.grid
@pytest.mark.parametrize("search", SEARCHES[:2], ids=["greedy", "beam"])
def test_batches_do_not_matter_where_every_product_is_packed(translator, search, monkeypatch):
    monkeypatch.setattr("tfm_blocks.network.packed.FEW", 0)
    texts = sentences(100, 1)
    whole = [[one.text for one in hypotheses] for hypotheses in translator.search(texts, search)]
    again = translator.search(texts, search, batch_tokens=60)
    assert [[one.text for one in hypotheses] for hypotheses in again] == whole


def test_prefixes_begin_their_translations(translator):
    results = translator.search(["ein Haus", "", "am Fluss"], Search(beam=2), prefixes=["zwei Kinder", "", ""])
    assert results[0][0].text.startswith("zwei Kinder") and results[1][0].text == ""
    with pytest.raises(ValueError, match="3 sentences, but 1 prefixes"):
        translator.search(["a", "b", "c"], Search(), prefixes=["x"])


def test_a_target_is_written_after_its_tag():
    """A tag of targets in a source, or later in a target, is text; so are the names of other special tokens."""
    tokenizer = Tokenizer.train(sentences(9, 1), 300, special=[MASK], tags={"<de>": False, "<bt>": True})
    sizes = {"layers": 1, "d_model": 16, "d_ff": 16, "heads": 2, "vocab": tokenizer.size}
    translator, tag = Translator(tfm.build("tiny", **sizes), tokenizer), tokenizer.ids["<de>"]
    haus, *ordinary = map(tokenizer.encode, ("Haus", " <de>", "<eos>", "<mask>"))
    prefixes = ["<de> Haus", "<de>Haus", "<de>", "Haus <de>", "<eos>", "<mask>"]
    tasks = translator.translation_tasks(["<de>"] * 6, Search(), prefixes=prefixes)
    expected = [[tag, *haus], [tag, *haus], [tag], [*haus, *ordinary[0]], *ordinary[1:]]
    assert [task.prefix for task in tasks] == expected and tag not in tasks[0].sources[0]
    ((best,),) = translator.search(["am"], Search(), prefixes=["<de> Haus"])
    assert best.ids[0] == tag and best.text.startswith("Haus")
    assert attention_of(translator, "am", "<de> Haus").tokens["tgt"][:2] == ["<bos>", "<de>"]
    filler = Filler(tfm.build("encoder_only", **sizes), tokenizer, ("src",))
    text = f"am\t<de> Haus {MASK}"
    (row,) = filler.encode_masked([text])
    assert row[:-1] == [*tokenizer.encode("am"), EOS, BOS, tag, *haus, tokenizer.mask]
    assert filler.fill([text])[0].text.startswith("am\tHaus")


@pytest.mark.parametrize(
    ("around", "begin"),
    [
        ({"before": (10,)}, [10, 7]),  # as BART
        ({"after": (2, 10), "adds_eos": False}, [7]),  # as mBART: eos and the language follow each text
        ({"before": (10,), "first": 9}, [9, 7]),  # as NLLB: the language of the source is not the forced one
        ({"before": (10,), "of_targets": False}, [7]),
        ({"before": (10,), "languages": (10, 9)}, [9, 7]),  # as NLLB with the language of targets
    ],
)
def test_a_prefix_of_an_imported_model_begins_as_its_outputs_do(around, begin):
    tokenizer = published_words(adds_bos=False, **around)
    sizes = {"layers": 1, "d_model": 16, "d_ff": 16, "heads": 2, "vocab": tokenizer.size, "seed": 3}
    translator = Translator(tfm.build("tiny", **sizes), tokenizer)
    first, blank = translator.translation_tasks(["a boat", "a"], Search(), prefixes=["red", " "])
    assert (first.prefix, blank.prefix) == (begin, [])
    ((best,),) = translator.search(["a boat"], Search(), prefixes=["red"])
    assert list(best.ids[: len(begin)]) == begin
    tgt_BT = torch.tensor([[BOS, *best.ids]])  # of the maximum length, without eos
    sources = translator.conventions.source(translator.encode(["a boat"])[0])
    with torch.no_grad():
        logits_TV = translator.network.eval()(src=torch.tensor([sources]), tgt=tgt_BT)[0, :-1]
    log_p_T = logits_TV.log_softmax(1).gather(1, tgt_BT[0, 1:, None])[:, 0]
    log_p_T[: bool(tokenizer.conventions.first)] = 0.0  # as without a prefix
    assert best.log_p == pytest.approx(float(log_p_T.sum()), rel=1e-4)
    shown = attention_of(translator, "a boat", "red").tokens["tgt"]
    assert shown == ["<bos>", *map(tokenizer.piece, begin)]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"beam": 0}, "beam"),
        ({"beam": 2.0}, "beam"),
        ({"beam": 257}, "beam"),
        ({"beam": 2, "nbest": 3}, "nbest"),
        ({"patient": True}, "patient"),
        ({"beam": 2, "patient": 1}, "patient"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": 1000.0}, "alpha"),
        ({"beam": 2, "coverage": math.inf}, "coverage"),
        ({"penalty": "long"}, "penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"sampling": True}, "sampling"),
        ({"beam": 2, "sampling": Sampling()}, "sampling"),
    ],
)
def test_a_search_that_cannot_be_is_refused(wrong, named):
    with pytest.raises(ValueError, match=f"^{named} .*but"):
        Search(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"temperature": 0.0}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0.0}, {"seed": -1}]
)
def test_a_draw_from_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
        Sampling(**wrong)


def test_sentences_may_come_from_a_generator_but_must_be_texts(translator):
    texts = ["Haus", "am Fluss"]
    assert translator.translate(text for text in texts) == translator.translate(texts)
    for wrong, message in (
        ("Haus", "not a string"),
        (["Haus", None], "the texts of sentence 2 must be texts, but number 1 is NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            translator.translate(wrong)
    with pytest.raises(ValueError, match="search"):
        translator.translate(texts, beam=2, nbest=2)


def test_a_prefix_longer_than_the_translation_may_be_is_refused(translator):
    with pytest.raises(DataError, match=r"prefix 2: has .* but a translation has at most 3"):
        translator.search(["a", "b"], Search(max_tokens=3), prefixes=["", "zwei Kinder am Fluss"])


def test_the_order_is_kept_and_blank_lines_stay_blank(translator):
    texts = ["Haus und Kinder", "", "am Fluss", "  ", "ein kleines Haus steht am Fluss"]
    together = translator.translate(texts, batch_tokens=20)
    assert together == [translator.translate([text])[0] for text in texts]
    assert together[1] == together[3] == ""


def test_a_stopped_search_returns_blanks_for_the_remaining_batches(translator):
    texts, stops = sentences(20, 1), [False, False]
    results = translator.search(texts, Search(), batch_tokens=50, stop=lambda: stops.pop() if stops else True)
    whole = translator.search(texts, Search(), batch_tokens=50)
    done = [place for place, one in enumerate(results) if one[0].ids]
    assert 1 < len(done) < 20 and all(results[place] == whole[place] for place in done)


def test_translating_restores_the_mode_of_the_network(translator):
    translator.network.train()
    translator.translate(["Haus"])
    assert translator.network.training

    def interrupt(*_):
        raise KeyboardInterrupt

    linear = next(one for one in translator.network.modules() if isinstance(one, torch.nn.Linear))
    hook = linear.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        translator.translate(["Haus"])
    hook.remove()
    assert translator.network.training, "after an error too"
    translator.network.eval()


def test_a_model_with_other_inputs_is_refused_with_the_reason(translator):
    network = tfm.build(
        "tiny",
        **{
            "layers": 1,
            "vocab": 40,
            "model.graph.src_emb": "{block: linear, in: img, d_out: d_model}",
            "model.graph.tgt_emb": "{same: null, block: embedding}",
            "model.graph.logits.tie": "tgt_emb",
            "model.inputs.img": "B P 7",
            "model.inputs.src": None,
        },
    )
    with pytest.raises(RunError, match="the input img has vectors"):
        Translator(network, translator.tokenizer)


def test_a_vocabulary_other_than_the_tokenizers_is_refused(translator):
    with pytest.raises(RunError, match="subwords, but the model has 41"):
        Translator(tfm.build("tiny", layers=1, vocab=41), translator.tokenizer)


def test_a_sentence_longer_than_the_positions_is_an_error_with_its_line(translator):
    position = "{block: learned_position, max_length: 6}"
    knobs = {"layers": 1, "d_model": 16, "vocab": translator.tokenizer.size, "model.graph.src_pos": position}
    short = Translator(tfm.build("tiny", **knobs).eval(), translator.tokenizer)
    assert len(short.translate(["am"])) == 1
    with pytest.raises(DataError, match=r"sentence 2: has .* tokens with eos, but the model has 6 positions"):
        short.translate(["am", "ein kleines Haus steht am Fluss und zwei Kinder spielen davor"])


@pytest.fixture
def untied(translator):
    """Return a translator with a separate source embedding, so that a defect in it affects a single sentence."""
    graph = {"model.graph.tgt_emb": "{same: null, block: embedding}", "model.graph.logits.tie": None}
    made = tfm.build("tiny", layers=1, d_model=16, vocab=translator.tokenizer.size, **graph)
    return Translator(made.eval(), translator.tokenizer)


@pytest.mark.grid
@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "beam", "plain", "sampling"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@torch.no_grad()
def test_a_sentence_with_non_finite_logits_is_an_error(untied, search, wrong):
    texts = ["am Fluss", "zwei Kinder", "ein Haus"]
    (*_, id) = untied.tokenizer.encode(texts[1])
    untied.network["src_emb"].block.weight[id] = wrong
    with pytest.raises(RunError, match=r"sentence 12: the model's logits are not finite"):
        untied.search(texts, search, first_line=11)
    assert len(untied.search([texts[0], texts[2]], search)) == 2


@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "beam", "plain", "sampling"])
@torch.no_grad()
def test_weights_that_overflow_are_an_error(translator, search):
    broken = copy.deepcopy(translator)
    norms = [one for one in broken.network.modules() if hasattr(one, "normalized_shape")]
    norms[-1].weight *= 1e38
    with pytest.raises(RunError, match=r"sentence \d: the model's logits are not finite"):
        broken.search(["ein Haus", "am Fluss"], search)


@pytest.mark.parametrize("device", ["foo", "meta"])
def test_an_unusable_device_is_an_error(translator, tmp_path, device):
    save(translator, tmp_path / "run")
    with pytest.raises(RunError, match=f"'{device}' cannot be used"):
        Translator.load(tmp_path / "run", device=device)


def test_a_model_that_is_not_autoregressive_is_an_error(translator, tmp_path):
    graph = {"emb": {"block": "embedding", "in": "src"}, "out": {"block": "unembed"}}
    model = {"inputs": {"src": "B S"}, "args": {"d_model": 8, "vocab": translator.tokenizer.size}, "graph": graph}
    write_model(tmp_path, model, [])
    write_weights(tmp_path, weights_of(build_network(check_model(model), seed=1)))
    translator.tokenizer.save(tmp_path / TOKENIZER)
    with pytest.raises(RunError, match="is not autoregressive: it does not read tgt"):
        Translator.load(tmp_path)
