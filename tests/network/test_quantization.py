"""Weights of three values and activations of 8 bits: equal to AutoBitLinear of transformers, and refused when wrong."""

import json

import pytest
import torch
from transformers.integrations.bitnet import AutoBitLinear

from tests.conftest import expect_problem
from tests.network.examples import TESTS, build, inputs_of
from tests.network.test_adapters import SIZES, spec_of
from tfm_blocks.blocks.layers.expert_linear import ExpertLinear
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.rounding import int8, ternary
from tfm_blocks.cli import main
from tfm_blocks.errors import RunError
from tfm_blocks.exchange.ctranslate2.rules import read_engine_graph
from tfm_blocks.language.difference import find_changes
from tfm_blocks.network.build import build_network, count_parameters
from tfm_blocks.network.contract.expectations import expect_steps
from tfm_blocks.network.packed import activation_levels, float32_product, int8_product
from tfm_blocks.registry.blocks import REGISTRY

GROUP = "model.quantize.a={where: {role: matrix}, weights: ternary}"


def theirs_of(weight_OI, bias_O=None):
    layer = AutoBitLinear(weight_OI.shape[1], weight_OI.shape[0], bias_O is not None, online_quant=True)
    with torch.no_grad():
        for parameter, values in zip(layer.parameters(), (weight_OI, bias_O), strict=False):
            parameter.copy_(values)
    return layer


def rounding(linear):
    """Fill a map with random numbers, and let it round its weights and inputs."""
    generator = torch.Generator().manual_seed(1)
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    linear.round_weight, linear.round_input = ternary, int8
    return linear


@torch.compiler.set_stance("force_eager")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_stacked_map_has_the_values_and_gradients_of_a_layer_of_transformers(dtype):
    ours = rounding(Linear(24, 21, parts=[16, 5])).to(dtype)
    layers = [
        theirs_of(*pair).to(dtype) for pair in zip(ours.weight.split([16, 5]), ours.bias.split([16, 5]), strict=True)
    ]
    x_BTI, grad_BTO = torch.randn(3, 7, 24, dtype=dtype, requires_grad=True), torch.randn(3, 7, 21, dtype=dtype)
    y_BTO, expected_BTO = ours(x_BTI), torch.cat([layer(x_BTI) for layer in layers], 2)
    assert len(ours.rounded_weight().unique()) == 5  # 0 and two other values of each map
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(y_BTO, expected_BTO, **tolerance)
    (grad_BTI,), (expected_BTI,) = (
        torch.autograd.grad(y, x_BTI, grad_BTO, retain_graph=True) for y in (y_BTO, expected_BTO)
    )
    torch.testing.assert_close(grad_BTI, expected_BTI, **tolerance)
    for y in (y_BTO, expected_BTO):
        y.backward(grad_BTO)
    for name in ("weight", "bias"):
        expected = torch.cat([layer.get_parameter(name).grad for layer in layers])
        torch.testing.assert_close(ours.get_parameter(name).grad, expected, **tolerance)


@torch.compiler.set_stance("force_eager")
def test_each_map_of_each_expert_has_the_values_and_gradients_of_a_layer_of_transformers():
    ours = rounding(ExpertLinear(3, 24, 10, parts=2))
    layers = [[theirs_of(part) for part in weight_OI.split(5)] for weight_OI in ours.weight]
    x_RI, grad_RO = torch.randn(12, 24), torch.randn(12, 10)
    y_RO = ours(x_RI, torch.tensor([4, 4, 12]))  # expert 1 has no row
    rows = x_RI.split([4, 0, 8])
    expected_RO = torch.cat([torch.cat([half(x) for half in pair], 1) for pair, x in zip(layers, rows, strict=True)])
    torch.testing.assert_close(y_RO, expected_RO)
    for y in (y_RO, expected_RO):
        y.backward(grad_RO)
    expected_EOI = torch.stack([torch.cat([half.weight.grad for half in pair]) for pair in layers])
    torch.testing.assert_close(ours.weight.grad, expected_EOI)


