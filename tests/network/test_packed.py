"""Packed weights against torch's product by the weights as they are."""

import platform

import pytest
import torch

import tfm_blocks as tfm
from tests.conftest import sentences
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.layers.linear import Linear
from tfm_blocks.network.packed import packed
from tfm_blocks.translation.translator import Translator

SRC, TGT = torch.tensor([[4, 5, 6], [7, 8, 0]]), torch.tensor([[1, 9], [1, 5]])
on_x86 = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="weights are packed on x86 processors"
)


@pytest.fixture
def network():
    """Every map has at least 65,536 weights, except the last, which has 51,200."""
    return tfm.build("tiny", layers=1, d_model=256, vocab=200).eval()


def maps(network, *, packed):
    return {
        name for name, one in network.named_modules() if isinstance(one, Linear) and (one.packed is not None) == packed
    }


@on_x86
def test_larger_maps_are_packed_and_only_within(network):
    with pytest.raises(ZeroDivisionError), packed(network):
        assert maps(network, packed=False) == {"logits.block"}
        with packed(network):
            pass
        assert maps(network, packed=False) == {"logits.block"}
        raise ZeroDivisionError
    assert maps(network, packed=True) == set()


@on_x86
@torch.inference_mode()
def test_packed_products_equal_plain_ones(network):
    plain = network(src=SRC, tgt=TGT)
    with packed(network):
        found = network(src=SRC, tgt=TGT)
    assert not torch.equal(found, plain)  # they were other products
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


def test_nothing_is_packed_in_lower_precision(network):
    with torch.autocast("cpu", torch.bfloat16), packed(network):
        assert maps(network, packed=True) == set()
    with packed(network.bfloat16()):
        assert maps(network, packed=True) == set()


def test_each_search_reads_the_weights_of_its_time(network):
    tokenizer = Tokenizer.train(sentences(200, 0), 300)
    network = tfm.build("tiny", layers=1, d_model=256, vocab=tokenizer.size).eval()
    translator, texts = Translator(network, tokenizer), sentences(5, 1)
    before = translator.translate(texts)
    other = tfm.build("tiny", layers=1, d_model=256, vocab=tokenizer.size, seed=7)
    network.load_state_dict(other.state_dict())
    after = translator.translate(texts)
    assert after == Translator(other, tokenizer).translate(texts) != before
