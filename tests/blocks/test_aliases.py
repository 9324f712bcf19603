"""Aliases of blocks build the aliased block, with the parameters that older runs have."""

import pytest
import torch

import tfm_blocks.blocks  # noqa: F401
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.registry.blocks import REGISTRY

PLAIN = {"qkv.weight", "qkv.bias", "out.weight", "out.bias"}
NORMED = PLAIN | {"q_norm.weight", "k_norm.weight"}
PARAMETERS = {
    "naive_attention": PLAIN,
    "normed_attention": NORMED,
    "wide_normed_attention": NORMED,
    "late_normed_attention": NORMED,
    "head_normed_attention": PLAIN | {"q_gain", "k_gain"},
    "gated_attention": PLAIN | {"gate.weight", "gate.bias"},
    "gated_normed_attention": NORMED | {"gate.weight", "gate.bias"},
    "clamped_attention": PLAIN,
    "biased_attention": PLAIN - {"out.bias"},
    "two_width_attention": PLAIN,
}
SAME = [
    ("normed_attention", {}, {"qk_norm": "rmsnorm"}),
    ("wide_normed_attention", {"qk_norm": "layernorm"}, {"qk_norm": "layernorm", "qk_norm_kind": "joint"}),
    ("head_normed_attention", {}, {"qk_norm": "plain_layernorm", "qk_norm_kind": "head_gains"}),
    ("late_normed_attention", {}, {"qk_norm": "rmsnorm", "qk_norm_kind": "post_position"}),
    ("gated_attention", {"bias": False}, {"gate": "sigmoid_gate", "bias": False}),
    ("gated_normed_attention", {}, {"gate": "sigmoid_gate", "qk_norm": "rmsnorm"}),
    ("clamped_attention", {"clip_qkv": 0.1}, {"clip_qkv": 0.1}),
    ("biased_attention", {}, {"bias": "qkv"}),
    ("biased_attention", {"qkv_bias": False, "out_bias": True}, {"bias": "out"}),
    ("biased_attention", {"qkv_bias": True, "out_bias": True}, {"bias": True}),
    ("biased_attention", {"qkv_bias": False}, {"bias": False}),
    ("two_width_attention", {"d_head": 5, "d_value": 3}, {"d_head": 5, "d_value": 3}),
    ("naive_attention", {}, {}),
]


def network(block, args=None, **arguments):
    node = {"block": block, "in": "x", "heads": 4, "mask": "causal", **arguments}
    return build_network(
        check_model({"inputs": {"x": "B N 16"}, "args": args or {}, "graph": {"node": node}}), seed=1
    ).eval()


@pytest.mark.parametrize("name", PARAMETERS)
def test_an_alias_has_the_parameters_of_the_block_that_had_its_name(name):
    widths = {"d_head": 5, "d_value": 3} if name == "two_width_attention" else {}
    assert {one.removeprefix("node.block.") for one in network(name, **widths).state_dict()} == PARAMETERS[name]


def test_every_alias_is_tried():
    assert set(PARAMETERS) == {name for name, info in REGISTRY.blocks.items() if info.alias_of}


@pytest.mark.parametrize(("name", "arguments", "written"), SAME)
@torch.no_grad()
def test_an_alias_starts_and_computes_as_the_block_it_stands_for(name, arguments, written):
    one, other = network(name, **arguments), network("attention", **written)
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())
    x_BND = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(one(x=x_BND), other(x=x_BND))


def test_an_arg_reaches_an_alias_only_if_the_block_of_its_name_had_it():
    args = {"bias": False, "gate": "sigmoid_gate", "scores": {"block": "softcap", "cap": 0.1}}
    assert {one.removeprefix("node.block.") for one in network("biased_attention", args).state_dict()} == PARAMETERS[
        "biased_attention"
    ]
    assert not network("normed_attention", {"scores": "sink"}).get_submodule("node.block").state_dict().keys() & {
        "scores.weight"
    }


def test_a_kind_of_norm_without_a_norm_is_refused():
    with pytest.raises((ConfigError, ValueError), match="there is no norm: write qk_norm: rmsnorm"):
        network("attention", qk_norm_kind="joint")


def test_biases_match_the_maps_that_bias_names():
    def biased(bias):
        return [
            one.removeprefix("node.block.") for one in network("attention", bias=bias).state_dict() if "bias" in one
        ]

    assert [biased(one) for one in (True, False, "qkv", "out")] == [
        ["qkv.bias", "out.bias"],
        [],
        ["qkv.bias"],
        ["out.bias"],
    ]
    with pytest.raises(ConfigError, match="bias must be one of true, false, qkv, out, but is 'yes'"):
        network("attention", bias="yes")
    with pytest.raises(ConfigError, match="bias must be one of true, false, qkv, out, but is 1"):
        network("attention", bias=1)
