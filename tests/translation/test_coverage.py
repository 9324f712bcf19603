"""The coverage penalty against equation 14 of Wu et al. 2016, term by term."""

import math

import pytest
import torch

import tfm_blocks as tfm
from tests.conftest import sentences
from tfm_blocks.data.vocabulary import BOS, EOS
from tfm_blocks.errors import RunError
from tfm_blocks.network.attention_maps import attention_weights
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator


def coverage(translator, text, ids):
    """Compute the penalty in loops over sentences, source tokens and target tokens."""
    src, tgt = [*translator.tokenizer.encode(text), EOS], [BOS, *ids]
    inputs = {"src": torch.tensor([src]), "tgt": torch.tensor([tgt])}
    w_HTS = attention_weights(translator.network, ["decoder.1.cross"], **inputs)["decoder.1.cross"][0]
    total = 0.0
    for place in range(len(src)):
        looked = sum(float(w_HTS[:, position, place].mean()) for position in range(len(tgt)))
        total += math.log(min(looked, 1.0))
    return total


@pytest.mark.grid
def test_hypotheses_are_ranked_by_penalised_probability_and_coverage(translator):
    texts = sentences(12, 7)
    plain = translator.search(texts, Search(beam=4, nbest=4))
    covered = translator.search(texts, Search(beam=4, nbest=4, coverage=0.7))
    moved = 0
    for text, before, after in zip(texts, plain, covered, strict=True):
        assert {one.ids for one in before} == {one.ids for one in after}
        for one in after:
            expected = one.log_p / ((5 + len(one.ids) + 1) / 6) ** 0.6 + 0.7 * coverage(translator, text, one.ids)
            assert one.score == pytest.approx(expected, abs=1e-4)
        assert [one.score for one in after] == sorted((one.score for one in after), reverse=True)
        moved += [one.ids for one in before] != [one.ids for one in after]
    assert moved


def test_coverage_leaves_nbest_of_all_hypotheses_of_the_beam(translator):
    texts = sentences(12, 7)
    best = translator.search(texts, Search(beam=4, coverage=0.7))
    assert [one[0].ids for one in best] == [
        one[0].ids for one in translator.search(texts, Search(beam=4, nbest=4, coverage=0.7))
    ]


@pytest.mark.parametrize("wrong", [{"coverage": 0.2}, {"beam": 2, "coverage": -0.1}, {"beam": 2, "coverage": math.nan}])
def test_invalid_coverage_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="coverage"):
        Search(**wrong)


def test_a_model_without_cross_attention_is_refused(translator):
    network = tfm.build("decoder_only", layers=1, d_model=16, d_ff=16, heads=2, vocab=translator.tokenizer.size)
    translator = Translator(network, translator.tokenizer)
    with pytest.raises(RunError, match="a coverage penalty needs cross-attention from the target to the source"):
        translator.translate(["Haus"], beam=2, coverage=0.2)
