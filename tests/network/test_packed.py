"""Packed and quantised weights against torch's products with the original weights."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile

import tfm_blocks as tfm
from tests.conftest import sentences
from tests.network.small import network as small_network
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.packed import activation_levels, float32_product, int8_product, packed, quantized
from tfm_blocks.translation.translator import Translator

SRC, TGT = torch.tensor([[4, 5, 6], [7, 8, 0]]), torch.tensor([[1, 9], [1, 5]])
on_x86 = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="weights are packed on x86 processors"
)


@pytest.fixture
def network():
    """Return a network whose maps have at least 65,536 weights, except the last with 51,200."""
    return tfm.build("tiny", layers=1, d_model=256, vocab=200).eval()


def maps(network, *, packed):
    return {
        name for name, one in network.named_modules() if isinstance(one, Linear) and (one.packed is not None) == packed
    }


@on_x86
def test_maps_are_packed_only_within(network):
    with pytest.raises(ZeroDivisionError), packed(network):
        assert maps(network, packed=False) == set()
        with packed(network):
            pass
        assert maps(network, packed=False) == set()
        raise ZeroDivisionError
    assert maps(network, packed=True) == set()


@on_x86
@torch.inference_mode()
def test_packed_products_equal_plain_ones(network):
    plain = network(src=SRC, tgt=TGT)
    with packed(network):
        logits = network(src=SRC, tgt=TGT)
    assert not torch.equal(logits, plain)  # the kernels differ, so a few bits do
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)


@on_x86
@torch.inference_mode()
@pytest.mark.parametrize(("rows", "kernel"), [(1, "aten"), (63, "aten"), (64, "mkldnn"), (500, "mkldnn")])
def test_a_product_of_few_rows_by_a_small_weight_uses_the_plain_kernel(rows, kernel):
    generator = torch.Generator().manual_seed(rows)
    x_NI, weight_OI, bias_O = (torch.randn(shape, generator=generator) for shape in ((rows, 128), (128, 128), 128))
    product = float32_product(weight_OI, bias_O)
    with profile(activities=[ProfilerActivity.CPU]) as operators:
        y_NO = product(x_NI)
    assert ("mkldnn::_linear_pointwise" in {event.name for event in operators.events()}) == (kernel == "mkldnn")
    torch.testing.assert_close(y_NO, linear(x_NI, weight_OI, bias_O), rtol=1e-5, atol=1e-5)


def test_nothing_is_packed_in_lower_precision(network):
    with torch.autocast("cpu", torch.bfloat16), packed(network):
        assert maps(network, packed=True) == set()
    with packed(network.bfloat16()):
        assert maps(network, packed=True) == set()


@pytest.mark.grid
def test_each_search_reads_the_weights_of_its_time(network):
    tokenizer = Tokenizer.train(sentences(200, 0), 300)
    network = tfm.build("tiny", layers=1, d_model=256, vocab=tokenizer.size).eval()
    translator, texts = Translator(network, tokenizer), sentences(5, 1)
    before = translator.translate(texts)
    other = tfm.build("tiny", layers=1, d_model=256, vocab=tokenizer.size, seed=7)
    network.load_state_dict(other.state_dict())
    after = translator.translate(texts)
    assert after == Translator(other, tokenizer).translate(texts) != before


def rounded_product(x_NI, weight_OI, bias_O):
    """Return the product of int8 values with a scale per row of both factors, computed in float64."""
    x_scale_N1 = x_NI.abs().amax(1, keepdim=True) / activation_levels()
    scale_O1 = weight_OI.abs().amax(1, keepdim=True) / 127
    whole = (x_NI / x_scale_N1).round().double() @ (weight_OI / scale_O1).round().double().mT
    return whole * x_scale_N1 * scale_O1.mT + bias_O


@on_x86
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_an_int8_product_rounds_each_row_and_each_channel_by_its_own_scale(rows):
    generator = torch.Generator().manual_seed(rows)
    x_NI = torch.randn(rows, 96, generator=generator) * torch.logspace(-6, 6, rows)[:, None]
    weight_OI, bias_O = torch.randn(80, 96, generator=generator), torch.randn(80, generator=generator)
    y_NO = int8_product(weight_OI, bias_O)(x_NI)
    torch.testing.assert_close(y_NO.double(), rounded_product(x_NI, weight_OI, bias_O), rtol=1e-5, atol=1e-4)
    whole = int8_product(weight_OI, None)(x_NI[:, None].expand(-1, 3, -1))
    assert all(torch.equal(whole[row], int8_product(weight_OI, None)(x_NI[row].expand(3, -1))) for row in range(rows))


@on_x86
def test_an_int8_product_keeps_zeros_and_values_that_are_not_finite():
    x_NI = torch.zeros(4, 64)
    x_NI[1, 3], x_NI[2, 5], x_NI[3] = torch.nan, torch.inf, 1e-38
    weight_OI = torch.tensor([0.0, 1.0, 1.0])[:, None].expand(-1, 64)
    y_NO = int8_product(weight_OI, torch.tensor([0.0, 1.0, 0.0]))(x_NI)
    assert y_NO[0].tolist() == [0, 1, 0]
    assert y_NO[3].tolist() == [0, 1, pytest.approx(64e-38, rel=0.01, abs=0)]
    assert not y_NO[1:3].isfinite().any()


@pytest.mark.grid
@on_x86
def test_sums_do_not_saturate_without_vnni():
    code = "import torch; from tfm_blocks.network.packed import activation_levels, int8_product; print(activation_levels())"
    code += "; print(int8_product(torch.ones(64, 512), None)(torch.ones(2, 512)).unique().tolist())"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["63", "[512.0]"]


@on_x86
@torch.inference_mode()
def test_a_quantised_network_is_close_to_the_float_one(network):
    plain = network(src=SRC, tgt=TGT)
    with quantized(network):
        assert maps(network, packed=False) == {"logits.block"}
        rounded = network(src=SRC, tgt=TGT)
    assert maps(network, packed=True) == set()
    assert 0 < (rounded - plain).norm() / plain.norm() < 0.05


def test_a_model_or_device_without_int8_products_is_refused(network):
    with pytest.raises(ConfigError, match="int8 needs the CPU, but the model is on meta"):
        quantized(tfm.build("tiny", vocab=200).to("meta"))
    small = tfm.build("tiny", layers=1, vocab=200)
    emb, out = {"block": "embedding", "in": "src"}, {"block": "unembed", "tie": "emb"}
    recurrent = small_network({"src": "B S"}, {"emb": emb, "lstm": {"block": "lstm"}, "out": out}, d_model=128)
    with pytest.raises(ConfigError, match=r"int8 needs (a linear map of at least 65,536 weights|an x86 CPU)"):
        quantized(recurrent)  # torch.lstm reads its weights
    with pytest.raises(ConfigError, match=r"int8 needs (a linear map of at least 65,536 weights|an x86 CPU)"):
        quantized(small)
