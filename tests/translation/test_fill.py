"""Masks of a text are filled by the most probable tokens, at once or step by step."""

import json
import re
from copy import deepcopy
from dataclasses import replace

import pytest
import tokenizers
import torch

import tfm_blocks as tfm
from tests.conftest import COMPOSER
from tests.data.test_objectives import WORDS
from tfm_blocks.compose.run import compose_job
from tfm_blocks.data.layout import batch_of
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.published_libraries import published_tokenizer
from tfm_blocks.data.tokenizer import MASK, SPECIAL, Tokenizer
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.distributed.processes import spawn_ranks
from tfm_blocks.errors import DataError, RunError
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.report.lists import show_perplexity
from tfm_blocks.scoring.perplexity import pseudo_perplexity
from tfm_blocks.training.objective import Objective
from tfm_blocks.training.split_scorer import Generation, MaskedScorer
from tfm_blocks.translation.encoder import Encoder
from tfm_blocks.translation.fill import Filler

TEXTS = [f"ban {MASK} den {MASK} {MASK} fast", "ban den", f"{MASK} ban", " ".join([MASK] * 7)]


@pytest.fixture(scope="module")
def filler():
    tokenizer = Tokenizer.train([" ".join(WORDS)] * 3, 400, special=[MASK])
    sizes = ["d_model=16", "d_ff=24", "heads=2", "layers=1", f"vocab={tokenizer.size}"]
    composed = compose_job(["model=encoder_only", "objective=masked", *sizes], COMPOSER)
    return Filler(build_network(check_model(composed.model), seed=3).double(), tokenizer)


def slow(filler, text, steps, before=()):
    """Fill one text after the ids `before`: in each step, the masks with the most probable tokens."""
    ids = [*before, *filler.tokenizer.encode_masked(text), 2]
    masks = ids.count(filler.tokenizer.mask)
    counts = [masks // steps + (step < masks % steps) for step in range(steps)]
    for count in filter(None, counts):
        places = [place for place, id in enumerate(ids) if id == filler.tokenizer.mask]
        logits_NV = filler.network.eval()(src=torch.tensor([ids]))[0].float()
        logits_NV[:, sorted(filler.tokenizer.special_ids)] = -torch.inf
        p, token = torch.softmax(logits_NV, 1).max(1)
        for place in sorted(places, key=lambda place: -p[place])[:count]:
            ids[place] = int(token[place])
    return filler.tokenizer.decode(ids[len(before) :]) if masks else text


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 50])
def test_each_step_fills_the_masks_with_the_most_probable_tokens(filler, steps):
    filled = filler.fill(TEXTS, steps=steps, top=2)
    assert [one.text for one in filled] == [slow(filler, text, steps) for text in TEXTS]
    assert [len(one.masks) for one in filled] == [text.count(MASK) for text in TEXTS]
    assert all(len(best) == 2 and best[0][1] >= best[1][1] for one in filled for best in one.masks)


def test_texts_without_a_mask_are_unchanged(filler):
    assert [(one.text, one.masks) for one in filler.fill(["ban den", "fast"])] == [("ban den", []), ("fast", [])]


def test_steps_change_the_text(filler):
    assert filler.fill(TEXTS[3:], steps=7)[0].text != filler.fill(TEXTS[3:])[0].text


@pytest.mark.parametrize("steps", [1, 2])
def test_sources_before_tabs_stay_visible(filler, steps):
    """A run on pairs reads each source with eos, and bos before the target, as in training."""
    tokenizer, prompted = filler.tokenizer, Filler(filler.network, filler.tokenizer, ("src", "hint"))
    texts = [f"ban den\tfast\t{MASK} {MASK} den {MASK}", f"den\t\tban {MASK}", "ban\tden\tfast"]
    for text, filled in zip(texts, prompted.fill(texts, steps=steps), strict=True):
        *sources, target = text.split("\t")
        before = [id for source in sources for id in (*tokenizer.encode(source), 2)] + [1]
        assert prompted.encode_masked([text]) == [[*before, *tokenizer.encode_masked(target), 2]]
        assert filled.text == "\t".join((*sources, slow(filler, target, steps, before)))
    for wrong in ("ban", "ban\tden", "ban\tden\tfast\tban"):
        with pytest.raises(
            DataError, match=r"line has \d tab-separated texts, but the run reads src, hint, tgt"
        ) as error:
            prompted.fill(["a\tb\tc", wrong])
        assert error.value.problems[0].place.line == 2


def filler_of_words(**sizes):
    """Return a filler of a model that knows two words."""
    names = {name: id for id, name in enumerate([*SPECIAL, MASK, "ban", "den"])}
    pieces = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="<unk>"))
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    pieces.add_special_tokens([*SPECIAL, MASK])
    tokenizer = Tokenizer(pieces)
    sizes = {"model": "encoder_only", "d_model": 16, "d_ff": 24, "heads": 2, "layers": 1, **sizes}
    return Filler(tfm.build(sizes.pop("model"), vocab=tokenizer.size, seed=3, **sizes), tokenizer)


