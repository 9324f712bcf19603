"""Separate projections of global positions against LED, and against the shared ones."""

import pytest
import torch
from transformers import LEDConfig
from transformers.models.led.modeling_led import LEDEncoderAttention

from tests.blocks.naive import with_random_weights
from tfm_blocks.blocks.restricted import RestrictedGlobalAttention

B, T, D, HEADS, WINDOW = 2, 16, 8, 2, 4


def inputs():
    """Return vectors and a mask whose second row ends in padding."""
    keep_BT = torch.arange(T) < torch.tensor([[T], [11]])
    return torch.randn(B, T, D, requires_grad=True), keep_BT


@pytest.mark.parametrize("first", [1, 3])
def test_separate_projections_and_their_gradients_are_those_of_led(first):
    config = LEDConfig(d_model=D, encoder_attention_heads=HEADS, attention_window=[WINDOW], attention_dropout=0.0)
    theirs = LEDEncoderAttention(config, 0).eval()
    own = with_random_weights(RestrictedGlobalAttention(D, heads=HEADS, r=WINDOW + 1, first=first, separate=True), 0.5)
    parts = {
        "query key value": own.qkv,
        "query_global": own.global_q,
        "key_global value_global": own.global_kv,
    }
    with torch.no_grad():
        for names, module in parts.items():
            for kind in ("weight", "bias"):
                values = module.get_parameter(kind).chunk(len(names.split()))
                for name, value in zip(names.split(), values, strict=True):
                    theirs.longformer_self_attn.get_submodule(name).get_parameter(kind).copy_(value)
        theirs.output.load_state_dict(own.out.state_dict())
    x_BTD, keep_BT = inputs()
    is_global_BT = (torch.arange(T) < first).expand(B, T)
    mask_BT = torch.where(is_global_BT, 10000.0, torch.where(keep_BT, 0.0, -10000.0))
    marks = {"is_index_masked": mask_BT < 0, "is_index_global_attn": is_global_BT, "is_global_attn": True}
    outputs = own(x_BTD, keep_BT=keep_BT)[keep_BT], theirs(x_BTD, mask_BT, **marks)[0][keep_BT]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(y_ND.square().sum(), x_BTD) for y_ND in outputs)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [2, T])
@torch.no_grad()
def test_with_equal_projections_the_outputs_and_weights_are_those_of_shared_ones(length):
    options = {"heads": 4, "kv_heads": 2, "d_value": 3, "r": 5, "first": 3, "position": None}
    shared = with_random_weights(RestrictedGlobalAttention(D, **options))
    own = RestrictedGlobalAttention(D, separate=True, **options).eval()
    q, kv = own.widths.maps[0], sum(own.widths.maps[1:])
    for kind in ("weight", "bias"):
        values = shared.qkv.get_parameter(kind)
        own.global_q.get_parameter(kind).copy_(values[:q])
        own.global_kv.get_parameter(kind).copy_(values[q : q + kv])
    own.load_state_dict(shared.state_dict(), strict=False)
    x_BTD, keep_BT = (x[:, :length] for x in inputs())
    torch.testing.assert_close(own(x_BTD, keep_BT=keep_BT), shared(x_BTD, keep_BT=keep_BT))
    torch.testing.assert_close(own.weights(x_BTD, keep_BT=keep_BT), shared.weights(x_BTD, keep_BT=keep_BT))


def test_separate_projections_are_refused_with_a_causal_mask():
    with pytest.raises(ValueError, match="attention in both directions"):
        RestrictedGlobalAttention(D, heads=HEADS, r=5, mask="causal", separate=True)
