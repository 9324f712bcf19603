"""Each preset of add & norm against its formula, written out; steps in training; DeepNorm's constants."""

import math

import pytest
import torch
from torch.nn import functional as F

from tests.network.small import network
from tfm_blocks.language.check import deepnorm_constants
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.weights import initial_distributions

B, N, D = 3, 5, 8


def one_layer(add_norm, **args):
    """Return a stack of one layer with one feed-forward network, on vectors."""
    stack = {"in": "x", "repeat": 1, "layer": {"ffn": {"block": "ffn"}}}
    return network({"x": f"B N {D}"}, {"stack": stack}, add_norm=add_norm, **args)


def norm(x_BND):
    return F.layer_norm(x_BND, [D])


FORMULAS = {
    "post": lambda x, f: norm(x + f(x)),
    "pre": lambda x, f: norm(x + f(norm(x))),
    "sandwich": lambda x, f: norm(x + norm(f(norm(x)))),
    "branch": lambda x, f: norm(x + norm(f(x))),
    "deepnorm": lambda x, f: norm(2**0.25 * x + f(x)),  # of one layer on one side
    "rezero": lambda x, f: x,
    "layerscale": lambda x, f: norm(x + 1e-4 * f(norm(x))),
    "none": lambda x, f: f(x),
}


@pytest.mark.parametrize("preset", FORMULAS)
@torch.no_grad()
def test_a_preset_is_its_formula(preset):
    net, x_BND = one_layer(preset), torch.randn(B, N, D)
    block = net["stack"]["0"]["ffn"].block
    torch.testing.assert_close(net(x=x_BND), FORMULAS[preset](x_BND, block))


@torch.no_grad()
def test_the_gain_of_rezero_is_learned_and_one_for_the_branch():
    net, x_BND = one_layer("rezero"), torch.randn(B, N, D)
    gain = net.get_parameter("stack.0.ffn.post.gain.weight")
    assert gain.shape == () and gain == 0
    gain.fill_(0.5)
    torch.testing.assert_close(net(x=x_BND), x_BND + 0.5 * net["stack"]["0"]["ffn"].block(x_BND))


@torch.no_grad()
def test_the_gain_of_layerscale_is_one_a_channel():
    net, x_BND = one_layer("layerscale"), torch.randn(B, N, D)
    gain_D = net.get_parameter("stack.0.ffn.post.gain.weight")
    assert gain_D.shape == (D,)
    gain_D.copy_(torch.arange(D))
    branch_BND = net["stack"]["0"]["ffn"].block(norm(x_BND))
    torch.testing.assert_close(net(x=x_BND), norm(x_BND + gain_D * branch_BND))


@torch.no_grad()
def test_steps_run_in_the_order_in_which_they_are_written():
    net, x_BND = one_layer({"post": [{"scale": 0.5}, "norm", {"add": "1/4"}]}), torch.randn(B, N, D)
    branch_BND = net["stack"]["0"]["ffn"].block(x_BND)
    torch.testing.assert_close(net(x=x_BND), norm(0.5 * branch_BND) + 0.25 * x_BND)


@torch.no_grad()
def test_a_nodes_own_lists_change_the_inherited_ones():
    stack = {"in": "x", "repeat": 1, "layer": {"ffn": {"block": "ffn", "add_norm": {"post": ["add"]}}}}
    net, x_BND = network({"x": f"B N {D}"}, {"stack": stack}, add_norm="pre"), torch.randn(B, N, D)
    torch.testing.assert_close(net(x=x_BND), norm(x_BND + net["stack"]["0"]["ffn"].block(norm(x_BND))))