def published_filler(**options):
    """Return a filler whose tokenizer has the mask [MASK], with these options of the tokenizers library."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "house", "boat"]
    pieces = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="[UNK]"))
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    pieces.add_special_tokens([tokenizers.AddedToken(word, special=True, **options) for word in words[:5]])
    files = {"tokenizer.json": pieces.to_str().encode(), "tokenizer_config.json": b'{"mask_token": "[MASK]"}'}
    tokenizer = published_tokenizer(Vocabulary(len(words), 2, 3), files, "here")
    sizes = {"d_model": 16, "d_ff": 24, "heads": 2, "layers": 1}
    return Filler(tfm.build("encoder_only", vocab=tokenizer.size, seed=3, **sizes), tokenizer)


@pytest.mark.parametrize("text", ["a [MASK] house", "a [MASK] house <mask>", "<mask> [MASK] [MASK] boat"])
def test_a_mask_has_our_name_or_the_name_of_an_imported_tokenizer(text):
    (filled,) = published_filler().fill([text])
    assert len(filled.masks) == text.lower().count("mask")
    words = iter([best[0][0] for best in filled.masks])
    assert filled.text == " ".join(next(words) if "mask" in word.lower() else word for word in text.split())


def test_a_mask_that_the_tokenizer_reads_as_text_is_an_error():
    with pytest.raises(DataError, match="has 2 masks, of which the tokenizer reads 1"):
        published_filler(single_word=True).fill(["a <mask> house", "a<mask> <mask>"])


def test_unknown_words_around_masks_stay_as_they_are():
    filler = filler_of_words()
    tokenizer = filler.tokenizer
    (filled,) = filler.fill([f"ban Zug {MASK} den {MASK}"])
    (first, _), (second, _) = (best[0] for best in filled.masks)
    assert tokenizer.decode(tokenizer.encode("ban Zug den")) == "ban den"
    assert filled.text == f"ban Zug {first} den {second}"


def test_samples_of_hidden_tokens_have_the_predicted_ones(filler):
    """The texts with masks, with the most probable tokens, and as they are, of the first rows in any order."""
    tokenizer, network = filler.tokenizer, deepcopy(filler.network).float().eval()
    rows = [torch.tensor([*tokenizer.encode(text), 2]) for text in ("ban den fast", "den ban", "fast")]
    ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels_BT = torch.zeros_like(ids_BT)
    labels_BT[0, 1], labels_BT[1, 0], labels_BT[2, 0] = ids_BT[0, 1], ids_BT[1, 0], ids_BT[2, 0]
    read_BT = torch.where(labels_BT > 0, tokenizer.mask, ids_BT)
    scorer = MaskedScorer(Ranks(0, 1), 4, tokenizer, 2)
    batch = replace(batch_of({"src": read_BT}, labels_BT), rows=(3, 1, 0))
    with torch.no_grad():
        scorer.count(Objective(network, 0.0), batch)
        best_BT = torch.where(labels_BT > 0, network(src=read_BT).argmax(2), ids_BT)
    scorer.score(None, Generation(0, None, None))
    whole = [tokenizer.decode(ids) for ids in ids_BT.tolist()]
    filled = [tokenizer.decode(ids) for ids in best_BT.tolist()]
    assert [sample[1:] for sample in scorer.samples] == [(filled[2], whole[2]), (filled[1], whole[1])]
    read = [read_BT[row, : len(rows[row]) - 1].tolist() for row in (2, 1)]  # without eos
    assert [tokenizer.encode_masked(sample[0]) for sample in scorer.samples] == read


@pytest.mark.parametrize("batch_tokens", [1, 13, 4096])
def test_the_pseudo_perplexity_hides_each_token_once(filler, batch_tokens):
    texts = ["ban den fast", "", "den"]
    nll, tokens = 0.0, 0
    for text in filter(None, texts):
        ids = [*filler.tokenizer.encode(text), 2]
        for place in range(len(ids) - 1):
            read = torch.tensor([[filler.mask if at == place else id for at, id in enumerate(ids)]])
            nll -= float(filler.network.eval()(src=read)[0, place].log_softmax(0)[ids[place]].detach())
            tokens += 1
    result = pseudo_perplexity(filler, texts, context=512, batch_tokens=batch_tokens)
    assert result.nll == pytest.approx(nll, rel=1e-5)
    assert (result.tokens, result.words, result.bytes, result.pseudo) == (tokens, 4, 15, True)


def test_unknown_tokens_of_a_pseudo_perplexity_are_counted(capsys):
    filler = filler_of_words()
    known, result = (
        pseudo_perplexity(filler, texts, context=512, batch_tokens=64)
        for texts in (["ban den", "den"], ["ban den", "den Zug Zug"])
    )
    assert (known.tokens, known.unknown, result.tokens, result.unknown) == (3, 0, 3, 2)
    show_perplexity(result, "run", as_json=False)
    assert "2 of 5 tokens are unknown to the tokenizer, and are not predicted" in capsys.readouterr().out
    show_perplexity(result, "run", as_json=True)
    assert json.loads(capsys.readouterr().out)["unknown_tokens"] == 2
    show_perplexity(known, "run", as_json=False)
    assert "unknown" not in capsys.readouterr().out


@pytest.mark.parametrize(("texts", "rule"), [(["", " "], "has no words$"), (["", "Zug"], "that the tokenizer")])
def test_a_text_without_known_words_has_no_pseudo_perplexity(texts, rule):
    with pytest.raises(DataError) as error:
        pseudo_perplexity(filler_of_words(), texts, context=512, batch_tokens=64)
    assert re.search(rule, error.value.problems[0].rule)


def test_a_run_on_pairs_has_no_pseudo_perplexity(filler):
    prompted = Filler(filler.network, filler.tokenizer, ("src",))
    with pytest.raises(RunError, match="scores documents, but the run predicts each text after src") as error:
        pseudo_perplexity(prompted, ["ban den"], context=512, batch_tokens=64)
    assert error.value.problems[0].help


def test_a_document_that_is_longer_than_the_context_is_scored_in_pieces():
    short = filler_of_words(model="bert", max_length=4)
    whole, pieces = (
        pseudo_perplexity(short, texts, context=3, batch_tokens=64)
        for texts in (["ban den den den ban"], ["ban den", "", "den den", "ban"])
    )
    assert whole.nll == pytest.approx(pieces.nll) and whole.tokens == pieces.tokens == 5


def test_a_classifier_with_a_mask_fills_nothing() -> None:
    tokenizer = Tokenizer.train([" ".join(WORDS)] * 3, 400, special=[MASK])
    sizes = ["d_model=16", "d_ff=24", "heads=2", "layers=1", f"vocab={tokenizer.size}"]
    composed = compose_job(["model=classifier", "objective=label", "data=labels", "data.dir=x", *sizes], COMPOSER)
    with pytest.raises(RunError, match="was not trained to predict hidden tokens"):
        Filler(build_network(check_model(composed.model), seed=3), tokenizer)


def test_an_encoder_with_learned_tokens_embeds_texts_and_fills_only_after_they_are_dropped() -> None:
    tokenizer = filler_of_words().tokenizer
    tokens = "model.graph.mem={block: learned_tokens, tokens: 3, after: src_pos}"
    drop = "model.graph.drop={block: drop_tokens, tokens: 3, before: logits}"
    sizes = ["d_model=16", "d_ff=24", "heads=2", "layers=1", f"vocab={tokenizer.size}"]

    def network(*overrides):
        composed = compose_job(["model=encoder_only", *sizes, tokens, *overrides], COMPOSER)
        return build_network(check_model(composed.model), seed=3)

    encoder, texts = Encoder(network(), tokenizer), ["ban", "den den den ban"]
    together, alone = encoder.embed(texts), torch.cat([encoder.embed([text]) for text in texts])
    torch.testing.assert_close(together, alone)
    ids_1S = torch.tensor(encoder.encode(texts[:1]))
    torch.testing.assert_close(together[:1], encoder.network.trunk(src=ids_1S).mean(1))
    with pytest.raises(RunError, match="was not trained to predict hidden tokens"):
        Filler(encoder.network, tokenizer)
    assert Filler(network(drop), tokenizer).fill([f"ban {MASK}"])


def write_samples(ranks, folder):
    """Count one row on each rank, and write the samples of the rank."""
    torch.distributed.init_process_group("gloo")
    filler = filler_of_words()
    row = [filler.tokenizer.mask, *filler.tokenizer.encode("den" if ranks.rank else "ban"), 2]
    scorer = MaskedScorer(ranks, 2, filler.tokenizer, 2)
    batch = replace(batch_of({"src": torch.tensor([row])}, torch.tensor([[row[1], 0, 0]])), rows=(1 - ranks.rank,))
    scorer.count(Objective(filler.network, 0.0), batch)
    scorer.score(None, Generation(0, None, None))
    (folder / str(ranks.rank)).write_text(json.dumps([reference for _, _, reference in scorer.samples]))


@pytest.mark.grid
def test_samples_of_hidden_tokens_are_those_of_all_ranks(tmp_path):
    spawn_ranks(write_samples, 2, tmp_path)
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [["den den", "ban ban"]] * 2
