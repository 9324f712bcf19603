"""Stacks, one layer applied many times, copies side by side, parallels, changes of single layers, args of layers."""

import pytest

from tests.language.test_expand import spec_of
from tests.language.test_read import problems
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import build_network, check_model

BOTH = "{join: sum, parallel: {attn: {block: attention}, ffn: {block: ffn}}}"
PARALLEL = [
    "model.graph.encoder.layer.attn=null",
    "model.graph.encoder.layer.ffn=null",
    f"model.graph.encoder.layer.both={BOTH}",
]


def network_of(overrides, model="tiny"):
    composed = compose_model(model, ["d_model=16", "d_ff=24", "heads=2", "vocab=30", *overrides])
    return build_network(check_model(composed.model, composed.sources), seed=1)


def weights(network):
    return {name for name, _ in network.named_parameters()}


def test_shared_layers_have_one_copy_of_the_weights_at_the_first():
    shared = "model.graph.encoder.repeat={times: ${layers}, share: true}"
    six, one = (weights(network_of([f"layers={layers}", shared, "model.graph.decoder.repeat=1"])) for layers in (6, 1))
    assert six == one
    assert {name.split(".")[1] for name in six if name.startswith("encoder.")} == {"0"}


@pytest.mark.parametrize("add_norm", ["pre", "post"])
def test_shared_layers_run_as_often_as_they_say(add_norm):
    spec = spec_of(["model.graph.encoder.repeat={times: 3, share: true}", f"model.add_norm={add_norm}"])
    owners = {node.address: node.owner for node in spec.nodes if node.address.endswith(".attn")}
    assert owners == {f"encoder.{layer}.attn": "encoder.0.attn" for layer in range(3)}


def changed_layers(key, layers=7, overrides=()):
    model = compose_model("tiny", [f"layers={layers}", *overrides]).model
    model["graph"]["encoder"]["at"] = {key: {"ffn": None}}
    addresses = {node.address for node in check_model(model).nodes}
    return [layer for layer in range(layers) if f"encoder.{layer}.ffn" not in addresses]


@pytest.mark.parametrize("key", ["::2", "2::3", ":3", "-2:", ":", "5:2", "1:-1:2", "::-3", "9:"])
def test_a_slice_changes_the_layers_that_it_selects_in_python(key):
    assert changed_layers(key) == sorted(range(7)[slice(*(int(part) if part else None for part in key.split(":")))])


def test_bounds_of_a_slice_are_arithmetic_of_args_and_the_number_of_layers():
    assert changed_layers("heads:", overrides=["heads=4"]) == [4, 5, 6]
    assert changed_layers("n - 2:") == [5, 6] and changed_layers("n - 2:", layers=4) == [2, 3]


@pytest.mark.parametrize(
    ("text", "layers"),
    [("1 3 5::1", [1, 3, 5, 6]), (2, [2]), ("-1", [6]), ("", []), ("heads: 0", [0, 2, 3, 4, 5, 6])],
)
def test_an_arg_lists_the_layers_that_change(text, layers):
    model = compose_model("tiny", ["layers=7", "heads=2"]).model
    model["graph"]["encoder"] |= {"args": {"wide": text}, "at": {"wide": {"ffn": None}}}
    addresses = {node.address for node in check_model(model).nodes}
    assert [layer for layer in range(7) if f"encoder.{layer}.ffn" not in addresses] == layers


def test_copies_side_by_side_read_the_same_and_have_weights_of_their_own():
    ffn = "model.graph.encoder.layer.ffn={block: null, repeat: 3, join: gate, layer: {inner: {block: ffn}}}"
    nodes = {node.address: node for node in spec_of(["layers=1", ffn]).nodes}
    copies = [f"encoder.0.ffn.{copy}.inner" for copy in range(3)]
    assert all(nodes[copy].reads == {"x": ("encoder.0.attn",)} for copy in copies)
    assert nodes["encoder.0.ffn"].reads == {"x": ("encoder.0.attn",), "ys": tuple(copies)}
    names = weights(network_of(["layers=1", ffn]))
    assert {f"{copy}.block.inner.weight" for copy in copies} < names and "encoder.0.ffn.block.map.weight" in names


def test_copies_can_differ_by_their_index():
    layer = "{inner: {block: ffn, d_ff: '8*(i+1)'}}"
    ffn = f"model.graph.encoder.layer.ffn={{block: null, repeat: 3, join: mean, layer: {layer}}}"
    widths = [node.arguments["d_ff"] for node in spec_of(["layers=1", ffn]).nodes if node.address.endswith("inner")]
    assert widths == [8, 16, 24]


def test_layers_of_nested_stacks_are_counted_over_the_outermost_one():
    stack = "model.graph.encoder.repeat=2"
    inner = 'model.graph.encoder.layer.inner={repeat: 3, layer: {ffn: {block: ffn, d_ff: "8*(I+1)"}}}'
    after = 'model.graph.encoder.layer.outer={block: ffn, d_ff: "64+I"}'
    spec = spec_of([stack, *(f"model.graph.encoder.layer.{name}=null" for name in ("attn", "ffn")), inner, after])
    widths = [(node.address, node.arguments["d_ff"]) for node in spec.nodes if "d_ff" in node.arguments]
    assert widths[:8] == [
        *((f"encoder.0.inner.{i}.ffn", 8 * (i + 1)) for i in range(3)),
        ("encoder.0.outer", 64),
        *((f"encoder.1.inner.{i}.ffn", 8 * (i + 4)) for i in range(3)),
        ("encoder.1.outer", 67),
    ]


