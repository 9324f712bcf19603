"""N-gram embeddings against transformers' Qwen4-Exp, a dictionary of n-grams, and forward against steps."""

import pytest
import torch
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from tests.blocks.naive import with_random_weights
from tests.network.examples import TESTS, build
from tfm_blocks.blocks.ngram import NGramEmbedding
from tfm_blocks.network.contract.expectations import expect_steps

MODEL = next(path for path in TESTS if path.stem == "ngrams")
EOS = 2


@pytest.mark.parametrize(("ngram", "hashes"), [(2, 1), (3, 2), (4, 1)])
def test_ngram_embeddings_and_their_gradients_are_those_of_qwen4(ngram, hashes):
    sizes = {"vocab_size": 11, "ngram_size": ngram, "heads_per_ngram": hashes, "ngram_vocab_size_base": 10}
    theirs = Qwen4ExpTextNGramEmbedding(Qwen4ExpTextConfig(**sizes, eos_token_id=EOS, seed=7), 12, layer_idx=0)
    sizes = {"vocab": 11, "d_model": 12, "rows": 10, "ngram": ngram, "hashes": hashes}
    own = with_random_weights(NGramEmbedding(**sizes, scale=1.0, reset_id=EOS, seed=7))
    with torch.no_grad():
        theirs.ngram_embedding.weight[: len(own.weight)] = own.weight
    x_BN = torch.randint(1, 6, (5, 40))
    y_BND, expected_BND = own(x_BN, keep_BN=x_BN > 0), theirs(x_BN, None)
    torch.testing.assert_close(y_BND, expected_BND)
    (gradient,) = torch.autograd.grad(y_BND.square().sum(), own.weight)
    (expected,) = torch.autograd.grad(expected_BND.square().sum(), theirs.ngram_embedding.weight)
    torch.testing.assert_close(gradient, expected[: len(gradient)])


@torch.no_grad()
def test_equal_trigrams_have_equal_vectors_and_most_others_differ():
    own = with_random_weights(NGramEmbedding(vocab=9, d_model=8, rows=5000, ngram=3))
    x_BN = torch.randint(1, 9, (4, 50))
    y_BND = own(x_BN, keep_BN=x_BN > 0)
    vectors = {}
    for ids, outputs in zip(x_BN.tolist(), y_BND, strict=True):
        for place, y_D in enumerate(outputs):
            key = tuple(([0, 0, *ids])[place : place + 3])
            torch.testing.assert_close(vectors.setdefault(key, y_D), y_D)
    assert len(torch.stack([*vectors.values()]).unique(dim=0)) == len(vectors)


@torch.no_grad()
def test_padding_on_the_left_counts_as_no_ids():
    own = with_random_weights(NGramEmbedding(vocab=9, d_model=8, rows=50, ngram=3, hashes=2))
    x_BN = torch.randint(1, 9, (2, 6))
    padded_BN, keep_BN = torch.cat((torch.full((2, 2), 5), x_BN), 1), torch.arange(8).expand(2, -1) >= 2
    expected_BND = own(x_BN, keep_BN=x_BN > 0)
    torch.testing.assert_close(own(padded_BN, keep_BN=keep_BN, right_padded_N=False)[:, 2:], expected_BND)


@torch.no_grad()
def test_a_model_with_ngrams_decodes_as_it_reads():
    tgt_BT = torch.randint(1, 30, (3, 7))
    expect_steps(build(MODEL).eval(), {"tgt": tgt_BT}, range(7))
