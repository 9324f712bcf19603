"""Adapters of low rank: which maps `adapt` selects, what it refuses, and that decoding and costs count them."""

import json

import pytest
import torch

from tests.conftest import expect_problem
from tests.network.small import ARGS
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.difference import find_changes
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import saved_weights
from tfm_blocks.network.packed import packed
from tfm_blocks.registry.blocks import REGISTRY

SIZES = ["d_model=16", "d_ff=24", "heads=2", "layers=2", "vocab=40"]
ATTENTION = "{where: {role: matrix, block: attention}, rank: 2, alpha: 4}"


def spec_of(model, *overrides):
    composed = compose_model(model, [*SIZES, *overrides])
    return check_model(composed.model, composed.sources)


def with_random_adapters(spec) -> Network:
    network = build_network(spec, seed=1).eval()
    for weight in saved_weights(network).values():
        torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(weight.numel()))
    return network


def test_each_map_that_a_stack_holds_has_its_own_matrices_and_only_adapters_are_trained():
    network = build_network(spec_of("base", f"model.adapt.a={ATTENTION}"), seed=1)
    qkv = network.get_submodule("encoder.1.attn.block.qkv")
    assert qkv.adapter.a.shape == (6, 16) and qkv.adapter.b.shape == (48, 2)
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    maps = [f"{stack}.{i}.{name}" for i in (0, 1) for stack, name in (("encoder", "attn"), ("decoder", "self"))]
    addresses = [f"{one}.block.{part}" for one in maps for part in ("qkv", "out")]
    addresses += [f"decoder.{i}.cross.block.{part}" for i in (0, 1) for part in ("q", "kv", "out")]
    assert trained == {f"{address}.adapter.{matrix}" for address in addresses for matrix in "ab"}
    plain = build_network(spec_of("base"), seed=1)
    ids = {"src": torch.randint(3, 40, (2, 5)), "tgt": torch.randint(3, 40, (2, 4))}
    assert torch.equal(network.eval()(**ids), plain.eval()(**ids))  # B is 0