def test_an_inner_stack_of_one_layer_counts_as_a_layer_and_a_group_of_nodes_does_not():
    layer = {"ffn": {"block": "ffn", "d_ff": "8*(I+1)"}}
    graph = {"a": {"repeat": 2, "layer": layer}, "b": {"repeat": 1, "layer": layer}, "group": {"layer": layer}}
    model = compose_model("tiny", []).model
    model["graph"]["encoder"] |= {"repeat": 2, "layer": graph}
    nodes = check_model(model).nodes
    widths = [node.arguments["d_ff"] for node in nodes if node.address.startswith("encoder.")]
    assert widths == [8, 16, 24, 32, 32, 40, 48, 56]


def test_a_pre_norm_parallel_normalises_once_and_adds_once():
    nodes = {node.address: node for node in spec_of(["layers=1", *PARALLEL], "prenorm").nodes}
    assert nodes["encoder.0.both.pre"].reads == {"x": ("src_pos",)}
    for branch in ("attn", "ffn"):
        node = nodes[f"encoder.0.both.{branch}"]
        assert node.reads == {"x": ("encoder.0.both.pre",)} and not node.pre and not node.post
    join = nodes["encoder.0.both"]
    assert join.residual == "src_pos" and [step.kind for step in join.post] == ["dropout", "add"]


def test_the_weights_of_a_parallel_live_within_it():
    names = {name for name in weights(network_of(["layers=1", *PARALLEL], "prenorm")) if "both" in name}
    assert {name.rsplit(".", 1)[0] for name in names} == {
        "encoder.0.both.pre.norm", "encoder.0.both.attn.block.qkv", "encoder.0.both.attn.block.out",
        "encoder.0.both.ffn.block.inner", "encoder.0.both.ffn.block.out",
    }  # fmt: skip
    post = {name for name in weights(network_of(["layers=1", *PARALLEL])) if "both" in name and "norm" in name}
    assert post == {"encoder.0.both.post.norm.weight", "encoder.0.both.post.norm.bias"}


def test_the_weights_of_an_inline_node_live_under_its_port():
    network = network_of(["layers=1", "model.graph.decoder.layer.cross.kv={block: ffn, in: encoder, add_norm: none}"])
    assert "decoder.0.cross.in_kv.block.inner.weight" in weights(network)


def test_a_branch_sets_an_add_norm_of_its_own_within_a_parallel():
    parallel = "model.graph.encoder.layer.both.parallel.ffn.add_norm=post"
    nodes = {node.address: node for node in spec_of(["layers=1", *PARALLEL, parallel]).nodes}
    assert [step.kind for step in nodes["encoder.0.both.ffn"].post] == ["dropout", "add", "norm"]


def test_at_changes_layers_from_either_end():
    changes = "{0: {ffn: {d_ff: '2*d_model'}}, -1: {ffn: null}}"
    spec = spec_of(["layers=3", "d_model=128", "d_ff=64", f"model.graph.encoder.at={changes}"])
    widths = {
        node.address: node.arguments["d_ff"]
        for node in spec.nodes
        if node.address.startswith("encoder") and node.block == "ffn"
    }
    assert widths == {"encoder.0.ffn": 256, "encoder.1.ffn": 64}


def test_at_changes_nodes_of_the_layer():
    spec = spec_of(["layers=2", "model.graph.encoder.at={1: {attn: {heads: 8}}}"])
    heads = [node.arguments["heads"] for node in spec.nodes if node.address.endswith(".attn")]
    assert heads == [4, 8]


def test_args_of_a_stack_serve_its_layers_and_the_norm_at_its_end():
    spec = spec_of(["layers=2", "model.graph.encoder.args={norm: rmsnorm, heads: 2}"], "prenorm")
    norms = {node.address: {step.block for step in (*node.pre, *node.post) if step.block} for node in spec.nodes}
    assert norms["encoder.0.attn"] == norms["encoder.last"] == {"rmsnorm"}
    assert norms["decoder.0.self"] == norms["decoder.last"] == {"layernorm"}


def test_args_of_a_parallel_serve_its_branches_and_its_own_steps():
    args = "model.graph.encoder.layer.both.args={norm: rmsnorm, dropout: 0.25, heads: 2}"
    nodes = {node.address: node for node in spec_of(["layers=1", *PARALLEL, args]).nodes}
    assert nodes["encoder.0.both.attn"].arguments["heads"] == 2
    assert [(step.value, step.block) for step in nodes["encoder.0.both"].post] == [
        (0.25, ""),
        (1.0, ""),
        (0.0, "rmsnorm"),
    ]


def test_a_stack_in_a_stack_has_no_norm_at_its_end():
    inner = "{repeat: 2, layer: {f: {block: ffn}}}"
    addresses = [
        node.address for node in spec_of(["layers=1", f"model.graph.encoder.layer.more={inner}"], "prenorm").nodes
    ]
    assert "encoder.last" in addresses and "encoder.0.more.last" not in addresses


def test_a_node_without_an_input_is_reported_once():
    (problem,) = problems(
        [
            "model.graph.src_emb=null",
            "model.graph.src_pos=null",
            "model.graph.tgt_emb={same: null, block: embedding}",
            "model.graph.logits.tie=null",
        ]
    )
    assert problem.address == "model.graph.encoder" and problem.help == "in: src"
