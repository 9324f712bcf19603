"""Rotary positions against Hugging Face's functions."""

import re
from math import inf

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tfm_blocks.blocks.attention import Attention
from tfm_blocks.blocks.layers.state import CacheShape
from tfm_blocks.blocks.rotary import Llama3Rotary, LongRotary, Rotary, Yarn
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.registry.values import Part

K, N = 32, 200
SCALED = {"factor": 4.0, "original_max_position_embeddings": 64}


def config(**rope):
    rope = {"rope_type": "default", "rope_theta": 500.0, **rope}
    return LlamaConfig(hidden_size=4 * K, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope)


@pytest.mark.parametrize(
    ("own", "rope"),
    [
        (Rotary(K, base=500.0), {}),
        (Rotary(K, base=500.0, factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (Yarn(K, base=500.0, factor=4.0, trained_length=64), {"rope_type": "yarn", **SCALED}),
        (
            Llama3Rotary(K, base=500.0, factor=4.0, trained_length=64),
            {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED},
        ),
    ],
    ids=["plain", "linear", "yarn", "llama3"],
)
def test_queries_and_keys_are_turned_as_llamas_are(own, rope):
    q_BHNK, k_BHNK = torch.randn(2, 4, N, K), torch.randn(2, 4, N, K)
    positions_N = torch.arange(N)
    cos, sin = LlamaRotaryEmbedding(config(**rope))(q_BHNK, positions_N[None])
    expected = apply_rotary_pos_emb(q_BHNK, k_BHNK, cos, sin)
    for rotated, one in zip((own.rotate(q_BHNK, positions_N), own.rotate(k_BHNK, positions_N)), expected, strict=True):
        torch.testing.assert_close(rotated, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_the_yarn_of_a_part_of_the_width_has_hugging_faces_frequencies(share):
    own = Yarn(K, base=500.0, share=share, factor=4.0, trained_length=64)
    reference_config = config(rope_type="yarn", partial_rotary_factor=share, **SCALED)
    expected_I, gain = ROPE_INIT_FUNCTIONS["yarn"](reference_config, torch.device("cpu"))
    torch.testing.assert_close(own.frequencies(torch.device("cpu")), expected_I)
    assert own.gain == pytest.approx(gain)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("attention_factor", [None, 1.0, 0.8])
def test_yarn_rounds_its_range_and_takes_its_factor_as_hugging_face_does(truncate, attention_factor):
    rope = {"truncate": truncate, "attention_factor": attention_factor}
    own = Yarn(K, base=500.0, factor=4.0, trained_length=64, **rope)
    expected_I, gain = ROPE_INIT_FUNCTIONS["yarn"](config(rope_type="yarn", **SCALED, **rope), torch.device("cpu"))
    torch.testing.assert_close(own.frequencies(torch.device("cpu")), expected_I)
    assert own.gain == pytest.approx(gain)


@pytest.mark.parametrize("attention_factor", [None, 1.25])
def test_longrope_has_hugging_faces_frequencies(attention_factor):
    short, long = ([1.0 + step * one for one in range(K // 2)] for step in (0.05, 0.5))
    reference_config = config(
        rope_type="longrope", short_factor=short, long_factor=long, attention_factor=attention_factor, **SCALED
    )
    for factors, length in ((short, 64), (long, 65)):
        own = LongRotary(
            K, base=500.0, factors=factors, trained_length=64, factor=4.0, attention_factor=attention_factor
        )
        expected_I, gain = ROPE_INIT_FUNCTIONS["longrope"](reference_config, torch.device("cpu"), seq_len=length)
        torch.testing.assert_close(own.frequencies(torch.device("cpu")), expected_I)
        assert own.gain == pytest.approx(gain)


@pytest.mark.parametrize(
    ("factors", "rule"),
    [
        ([1.0, 2.0], "one for each of 4 pairs, but are 2"),
        ([0.0], "factors must be from 1e-06 to 1000000.0, but one is 0.0"),
    ],
)
def test_factors_that_do_not_fit_the_pairs_are_refused(factors, rule):
    with pytest.raises(ValueError, match=rule):
        LongRotary(8, factors=factors, trained_length=64)


def test_neighbours_are_turned_as_complex_numbers_are():
    own, x_BND = Rotary(8, layout="pairs", base=100.0), torch.randn(2, 5, 8)
    angle_NI = torch.arange(5.0)[:, None] * 100.0 ** -(torch.arange(0, 8, 2) / 8)
    expected = torch.view_as_complex(x_BND.unflatten(2, (4, 2))) * torch.polar(torch.ones(5, 4), angle_NI)
    torch.testing.assert_close(own(x_BND), torch.view_as_real(expected).flatten(2))


def test_features_beyond_the_rotated_fraction_are_unchanged():
    own, x_BND = Rotary(16, share=0.25), torch.randn(2, 5, 16)
    assert torch.equal(own(x_BND)[..., 4:], x_BND[..., 4:])
    torch.testing.assert_close(own(x_BND)[..., :4], Rotary(4)(x_BND[..., :4]))


@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_products_depend_only_on_the_distance(layout):
    own, q_K, k_K = Rotary(8, layout=layout), torch.randn(8), torch.randn(8)
    q_NK, k_NK = (own.rotate(one.expand(9, 8), torch.arange(9)) for one in (q_K, k_K))
    products_NN = q_NK @ k_NK.T
    torch.testing.assert_close(products_NN[1:, 1:], products_NN[:-1, :-1], rtol=1e-4, atol=1e-5)


def test_an_odd_number_of_turning_numbers_is_refused():
    with pytest.raises(ValueError, match="share · 10 is 5: it must be even"):
        Rotary(10, share=0.5)


@pytest.mark.parametrize(
    ("share", "rule"), [(0.125, "D * share // 1 % 2 == 0"), (0.01, "D * share >= 2"), (1.1, "share <= 1")]
)
def test_a_node_with_an_odd_number_of_turning_numbers_breaks_a_rule_of_the_block(share, rule):
    composed = compose_model(
        "tiny", ["d_model=40", "heads=4", f"++model.graph.src_pos={{block: rotary, share: {share}}}"]
    )
    with pytest.raises(ConfigError, match=re.escape(f"({rule}), but")):
        check_model(composed.model, composed.sources)


@pytest.mark.parametrize(
    ("node", "bounds"), [("decoder.layer.cross", {"src": 4, "tgt": 4}), ("encoder.layer.attn", {"src": 4, "tgt": inf})]
)
def test_a_bounded_rotation_bounds_the_sequences_that_the_attention_reads(node, bounds):
    position = "{block: longrope, factors: [1.0], trained_length: 4, max_length: 4}"
    composed = compose_model("tiny", ["layers=1", f"++model.graph.{node}.position={position}"])
    network = build_network(check_model(composed.model, composed.sources), seed=1).eval()
    assert {name: network.longest(name).tokens for name in bounds} == bounds
    ids = {name: torch.ones(1, min(bound, 9), dtype=torch.int64) for name, bound in bounds.items()}
    network(**ids)
    for name, bound in bounds.items():
        if bound < inf:
            longer = ids | {name: torch.ones(1, 5, dtype=torch.int64)}
            with pytest.raises(ValueError, match="max_length = 4 positions, but the sequence has 5"):
                network(**longer)


def test_a_step_beyond_a_bounded_rotation_is_refused():
    attention = Attention(
        8,
        None,
        heads=2,
        mask="causal",
        position=Part("longrope", {"factors": [1.0], "trained_length": 4, "max_length": 4}),
    )
    own, x_B1D = LongRotary(8, factors=[1.0], trained_length=4, max_length=4), torch.randn(1, 1, 8)
    for block in (attention, own):
        state = block.start(room=CacheShape(1, 9, x_B1D))
        for position in range(4):
            state.position = position
            block.step(x_B1D, state)
        state.position = 4
        with pytest.raises(ValueError, match="max_length = 4 positions, but the sequence has 5"):
            block.step(x_B1D, state)
