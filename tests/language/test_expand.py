"""Pass 2: expansion, wiring and arguments."""

import pytest

from tests.language.test_read import only, problems
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import check_model


def spec_of(overrides, model="tiny"):
    composed = compose_model(model, overrides)
    return check_model(composed.model, composed.sources)


def test_arithmetic_counts_with_args_and_the_layers_index():
    spec = spec_of(["layers=3", "d_ff=2*d_model", "model.graph.encoder.layer.ffn.d_ff=d_model*(i+1)+n-n"])
    widths = [
        node.arguments["d_ff"] for node in spec.nodes if node.address.startswith("encoder.") and node.block == "ffn"
    ]
    assert widths == [128, 256, 384]
    assert next(node for node in spec.nodes if node.address == "decoder.0.ffn").arguments["d_ff"] == 256


def test_a_text_of_numbers_has_one_for_each_layer():
    spec = spec_of(["layers=3", "d_ff=64 200 32", "model.args.activation_dropout=0.1*d_ff/2e2"])
    for stack in ("encoder", "decoder"):
        ffns = [node for node in spec.nodes if node.address.startswith(stack) and node.block == "ffn"]
        assert [node.arguments["d_ff"] for node in ffns] == [64, 200, 32]
        assert [node.arguments["activation_dropout"] for node in ffns] == [0.032, 0.1, 0.016]


def test_i_counts_in_shared_layers_only_for_blocks_without_weights():
    shared = "model.graph.encoder.repeat={times: 3, share: true}"
    time = "model.graph.encoder.layer.time={block: timestep, step: i+1, before: attn}"
    nodes = [node for node in spec_of([shared, time]).nodes if node.block == "timestep"]
    assert [(node.arguments["step"], node.shares) for node in nodes] == [(1, False), (2, False), (3, False)]
    problem = only([shared, "model.graph.encoder.layer.ffn.d_ff=d_model*(i+1)"])
    assert "needs the unknown arg 'i'" in problem.rule


def test_an_inline_block_in_a_block_without_weights_shares_its_weights_in_shared_layers():
    shared = "model.graph.encoder.repeat={times: 3, share: true}"
    time = (
        "model.graph.encoder.layer.time={{block: timestep, step: i+1, before: attn, in: {{block: linear, d_out: {}}}}}"
    )
    nodes = {node.address: node for node in spec_of([shared, time.format("d_model")]).nodes}
    assert {nodes[f"encoder.{i}.time.in_x"].owner for i in range(3)} == {"encoder.0.time.in_x"}
    assert "needs the unknown arg 'i'" in only([shared, time.format("d_model+i-i")]).rule


def test_a_layers_own_args_hide_the_outer_ones():
    spec = spec_of(["layers=1", "model.graph.encoder.args.heads=2"])
    heads = {node.address: node.arguments["heads"] for node in spec.nodes if node.block == "attention"}
    assert heads == {"encoder.0.attn": 2, "decoder.0.self": 4, "decoder.0.cross": 4}


@pytest.mark.parametrize(
    "override", ["model.args.r=3", "model.args={r: 3}", "model={args: {r: 3}}", "model.graph.encoder.args={r: 3}"]
)
def test_an_arg_from_the_command_line_that_nothing_takes_is_an_error(override):
    problem = only([override])
    assert "no block takes 'r' from here" in problem.rule
    assert problem.origin == f"r comes from the command line: {override}"


@pytest.mark.parametrize("override", ["model.args.d_ff=64", "model.graph.encoder.args={d_ff: 64}"])
def test_an_arg_that_every_node_overrides_is_told_from_one_that_no_block_takes(override):
    own = [f"model.graph.{stack}.layer.ffn.d_ff=32" for stack in ("encoder", "decoder")]
    problem = only([*own, override])
    assert problem.rule.startswith(
        "every block that takes 'd_ff' has a value closer to it, such as model.graph.encoder"
    )
    assert problem.help == "leave it out, or remove the closer value: d_ff: null"


