"""Alternating updates against a loop over positions and streams in float64, Gemma 3n's of transformers, and residuals."""

import pytest
import torch
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp

import tfm_blocks as tfm
from tests.network.examples import ALL, VOCAB, inputs_of
from tfm_blocks.blocks.alternating import CorrectStreams, PredictStreams
from tfm_blocks.blocks.streams import SelectStream
from tfm_blocks.network.build import build_network, check_model

B, T, M, D = 2, 3, 4, 6
MODELS = {path.stem: path for path in ALL}
NORM = {"block": "rmsnorm", "eps": 1e-6}


def normal(module):
    """Fill the weights of a module with random values."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(std=0.3)
    return module.eval()


@torch.no_grad()
@pytest.mark.parametrize("stream", [0, 2, M + 1])
def test_streams_are_predicted_and_corrected_as_in_a_loop(stream):
    predict, correct = (
        normal(block).double()
        for block in (PredictStreams(None, streams=M), CorrectStreams(M * D, D, None, stream=stream))
    )
    torch.manual_seed(2)
    old_BTMD, new_BTD = torch.randn(B, T, M, D).double(), torch.randn(B, T, D).double()
    predicted_BTX = predict(old_BTMD.flatten(2))
    corrected_BTX = correct(predicted_BTX, new_BTD)
    p, g = torch.eye(M) + predict.learned.view(M, M), 1 + correct.learned  # of the paper
    for b in range(B):
        for t in range(T):
            predicted = [sum(p[i, j] * old_BTMD[b, t, j] for j in range(M)) for i in range(M)]
            corrected = [predicted[i] + g[i] * (new_BTD[b, t] - predicted[stream % M]) for i in range(M)]
            torch.testing.assert_close(predicted_BTX[b, t], torch.cat(predicted))
            torch.testing.assert_close(corrected_BTX[b, t], torch.cat(corrected))


def gemma_layer(stream):
    """Return a network of a layer of Gemma 3n with a feed-forward network alone, and transformers' AltUp."""
    select = {"block": "select_stream", "d_out": D, "stream": stream}
    features = {"block": "tanh_cap", "cap": 1.0}
    graph = {
        "route": {"block": "linear", "bias": False, "d_out": M, "add_norm": {"pre": ["norm"], "post": [{"scale": 1 / D}]}, "in": {**select, "in": "x"}},
        "predicted": {"block": "predict_streams", "streams": M, "in": "x", "features": {**features, "in": "route"}},
        "active": select,
        "ffn": {"block": "ffn", "d_ff": 8, "add_norm": {"pre": ["norm"], "post": ["add"]}},
        "routed": {"same": "route", "in": "ffn"},
        "corrected": {"block": "correct_streams", "stream": stream, "in": "predicted", "y": "ffn", "features": {**features, "in": "routed"}},
    }  # fmt: skip
    spec = check_model({"inputs": {"x": f"B T {M * D}"}, "args": {"norm": NORM}, "graph": graph})
    network = normal(build_network(spec, seed=1))
    config = Gemma3nTextConfig(
        hidden_size=D, num_attention_heads=2, altup_num_inputs=M, altup_active_idx=stream, rms_norm_eps=NORM["eps"]
    )
    other = Gemma3nTextAltUp(config).eval()
    values = network.state_dict()
    addresses = {
        "route.pre.norm.weight": other.router_norm,
        "route.block.weight": other.modality_router,
        "predicted.block.map.weight": other.prediction_coefs,
        "corrected.block.map.weight": other.correction_coefs,
    }
    for address, module in addresses.items():
        module.weight.data.copy_(values[address])
    return network, other


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stream", [0, 2])
def test_a_layer_of_parts_is_the_alternating_update_of_gemma_3n(stream, dtype):
    network, other = (module.to(dtype) for module in gemma_layer(stream))
    torch.manual_seed(3)
    x_BTMD = torch.randn(B, T, M, D, dtype=dtype)
    predicted_MBTD = other.predict(x_BTMD.permute(2, 0, 1, 3))
    ffn = network["ffn"]
    new_BTD = predicted_MBTD[stream] + ffn.block(ffn.pre.norm(predicted_MBTD[stream]))
    expected_MBTD = other.correct(predicted_MBTD, new_BTD)
    corrected_BTX = network(x=x_BTMD.flatten(2))
    torch.testing.assert_close(corrected_BTX, expected_MBTD.permute(1, 2, 0, 3).flatten(2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stream", [1, M + 1])
def test_a_stream_is_selected_modulo_their_number(stream):
    x_BTX = torch.randn(B, T, M * D)
    torch.testing.assert_close(SelectStream(M * D, d_out=D, stream=stream)(x_BTX), x_BTX[:, :, D : 2 * D])


@torch.no_grad()
@pytest.mark.parametrize("model", ["alternating_updates", "routed_updates"])
def test_a_model_begins_with_the_residual_connections_of_pre_norm(model):
    """All streams are equal at first, so that their sum is a multiple of the stream, which the norm removes."""
    sizes = {"d_model": 16, "d_ff": 24, "heads": 2, "layers": 4, "vocab": VOCAB, "dropout": 0.0}
    own, plain = (tfm.build(str(MODELS[name]), seed=1, **sizes).eval() for name in (model, "decoder_only"))
    values = dict(own.named_parameters())
    for name, weight in plain.named_parameters():
        weight.copy_(values[name.replace("decoder.last.norm", "logits.in_x.block")])
    inputs = inputs_of(own)
    torch.testing.assert_close(own(**inputs), plain(**inputs), rtol=1e-4, atol=1e-4)