def test_a_group_rounds_its_maps_and_adds_no_parameter():
    spec = spec_of(
        "base", "model.quantize.a={where: {node: encoder, role: matrix}, weights: ternary, activations: null}"
    )
    network = build_network(spec, seed=1)
    maps = {name: one for name, one in network.named_modules() if isinstance(one, Linear)}
    encoder = [
        f"encoder.{i}.{name}"
        for i in (0, 1)
        for name in ("attn.block.qkv", "attn.block.out", "ffn.block.inner", "ffn.block.out")
    ]
    assert [name for name, one in maps.items() if one.round_weight is not None] == encoder
    assert all(one.round_input is None for one in maps.values())
    plain = spec_of("base")
    assert count_parameters(spec) == count_parameters(plain)
    theirs = build_network(plain, seed=1).state_dict()
    assert all(torch.equal(theirs[name], weight) for name, weight in network.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("product", [float32_product, int8_product])
def test_products_for_decoding_round_too(product):
    linear = rounding(Linear(256, 384, parts=3))
    x_ND = torch.randn(5, 256)
    expected_NO, weight_DO = linear(x_ND), linear(torch.eye(256)) - linear.bias
    linear.pack(product)
    seven_bits = product is int8_product and activation_levels() < 127  # a CPU without VNNI
    step_N1 = x_ND.abs().amax(1, keepdim=True) / activation_levels()
    bound_NO = 1e-4 + seven_bits * step_N1 / 2 * weight_DO.abs().sum(0)
    assert ((linear(x_ND) - expected_NO).abs() <= bound_NO).all()


@pytest.mark.grid
@torch.no_grad()
def test_steps_with_rounded_activations_equal_the_pass():
    network = build(next(path for path in TESTS if path.stem == "ternary"), activations="int8").eval().double()
    for seed in range(3):
        expect_steps(network, inputs_of(network, seed), (0, 1, 4))


@pytest.mark.grid
def test_tables_differences_figures_and_pages_show_the_formats(tmp_path, capsys):
    changes = find_changes(spec_of("base"), spec_of("base", GROUP), REGISTRY)
    assert {(change.kind, change.where, change.after) for change in changes if "ffn" in change.where} == {
        ("quantisation", f"{stack}.*.ffn", "inner, out: ternary weights, int8 activations")
        for stack in ("encoder", "decoder")
    }
    for command, name in (("figure", "model.svg"), ("view", "model.html")):
        main([command, "base", *SIZES, GROUP, "-o", str(tmp_path / name)])
    assert "ternary weights" in (tmp_path / "model.svg").read_text()
    assert "q, k, v, out: ternary weights, int8 activations" in (tmp_path / "model.html").read_text()
    capsys.readouterr()
    main(["show", "base", *SIZES, GROUP, "--json"])
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert {node["quantized"] for node in nodes if node["block"] == "ffn"} == {
        "inner, out: ternary weights, int8 activations"
    }
    main(["show", "base", *SIZES, GROUP])
    assert "ternary ffn → dropout add norm" in capsys.readouterr().out


def group(where, rest="weights: ternary"):
    return f"model.quantize.a={{where: {where}, {rest}}}"


@pytest.mark.parametrize(
    ("override", "address", "rule", "help"),
    [
        (group("{role: matrx}"), "a.where.role", "no role is called 'matrx'", "did you mean matrix"),
        (group("{role: gain}"), "a.where", "matches no linear map, only weights such as encoder.0", "roles matrix"),
        (group("{role: head}"), "a.where", "only the tied weight src_emb.block.weight, which logits also reads", "tie: null"),
        (group("{role: matrix}", "weights: binary"), "a.weights", "one of ternary, but is 'binary'", "ternary"),
        (group("{role: matrix}", "weights: ternary, activations: int4"), "a.activations", "one of int8", "int8"),
        (group("{role: matrix}", "activations: int8"), "a.weights", "is missing", "weights"),
        (group("{role: matrix}", "weights: ternary, parts: [q]"), "a.parts", "no such setting", ""),
    ],
)  # fmt: skip
def test_wrong_groups_name_place_rule_and_fix(override, address, rule, help):
    with expect_problem(f"model.quantize.{address}", rule, help):
        spec_of("base", override)


def test_adapters_cannot_be_merged_into_quantised_weights():
    with expect_problem("model.adapt", "cannot be combined with quantize"):
        spec_of("base", GROUP, "model.adapt.a={where: {role: matrix}, rank: 2, alpha: 4}")


def test_ctranslate2_is_refused_by_node():
    with pytest.raises(RunError, match=r"encoder\.\*\.attn.*does not cover model.quantize"):
        read_engine_graph(spec_of("base", GROUP), "run")