def test_an_arg_in_a_mapping_of_the_command_line_is_named_as_the_origin_of_its_error():
    assert problems(["model.args={heads: 5}"])[0].origin == "heads comes from the command line: model.args={heads: 5}"


def test_an_inherited_arg_that_nothing_takes_is_not():
    spec_of(["layers=1", "model.graph.encoder.layer.ffn=null", "model.graph.decoder.layer.ffn=null"])


def test_same_calls_the_module_of_an_earlier_block_and_owns_nothing():
    node = next(node for node in spec_of([]).nodes if node.address == "tgt_emb")
    assert (node.owner, node.reads) == ("src_emb", {"x": ("tgt",)})


def test_an_expansion_of_more_than_10000_nodes_is_stopped():
    nested = "{repeat: 1000, layer: {inner: {repeat: 1000, layer: {f: {block: ffn}}}}}"
    assert (
        "more than 10000 nodes" in problems([f"model.graph.huge={nested}", "model.graph.huge.before=encoder"])[0].rule
    )


def test_more_than_30000_references_are_stopped():
    layers = ", ".join(["encoder.*"] * 200)
    reads = f"model.graph.decoder.layer.mix={{block: sum, in: [entry, {layers}], before: self}}"
    assert "more than 30000 references" in problems(["layers=100", reads])[0].rule


def test_an_arg_is_evaluated_once_for_each_value_that_needs_it():
    args = [f"model.args.a{i}=a{i + 1}-a{i + 1}" for i in range(31)]  # 2^31 paths lead to a31
    node = next(
        node for node in spec_of([*args, "model.args.a31=1", "model.args.d_ff=a0+4"]).nodes if node.block == "ffn"
    )
    assert node.arguments["d_ff"] == 4


def test_args_that_refer_to_each_other_without_end_are_refused():
    args = [f"model.args.a{i}=a{i + 1}" for i in range(400)]
    assert "more than 32 args in a row: a0 → a1 → a2 → …" in problems([*args, "model.args.d_ff=a0"])[0].rule


@pytest.mark.parametrize(
    ("override", "address"),
    [
        ("layer.attn.add_norm={last: [norm]}", "layer.attn.add_norm.last"),
        ("layer.inner={repeat: 2, add_norm: {last: []}, layer: {f: {block: ffn}}}", "layer.inner.add_norm.last"),
        ("layer.p={join: sum, add_norm: {last: [{scale: x}]}, parallel: {f: {block: ffn}}}", "layer.p.add_norm.last"),
    ],
)
def test_last_is_refused_where_no_outermost_stack_ends(override, address):
    problem = only([f"model.graph.encoder.{override}"])
    assert problem.address == f"model.graph.encoder.{address}"
    assert "last acts at the end of an outermost stack" in problem.rule


def test_a_node_may_be_read_only_as_the_residual_of_a_parallel():
    branch = "{block: linear, d_out: d_model, in: src_emb}"
    both = f"model.graph.both={{join: sum, in: skip, add_norm: %s, parallel: {{a: {branch}}}, before: src_pos}}"
    skip = "model.graph.skip={block: embedding, in: src, before: src_pos}"
    node = next(node for node in spec_of([skip, both % "{post: [add]}"]).nodes if node.address == "both")
    assert (node.residual, node.reads) == ("skip", {"xs": ("both.a",)})
    assert only([skip, both % "none"]).rule == "nothing reads the output of skip"


def test_pre_norm_ends_the_outermost_stacks_with_a_norm():
    addresses = [node.address for node in spec_of(["layers=2"], "prenorm").nodes]
    assert "encoder.last" in addresses and "decoder.last" in addresses
    cross = next(node for node in spec_of(["layers=2"], "prenorm").nodes if node.address == "decoder.0.cross")
    assert cross.reads["kv"] == ("encoder.last",)
