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


@pytest.mark.parametrize(("offset", "offsets"), [("-3 -4", [-3, -4]), ("0 -4.5e0", [0, -4.5]), ("-3 - 4", [-7, -7])])
def test_each_number_of_a_layer_may_have_a_sign_that_touches_it(offset, offsets):
    scores = f"model.graph.encoder.layer.attn.scores={{block: sigmoid_scores, offset: '{offset}'}}"
    nodes = [node for node in spec_of(["layers=2", scores]).nodes if node.address.startswith("encoder.")]
    parts = [node.arguments["scores"] for node in nodes if node.block == "attention"]
    assert [part.arguments["offset"] for part in parts] == offsets


def test_the_fix_of_a_text_of_numbers_names_the_numbers():
    assert only(["layers=3", "d_ff=64 32"]).help == "write one number, or one for each layer"
    assert only(["vocab=64 32"]).help == "write one number"


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


def test_an_add_with_a_factor_per_channel_needs_no_number():
    steps = spec_of(["layers=1", "model.add_norm={post: [{add: null, per: channel}]}"]).nodes[2].post
    assert [(step.kind, step.value, step.per_channel) for step in steps] == [("add", 1.0, True)]


def test_a_header_may_end_in_spaces_and_a_node_that_is_added_again_has_its_old_position(tmp_path):
    (tmp_path / "child.yaml").write_text("# @package _global_ \ndefaults: [tiny]\nmodel: {graph: {src_pos: null}}\n")
    again = "model: {graph: {src_pos: {block: learned_position, max_length: 99}}}"
    (tmp_path / "again.yaml").write_text(f"# @package _global_\ndefaults: [child]\n{again}\n")
    addresses = [node.address for node in spec_of([], str(tmp_path / "again.yaml")).nodes]
    assert addresses[:3] == ["src_emb", "src_pos", "encoder.0.attn"]


def test_a_layers_own_args_hide_the_outer_ones():
    spec = spec_of(["layers=1", "model.graph.encoder.args.heads=2"])
    heads = {node.address: node.arguments["heads"] for node in spec.nodes if node.block == "attention"}
    assert heads == {"encoder.0.attn": 2, "decoder.0.self": 4, "decoder.0.cross": 4}


def test_the_args_of_a_node_do_not_reach_the_blocks_in_its_ports():
    port = "{block: ffn, d_ff: 24, in: {block: linear, d_out: 16, in: entry}}"
    args = f"model.graph.encoder.layer.attn={{block: attention, args: {{bias: false, dropout: 0.5}}, kv: {port}}}"
    nodes = {node.address: node for node in spec_of(["layers=1", "dropout=0.1", args]).nodes}
    inline = nodes["encoder.0.attn.in_kv"], nodes["encoder.0.attn.in_kv.in_x"]
    assert [node.arguments["bias"] for node in (nodes["encoder.0.attn"], *inline)] == [False, True, True]
    assert [nodes["encoder.0.attn"].post[0].value, inline[0].post[0].value] == [0.5, 0.1]


def test_args_reach_a_part_that_is_the_default():
    sizes = ["layers=1", "model.args.base=500", "model.graph.encoder.layer.attn.position=rotary"]
    parts = [node.arguments.get("position") for node in spec_of(sizes, "mla").nodes]
    bases = {part.arguments["base"] for part in parts if part}
    assert bases == {500} and len([part for part in parts if part]) == 2


@pytest.mark.parametrize("own", ["args: {eps: 1e-3}", "eps: 1e-3"])
def test_a_norm_node_prefers_its_own_args_to_the_arg_norm(own):
    norm = f"model.graph.encoder.layer.n1={{block: rmsnorm, {own}}}"
    spec = spec_of(["layers=1", "model.args.norm={block: rmsnorm, eps: 1e-6}", norm])
    assert [node.arguments["eps"] for node in spec.nodes if node.address == "encoder.0.n1"] == [1e-3]


@pytest.mark.parametrize("layers", [2, 3])
def test_args_of_a_node_that_at_changes_in_every_layer_are_used(layers):
    both = "{join: sum, args: {d_ff: 96}, parallel: {attn: {block: attention, args: {heads: 8}}, ffn: {block: ffn}}}"
    change = "{both: {parallel: {attn: {bias: false}}}}"
    at = f"model.graph.encoder.at={{0: {change}, 1: {change}}}"
    spec = spec_of([f"layers={layers}", f"model.graph.encoder.layer={{attn: null, ffn: null, both: {both}}}", at])
    ffns = [node.arguments["d_ff"] for node in spec.nodes if node.address.endswith("both.ffn")]
    assert ffns == [96] * layers and not spec.warnings


@pytest.mark.parametrize(
    "override", ["model.args.r=3", "model.args={r: 3}", "model={args: {r: 3}}", "model.graph.encoder.args={r: 3}"]
)
def test_an_arg_from_the_command_line_that_nothing_takes_is_an_error(override):
    problem = only([override])
    assert "no block takes 'r' from here" in problem.rule
    assert problem.origin == f"r comes from the command line: {override}"


def test_an_arg_of_the_file_that_no_block_takes_any_more_can_be_removed():
    change = "model.graph.decoder.layer.self.block=lstm"
    problem = only([change], "decoder_only")
    assert problem.rule == "no block takes 'heads' from here"
    assert problem.help == "leave it out, or write model.args.heads=null"
    spec_of([change, "model.args.heads=null"], "decoder_only")


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


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("model.graph.encoder.args.heads=3", "layer.attn"),
        ("model.graph.encoder.layer.attn.heads=3", "layer.attn"),
        ("model.graph.encoder.at.0.attn.heads=3", "at.0.attn"),
        ("model.graph.encoder.at={0: {attn: {heads: 3}}}", "at.0.attn"),
    ],
)
def test_a_broken_rule_names_what_sets_the_nearest_value(override, place):
    problem = problems([override])[0]
    assert (problem.address, problem.origin.partition("heads comes from ")[2]) == (
        f"model.graph.encoder.{place}",
        f"the command line: {override}",
    )


def test_a_change_of_one_layer_is_blamed_and_not_the_layer_that_it_changes():
    override = "model.graph.encoder.at.0.attn.block=atention"
    problem = only([override])
    assert problem.address == "model.graph.encoder.at.0.attn.block" and problem.origin.endswith(override)


def test_an_inherited_arg_that_nothing_takes_is_not():
    spec_of(["layers=1", "model.graph.encoder.layer.ffn=null", "model.graph.decoder.layer.ffn=null"])


def test_same_calls_the_module_of_an_earlier_block_and_owns_nothing():
    node = next(node for node in spec_of([]).nodes if node.address == "tgt_emb")
    assert (node.owner, node.reads) == ("src_emb", {"x": ("tgt",)})


@pytest.mark.grid
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