def test_parts_select_queries_and_values():
    spec = spec_of("base", "model.adapt.a={where: {block: attention}, rank: 2, alpha: 2, parts: [q, v]}")
    network = with_random_adapters(spec)
    qkv = network.get_submodule("encoder.0.attn.block.qkv")
    x_ND = torch.randn(3, 16)
    a, b = qkv.adapter.a, qkv.adapter.b
    q, v = (x_ND @ a[place : place + 2].T @ rows.T for place, rows in ((0, b[:16]), (2, b[16:])))
    added_N3D = qkv(x_ND) - torch.nn.functional.linear(x_ND, qkv.weight, qkv.bias)
    torch.testing.assert_close(added_N3D, torch.cat([q, torch.zeros(3, 16), v], 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        qkv.merged_weight() - qkv.weight, torch.cat([b[:16] @ a[:2], torch.zeros(16, 16), b[16:] @ a[2:]])
    )
    assert network.get_submodule("decoder.0.cross.block.kv").adapter.b.shape == (16, 2)


def test_the_first_group_counts_and_the_scale_follows_the_scaling():
    spec = spec_of(
        "base",
        "model.adapt.encoder={where: {node: encoder.*.ffn}, rank: 4, alpha: 8, scaling: rslora}",
        "model.adapt.rest={where: {role: matrix}, rank: 2, alpha: 8}",
    )
    found = {node.address: node.adapter_text for node in spec.nodes if node.adapters}
    assert found["encoder.1.ffn"] == "inner, out: rank 4, scale 4"
    assert found["decoder.0.cross"] == "q, k, v, out: rank 2, scale 4"


def test_every_expert_has_its_own_matrices():
    spec = spec_of("moe", "model.adapt.a={where: {role: experts}, rank: 2, alpha: 2}")
    network = with_random_adapters(spec)
    experts = next(module for module in network.modules() if type(module).__name__ == "ExpertLinear")
    count = len(experts.weight)
    assert experts.adapter.a.shape[0] == experts.adapter.b.shape[0] == count
    x_RI, ends_E = torch.randn(2 * count, experts.weight.shape[2]), torch.arange(2, 2 * count + 1, 2)
    whole_EOI = experts.merged_weight()
    expected = torch.cat([x_RI[2 * e : 2 * e + 2] @ whole_EOI[e].T for e in range(count)])
    torch.testing.assert_close(experts(x_RI, ends_E), expected, rtol=1e-4, atol=1e-5)


def test_packed_decoding_adds_the_adapters():
    network = with_random_adapters(spec_of("base", f"model.adapt.a={ATTENTION}"))
    ids = {"src": torch.randint(3, 40, (2, 5)), "tgt": torch.randint(3, 40, (2, 4))}
    with torch.no_grad():
        expected = network(**ids)
        with packed(network):
            torch.testing.assert_close(network(**ids), expected, rtol=1e-4, atol=1e-5)


def test_a_difference_names_the_adapters():
    plain, adapted = spec_of("base"), spec_of("base", f"model.adapt.a={ATTENTION}")
    changes = find_changes(plain, adapted, REGISTRY)
    assert {(change.kind, change.after) for change in changes} == {
        ("adapters", "q, k, v, out: rank 2, scale 2"),
    }
    assert {change.where for change in changes} == {"encoder.*.attn", "decoder.*.self", "decoder.*.cross"}


@pytest.mark.parametrize(("first", "lost"), [("[q]", "v"), ("[q, v]", ""), ("[q, k, v]", ""), ("[out]", "")])
def test_a_warning_names_the_maps_that_the_first_group_of_a_weight_leaves_out(first, lost):
    where, rest = "where: {block: attention}", "rank: 2, alpha: 2"
    groups = f"{{a: {{{where}, {rest}, parts: {first}}}, b: {{{where}, {rest}, parts: [v, out]}}}}"
    warnings = spec_of("base", f"model.adapt={groups}").warnings
    rule = f"does not change {lost} of encoder.0.attn.block.qkv, because this weight is in a"
    assert [(one.address, one.rule) for one in warnings] == [("model.adapt.b", rule)] * bool(lost)


def group(where, rest="rank: 2, alpha: 2"):
    return f"model.adapt.a={{where: {where}, {rest}}}"


@pytest.mark.parametrize(
    ("override", "address", "rule", "help"),
    [
        (group("{role: matrx}"), "where.role", "no role is called 'matrx'", "did you mean matrix"),
        (group("{node: encodr}"), "where.node", "no weights at a node 'encodr'", "did you mean encoder"),
        (group("{block: attentio}"), "where.block", "is called 'attentio'", "did you mean attention"),
        (group("{rol: matrix}"), "where.rol", "no such setting", "did you mean role"),
        (group("{role: position}"), "where", "matches no weight", "--weights"),
        (group("{role: gain}"), "where", "matches no linear map, only weights such as encoder.0", "roles matrix"),
        (group("{role: head}"), "where", "only the tied weight src_emb", "tie: null"),
        (group("{role: matrix}", "rank: 2, alpha: 2, parts: [x]"), "parts", "linear maps has a part called 'x'", "inner, k"),
        (group("{role: matrix}", "rank: 2, alpha: 2, parts: [q, vv]"), "parts", "has a part called 'vv'", "did you mean v"),
        (group("{role: matrix}", "rank: 2, alpha: 2, parts: q"), "parts", "must be a list or null, but is 'q'", "parts=[a,b]"),
        (group("{role: matrix}", "rank: 0, alpha: 2"), "rank", "must be at least 1, but is 0", "or more"),
        (group("{role: matrix}", "rank: 70000, alpha: 2"), "rank", "must be at most 65536, but is 70000", "65536 or less"),
        (group("{role: matrix}", "rank: 2"), "alpha", "is missing", "alpha"),
        (group("{role: matrix}", "rank: 2, alpha: 2, dropout: 1"), "dropout", "must be below 1, but is 1", "below 1"),
        (group("{role: matrix}", "rank: 2, alpha: 2, scaling: rs"), "scaling", "one of standard, rslora", "rslora"),
    ],
)  # fmt: skip
def test_wrong_groups_name_place_rule_and_fix(override, address, rule, help):
    with expect_problem(f"model.adapt.a.{address}", rule, help) as error:
        spec_of("base", override)
    origin = error.value.problems[0].origin
    assert rule == "is missing" or "comes from the command line: model.adapt.a=" in origin


@pytest.mark.parametrize(
    "change", [f"model.adapt.a={ATTENTION}", "model.quantize.a={where: {block: attention}, weights: ternary}"]
)
def test_a_block_that_refuses_its_arguments_is_an_error_at_its_node_with_changed_maps_too(change):
    with expect_problem("model.graph.encoder.layer.attn", "qk_norm_kind is joint, but there is no norm", "attention"):
        spec_of("base", "model.graph.encoder.layer.attn.qk_norm_kind=joint", change)


def adapted(node, group):
    """Check a model of one node between a tied embedding and head, with a group of adapters."""
    nodes = {"emb": {"block": "embedding", "in": "src"}, "node": node, "logits": {"block": "unembed", "tie": "emb"}}
    adapt = {"a": {**group, "rank": 2, "alpha": 2}}
    return check_model({"inputs": {"src": "B S"}, "args": ARGS, "add_norm": "none", "graph": nodes, "adapt": adapt})


def test_a_model_without_a_map_that_can_be_selected_is_an_error():
    help = "no linear map of the model can be selected"
    with expect_problem("model.adapt.a.where", "matches no linear map, only weights such as node", help):
        adapted({"block": "lstm"}, {"where": {"block": "lstm"}})


def test_the_maps_of_a_product_have_the_name_of_the_product():
    node = {"block": "gated_delta_rule", "gate_rank": 3}
    spec = adapted(node, {"where": {"node": "node"}, "parts": ["gate"]})
    assert spec.nodes[1].adapters.keys() == {"block.gate.0", "block.gate.1"}


def test_parts_select_separate_projections_of_global_positions_too():
    node = {"block": "restricted_global_attention", "r": 2, "separate": True}
    (own,) = [node for node in adapted(node, {"where": {"node": "node"}, "parts": ["q", "v"]}).nodes if node.adapters]
    chosen = {name: one.parts for name, one in own.adapters.items()}
    assert chosen == {"block.qkv": (0, 2), "block.global_q": (0,), "block.global_kv": (1,)}


def test_a_group_that_an_earlier_one_shadows_is_an_error():
    with expect_problem("model.adapt.b", "all of its linear maps are in a"):
        spec_of("base", group("{role: matrix}"), "model.adapt.b={where: {block: ffn}, rank: 1, alpha: 1}")


def test_figures_and_pages_show_the_adapters(tmp_path, capsys):
    adapt = "model.adapt.a={where: {node: encoder, block: attention}, rank: 2, alpha: 4, parts: [q, v]}"
    for command, name in (("figure", "model.svg"), ("view", "model.html")):
        main([command, "base", *SIZES, adapt, "-o", str(tmp_path / name)])
    assert (tmp_path / "model.svg").read_text().count("rank 2 on q, v") == 1
    assert "adapters: q, v: rank 2, scale 2" in (tmp_path / "model.html").read_text()
    capsys.readouterr()
    main(["show", "base", *SIZES, adapt, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["trained_parameters"] == 2 * (4 * 16 + 32 * 2)
    shown = {node["address"]: node["adapters"] for node in record["nodes"] if node["adapters"]}
    assert shown == dict.fromkeys(["encoder.0.attn", "encoder.1.attn"], "q, v: rank 2, scale 2")


def test_only_a_trained_run_of_adapters_is_ejected(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["eject", "base", *SIZES, f"model.adapt.a={ATTENTION}", "-o", str(tmp_path / "model.py")])
    assert "leave model.adapt out, or eject a trained run" in capsys.readouterr().err


def test_adapters_have_no_rule_of_width_transfer():
    with pytest.raises(ConfigError, match="no rule of width transfer, but the model has parametrisation: mup"):
        spec_of("base", f"model.adapt.a={ATTENTION}", "model.parametrisation=mup", "model.base={d_model: 8}")