@torch.no_grad()
def test_droppath_leaves_out_the_branch_of_whole_sequences_in_training():
    net, x_BND = one_layer({"post": [{"droppath": 0.5}, "add"]}), torch.randn(400, N, D)
    branch_BND = net["stack"]["0"]["ffn"].block(x_BND)
    torch.testing.assert_close(net(x=x_BND), x_BND + branch_BND)
    torch.manual_seed(0)
    added_BND = net.train()(x=x_BND) - x_BND
    dropped_B = (added_BND == 0).all((1, 2))
    assert 150 < dropped_B.sum() < 250
    torch.testing.assert_close(added_BND[~dropped_B], 2 * branch_BND[~dropped_B], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_dropout_falls_on_the_branch_before_it_is_added():
    net, x_BND = one_layer({"post": ["dropout", "add"]}, dropout=0.5), torch.randn(B, N, D)
    branch_BND = net["stack"]["0"]["ffn"].block(x_BND)
    torch.manual_seed(0)
    added_BND = net.train()(x=x_BND) - x_BND
    kept_BND = added_BND.abs() > 1e-6
    assert 0.3 < kept_BND.float().mean() < 0.7
    torch.testing.assert_close(added_BND[kept_BND], 2 * branch_BND[kept_BND], rtol=1e-4, atol=1e-5)


def test_the_norm_of_the_args_is_the_norm_of_every_step():
    net = one_layer("pre", norm={"block": "rmsnorm", "eps": 0.25})
    norms = [net["stack"]["0"]["ffn"].pre["norm"], net["stack"]["last"]["norm"]]
    assert all(type(one).__name__ == "RMSNorm" and one.eps == 0.25 for one in norms)


@torch.no_grad()
def test_the_activation_of_the_args_matches_the_feed_forward_network():
    net, x_BND = one_layer("none", activation="gelu"), torch.randn(B, N, D)
    block = net["stack"]["0"]["ffn"].block
    torch.testing.assert_close(net(x=x_BND), block.out(F.gelu(block.inner(x_BND))))


@pytest.mark.parametrize(
    ("encoder", "decoder", "decoding", "alpha", "beta"),
    [
        (12, 0, False, 24**0.25, 96**-0.25),
        (0, 12, True, 24**0.25, 96**-0.25),
        (6, 6, False, 1.4179, 0.4970),
        (6, 6, True, 2.0598, 0.3433),
        (100, 100, True, 4.1618, 0.1699),
        (18, 18, False, 0.81 * 18 ** (5 / 16), 0.87 * 18 ** (-5 / 16)),
    ],
)
def test_deepnorms_constants_match_the_papers_table(encoder, decoder, decoding, alpha, beta):
    assert deepnorm_constants(encoder, decoder, decoding=decoding) == pytest.approx((alpha, beta), rel=1e-3)


SELF, CROSS, FFN = ({"block": "attention", "mask": "causal"}, {"block": "attention", "kv": "encoder"}, {"block": "ffn"})


def deep(layer=None, add_norm="deepnorm"):
    graph = {
        "src_emb": {"block": "embedding", "in": "src"},
        "encoder": {"repeat": 3, "layer": layer or {"attn": {"block": "attention"}, "ffn": FFN}},
        "tgt_emb": {"block": "embedding", "in": "tgt"},
        "decoder": {"repeat": {"times": 2, "share": True}, "layer": {"self": SELF, "cross": CROSS, "ffn": FFN}},
        "logits": {"block": "unembed"},
    }
    return network({"src": "B S", "tgt": "B T"}, graph, add_norm=add_norm)


def test_deepnorm_counts_the_layers_of_both_sides_and_scales_the_residual():
    net = deep()
    assert net["encoder"]["2"]["ffn"].post["add"].factor == pytest.approx(0.81 * (3**4 * 2) ** (1 / 16))
    assert net["decoder"]["0"]["cross"].post["add"].factor == pytest.approx(6**0.25)


GROUP = {"attn": {"layer": {"attn": {"block": "attention"}}}, "ffn": {"layer": {"ffn": FFN}}}
NESTED = {"repeat": 2, "layer": {"attn": {"block": "attention"}, "ffn": FFN}}


@pytest.mark.parametrize(("layer", "count"), [(GROUP, 3), ({"inner": NESTED}, 6), ({"first": FFN, "inner": NESTED}, 6)])
def test_deepnorm_counts_the_innermost_layers_of_nested_stacks(layer, count):
    net = deep(layer)
    assert net["decoder"]["0"]["cross"].post["add"].factor == pytest.approx(6**0.25)
    post = next(
        module for name, module in net.named_modules() if name.startswith("encoder.0.") and name.endswith(".post")
    )
    assert post["add"].factor == pytest.approx(0.81 * (count**4 * 2) ** (1 / 16))


def test_deepnorm_shrinks_the_weights_that_the_residual_passes_through():
    """These are the value and output maps of attention and the feed-forward network: section 4 of Wang et al. 2022."""
    one, plain = (dict(deep(add_norm=add_norm).named_parameters()) for add_norm in ("deepnorm", "post"))
    beta = {"encoder": 0.87 * (3**4 * 2) ** (-1 / 16), "decoder": 24**-0.25}
    for name, parameter in one.items():
        factors = torch.full((len(parameter), 1), 1.0) if parameter.ndim == 2 else None
        if factors is None or name.split(".")[0] not in beta:
            continue
        shrink = beta[name.split(".")[0]]
        parts = {"qkv": factors[16:], "kv": factors[8:], "q": factors[:0]}.get(name.split(".")[-2], factors)
        parts.fill_(shrink)
        torch.testing.assert_close(parameter, plain[name] * factors, rtol=1e-5, atol=1e-6)


def test_deepnorm_shrinks_the_values_of_latent_attention_and_not_its_keys():
    sizes = {"d_latent": 6, "d_head": 4, "d_turned": 2, "d_value": 3}
    layer = {"attn": {"block": "latent_attention", **sizes}, "ffn": FFN}
    models = [deep(layer, add_norm) for add_norm in ("deepnorm", "post")]
    one, plain = (model.get_parameter("encoder.0.attn.block.up.weight").view(2, 7, 6) for model in models)
    beta = 0.87 * (3**4 * 2) ** (-1 / 16)
    torch.testing.assert_close(one, plain * torch.tensor([1.0] * 4 + [beta] * 3)[:, None], rtol=1e-5, atol=1e-6)
    bound = math.sqrt(6 / (6 + 14))
    shown = initial_distributions(network_without_values(models[0].spec), {})["encoder.0.attn.block.up.weight"]
    assert shown == f"uniform ±{bound:.3g}, uniform ±{bound * beta:.3g}"


def test_deepnorm_reaches_the_branches_of_a_parallel():
    both = {"both": {"join": "sum", "parallel": {"attn": {"block": "attention"}, "ffn": FFN}}}
    one, plain = (
        deep(both, add_norm).get_parameter("encoder.0.both.ffn.block.out.weight") for add_norm in ("deepnorm", "post")
    )
    torch.testing.assert_close(one, plain * 0.87 * (3**4 * 2) ** (-1 / 16), rtol=1e-5, atol=1e-6)
    assert deep(both)["encoder"]["0"]["both"].post["add"].factor == pytest.approx(0.81 * (3**4 * 2) ** (1 / 16))
