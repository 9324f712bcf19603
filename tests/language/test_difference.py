"""The difference of two models: exactly the changed things are named, and both directions agree."""

import pytest
from hypothesis import HealthCheck, given, reject, settings

import tfm_blocks.blocks  # noqa: F401  registers them
from tests.network.random_graphs import models
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.check import check
from tfm_blocks.language.difference import Change, find_changes
from tfm_blocks.language.outline import Outline
from tfm_blocks.language.read import merge
from tfm_blocks.registry.blocks import REGISTRY

MODELS = ["base", "big", "tiny", "prenorm", "sandwich", "deepnorm", "rezero", "gqa", "alibi", "swiglu"]
ATTENTION = ["encoder.*.attn", "decoder.*.self", "decoder.*.cross"]
FFN = ["encoder.*.ffn", "decoder.*.ffn"]
BRANCHES = [*ATTENTION, *FFN]


def args(**values):
    return {"args": values}


def graph(**nodes):
    return {"graph": nodes}


def encoder(**layer):
    return graph(encoder={"layer": layer})


def decoder(**layer):
    return graph(decoder={"layer": layer})


def each(kind, key, places):
    return {(kind, key, place) for place in places}


def deep(places):
    return each("add & norm", "add", places) | each("add & norm", "initial weights", places)


def renamed(mapping):
    return decoder(ffn=None, mlp=mapping["graph"]["decoder"]["layer"]["ffn"])


def renamed_stack(mapping):
    stack = merge(mapping["graph"]["encoder"], {"after": "src_pos"})
    return graph(encoder=None, enc=stack, decoder={"layer": {"cross": {"kv": "enc"}}})


def side_by_side(mapping):
    layer = mapping["graph"]["encoder"]["layer"]
    return encoder(attn=None, ffn=None, both={"join": "sum", "parallel": dict(layer)})


DEEP_ENCODER, DEEP_DECODER = deep(["encoder.*.attn", "encoder.*.ffn"]), deep(["decoder.*.self", "decoder.*.cross", "decoder.*.ffn"])  # fmt: skip
LAST = each("add & norm", "last", ["encoder", "decoder"])
ALL_NORMS = each("add & norm", "", BRANCHES)
ONLY_BRANCHES = {"prenorm": ALL_NORMS, "sandwich": ALL_NORMS, "deepnorm": ALL_NORMS | LAST | each("add & norm", "initial weights", BRANCHES)}  # fmt: skip
OPPOSITE = {("layers", "", "encoder"), ("layers", "", "decoder"), ("wiring", "kv", "decoder.1.cross")}
SHARED = {("layers", "", "encoder"), *each("weights", "owner", ["encoder.1-2.attn", "encoder.1-2.ffn"])}

# Each row: the modified keys, the resulting changes, and further changes in single models.
CHANGES = {
    "heads": (
        args(heads=2), each("argument", "heads", ATTENTION),
        {"alibi": each("argument", "heads", ATTENTION) | each("argument", "position.heads", ATTENTION[:2])},
    ),
    "inner width": (args(d_ff=24), each("argument", "d_ff", FFN), {}),
    "vocabulary": (args(vocab=77), each("argument", "vocab", ["src_emb", "tgt_emb", "logits"]), {}),
    "an argument of a node": (encoder(attn={"bias": "out"}), {("argument", "bias", "encoder.*.attn")}, {}),
    "a mask": (encoder(attn={"mask": "causal"}), {("argument", "mask", "encoder.*.attn")}, {}),
    "a part": (encoder(attn={"position": "rotary"}), {("argument", "position", "encoder.*.attn")}, {}),
    "an argument of a default part": (
        encoder(attn={"scores": {"block": "softmax", "beta": 0.3}}), {("argument", "scores.beta", "encoder.*.attn")}, {},
    ),
    "an argument of one layer": (
        graph(encoder={"at": {1: {"attn": {"heads": 2}}}}), {("argument", "heads", "encoder.1.attn")},
        {"alibi": {("argument", "heads", "encoder.1.attn"), ("argument", "position.heads", "encoder.1.attn")}},
    ),
    "an argument of two layers": (
        graph(decoder={"at": {0: {"cross": {"heads": 2}}, 1: {"cross": {"heads": 2}}}}),
        {("argument", "heads", "decoder.0-1.cross")}, {},
    ),
    "an argument that grows with the layer": (
        graph(encoder={"repeat": 2, "layer": {"attn": {"heads": "heads//2//(i+1)"}}}),
        {("layers", "", "encoder"), ("argument", "heads", "encoder.0.attn"), ("argument", "heads", "encoder.1.attn")},
        {
            "alibi": {("layers", "", "encoder"), *(("argument", key, f"encoder.{i}.attn") for i in (0, 1) for key in ("heads", "position.heads"))},
            "deepnorm": {("layers", "", "encoder"), ("argument", "heads", "encoder.0.attn"), ("argument", "heads", "encoder.1.attn"), *DEEP_ENCODER},
        },
    ),
    "layers of the encoder": (
        graph(encoder={"repeat": 3}), {("layers", "", "encoder")}, {"deepnorm": {("layers", "", "encoder"), *DEEP_ENCODER}},
    ),
    "layers of the decoder": (
        graph(decoder={"repeat": 9}), {("layers", "", "decoder")},
        {"deepnorm": {("layers", "", "decoder"), *DEEP_ENCODER, *DEEP_DECODER}},
    ),
    "a node before another": (
        encoder(smooth={"block": "depthwise_conv", "kernel_size": 3, "before": "attn"}), {("added", "", "encoder.*.smooth")}, {}
    ),
    "a node at the end": (encoder(smooth={"block": "depthwise_conv", "kernel_size": 3}), {("added", "", "encoder.*.smooth")}, {}),
    "a node between stacks": (graph(bridge={"block": "linear", "d_out": "d_model", "after": "src_pos"}), {("added", "", "bridge")}, {}),
    "an inline node before a stack": (
        graph(encoder={"in": {"block": "linear", "d_out": "d_model"}}), {("wiring", "in", "encoder")}, {},
    ),
    "an inline node before branches": (
        encoder(both={"join": "sum", "in": {"block": "linear", "d_out": "d_model"}, "parallel": {"a": {"block": "ffn"}, "b": {"block": "ffn"}}}),
        {("added", "", "encoder.*.both")}, {},
    ),
    "a node of one layer": (
        graph(encoder={"at": {0: {"more": {"block": "ffn"}}}}), {("added", "", "encoder.0.more")}, {}
    ),
    "a node less": (decoder(ffn=None), {("removed", "", "decoder.*.ffn")}, {}),
    "a node less at the top": (graph(tgt_pos=None), {("removed", "", "tgt_pos")}, {}),
    "another block": (encoder(attn={"block": "restricted_attention", "r": 3}), {("replaced", "", "encoder.*.attn")}, {}),
    "another block at the top": (graph(src_pos={"block": "learned_position", "max_length": 99}), {("replaced", "", "src_pos")}, {}),
    "a stack in the place of a block": (
        graph(src_pos={"block": None, "repeat": 2, "layer": {"one": {"block": "ffn"}}}), {("replaced", "", "src_pos")},
        {"deepnorm": {("replaced", "", "src_pos"), *DEEP_ENCODER}},
    ),
    "a new name": (renamed, {("renamed", "", "decoder.*.mlp")}, {}),
    "a new name of a stack": (
        renamed_stack, {("renamed", "", "enc")}, {},
    ),
    "another order": (decoder(cross={"before": "self"}), {("moved", "", "decoder.*.cross")}, {}),
    "branches in the place of a chain": (
        side_by_side,
        {("added", "", "encoder.*.both"), ("moved", "", "encoder.*.both.attn"), ("moved", "", "encoder.*.both.ffn"), *each("add & norm", "", ["encoder.*.both.attn", "encoder.*.both.ffn"])}, {},
    ),
    "the first layer as memory": (graph(decoder={"at": {-1: {"cross": {"kv": "encoder.0"}}}}), {("wiring", "kv", "decoder.5.cross")}, {"tiny": {("wiring", "kv", "decoder.3.cross")}}),
    "the embedding as memory": (graph(decoder={"at": {0: {"cross": {"kv": "src_pos"}}}}), {("wiring", "kv", "decoder.0.cross")}, {}),
    "the layer of the same number as memory": (
        decoder(cross={"kv": "encoder.(i)"}), {("wiring", "kv", "decoder.0-4.cross")}, {"tiny": {("wiring", "kv", "decoder.0-2.cross")}}
    ),
    "the opposite layer as memory": (
        graph(encoder={"repeat": 2}, decoder={"repeat": 2, "layer": {"cross": {"kv": "encoder.(n-1-i)"}}}),
        OPPOSITE, {"deepnorm": OPPOSITE | DEEP_ENCODER | DEEP_DECODER},
    ),
    "a mix of layers as memory": (
        decoder(cross={"kv": {"block": "weighted_sum", "in": "encoder.*"}}), {("wiring", "kv", "decoder.*.cross")}, {}
    ),
    "a skip of the encoder's input": (
        graph(skip={"block": "sum", "in": ["src_pos", "encoder"], "after": "encoder"}, decoder={"layer": {"cross": {"kv": "skip"}}}),
        {("added", "", "skip"), ("wiring", "kv", "decoder.*.cross")}, {},
    ),
    "add & norm of all": ({"add_norm": "branch"}, each("add & norm", "", BRANCHES) | LAST, ONLY_BRANCHES),
    "add & norm of one node": (decoder(cross={"add_norm": "none"}), {("add & norm", "", "decoder.*.cross")}, {"deepnorm": each("add & norm", "", ["decoder.*.cross"]) | each("add & norm", "initial weights", ["decoder.*.cross"])}),
    "half a step": (encoder(ffn={"add_norm": {"post": [{"scale": 0.5}, "add"]}}), {("add & norm", "", "encoder.*.ffn")}, {"deepnorm": each("add & norm", "", ["encoder.*.ffn"]) | each("add & norm", "initial weights", ["encoder.*.ffn"])}),
    "the last norm": (graph(encoder={"add_norm": {"last": ["norm", "dropout"]}}), {("add & norm", "last", "encoder")}, {}),
    "a norm": (
        args(norm="rmsnorm"), each("add & norm", "norm", BRANCHES),
        {**dict.fromkeys(["prenorm", "sandwich"], each("add & norm", "norm", BRANCHES) | LAST), "rezero": set()},
    ),
    "an argument of the norm": (
        args(norm={"block": "layernorm", "eps": 1e-3}), each("add & norm", "norm.eps", BRANCHES),
        {**dict.fromkeys(["prenorm", "sandwich"], each("add & norm", "norm.eps", BRANCHES) | LAST), "rezero": set()},
    ),
    "shared layers": (
        graph(encoder={"repeat": {"times": 3, "share": True}}),
        SHARED, {"deepnorm": SHARED | DEEP_ENCODER},
    ),
    "an output matrix of its own": (graph(logits={"tie": None}), {("weights", "tie", "logits")}, {}),
    "an embedding of its own": (graph(tgt_emb={"same": None, "block": "embedding"}), {("weights", "owner", "tgt_emb")}, {}),
    "a second source": (
        {"inputs": {"doc": "B P"}, "graph": {"doc_emb": {"same": "src_emb", "in": "doc", "before": "tgt_emb"}, "decoder": {"layer": {"second": {"block": "attention", "kv": "doc_emb", "after": "cross"}}}}},
        {("input", "doc", ""), ("added", "", "doc_emb"), ("added", "", "decoder.*.second")}, {},
    ),
}  # fmt: skip
NOTHING = {
    "a default": encoder(ffn={"bias": True}),
    "a default part": encoder(attn={"scores": {"block": "softmax", "beta": None}}, ffn={"activation": "relu"}),
    "arithmetic": args(d_ff="d_model*4//2*2"),
    "a number of layers": graph(encoder={"repeat": "3*2"}),
    "an input by name": encoder(ffn={"in": "attn"}),
    "a layer by number": decoder(cross={"kv": "encoder.-1"}),
    "another order of sources": graph(encoder={"after": "tgt_pos", "in": "src_pos"}, decoder={"in": "tgt_pos"}),
}  # fmt: skip


def mapping_of(model):
    return compose_model(model).model


def spec_of(mapping):
    return check(mapping, REGISTRY)


def mirror(changes):
    """Return the same changes from B to A."""
    kinds = {"removed": "added", "added": "removed"}
    return {
        Change(kinds.get(change.kind, change.kind), change.key, change.after, change.before, change.new, change.old)
        for change in changes
    }


def keys(changes):
    return {(change.kind, change.key, change.where) for change in changes}


@pytest.mark.parametrize("model", [MODELS[0], *(pytest.param(model, marks=pytest.mark.grid) for model in MODELS[1:])])
@pytest.mark.parametrize("name", CHANGES)
def test_exactly_the_changed_things_are_named(model, name):
    change, expected, by_model = CHANGES[name]
    mapping = mapping_of(model)
    a, b = spec_of(mapping), spec_of(merge(mapping, change(mapping) if callable(change) else change))
    assert keys(find_changes(a, b, REGISTRY)) == by_model.get(model, expected)
    assert mirror(find_changes(b, a, REGISTRY)) == set(find_changes(a, b, REGISTRY))


@pytest.mark.parametrize("name", NOTHING)
def test_two_spellings_of_a_model_are_not_a_change(name):
    mapping = mapping_of("base")
    assert find_changes(spec_of(mapping), spec_of(merge(mapping, NOTHING[name])), REGISTRY) == []


def test_wired_alike_is_independent_of_the_number_of_layers_when_counted_from_the_end():
    mapping = merge(mapping_of("base"), graph(decoder={"at": {0: {"cross": {"kv": "encoder.-2"}}}}))
    changes = find_changes(spec_of(mapping), spec_of(merge(mapping, graph(encoder={"repeat": 4}))), REGISTRY)
    assert keys(changes) == {("layers", "", "encoder")}


def test_texts_name_both_sides_as_a_file_would():
    mapping = mapping_of("base")
    change = merge(
        encoder(attn={"block": "restricted_attention", "r": 3}, ffn={"bias": False, "activation": "gelu"}),
        decoder(cross={"kv": {"block": "weighted_sum", "in": "encoder.*"}, "before": "self", "add_norm": "pre"}),
    )
    changes = {(one.kind, one.key, one.where): (one.before, one.after) for one in find_changes(spec_of(mapping), spec_of(merge(mapping, change)), REGISTRY)}  # fmt: skip
    assert changes == {
        ("moved", "", "decoder.*.cross"): ("after self", "first"),
        ("replaced", "", "encoder.*.attn"): ("attention", "restricted_attention(r=3)"),
        ("argument", "bias", "encoder.*.ffn"): ("true", "false"),
        ("argument", "activation", "encoder.*.ffn"): ("relu", "gelu"),
        ("add & norm", "", "decoder.*.cross"): ("… → dropout 0 → add → layernorm", "layernorm → … → dropout 0 → add"),
        ("wiring", "kv", "decoder.*.cross"): ("encoder", "weighted_sum of encoder.*"),
    }  # fmt: skip


def test_the_input_of_a_stack_is_not_that_of_its_first_node() -> None:
    layer = {"skip": {"block": "linear", "d_out": "d_model", "in": {"block": "concat", "in": ["entry", "tgt_pos"]}}}
    stack = {"more": {"repeat": 2, "layer": {**layer, "ffn": {"block": "ffn"}}, "before": "logits"}}
    a, b = (
        spec_of(merge(mapping_of("tiny"), {"graph": merge(stack, change)}))
        for change in ({}, {"more": {"layer": {"skip": {"in": "entry"}}}})
    )
    changes = find_changes(a, b, REGISTRY)
    assert keys(changes) == {("wiring", "in", "more.0.skip"), ("wiring", "in", "more.1.skip")}


@pytest.mark.parametrize("join", ["sum", "gate", None])
@pytest.mark.parametrize("repeat", [None, 2])
def test_an_inline_node_before_a_stack_copies_or_branches_is_no_branch(repeat, join):
    nodes = {"a": {"block": "ffn"}, "b": {"block": "ffn"}}
    form = {"repeat": repeat, "layer": nodes} if repeat or not join else {"parallel": nodes}

    def spec(bias):
        linear = {"block": "linear", "d_out": "d_model", "bias": bias}
        return spec_of(merge(mapping_of("tiny"), encoder(more={"join": join, "in": linear, **form})))

    (added,) = find_changes(spec_of(mapping_of("tiny")), spec(bias=True), REGISTRY)
    assert (added.where, added.after.split(" of ")[1].removeprefix("2 × ")) == ("encoder.*.more", "a, b")
    assert keys(find_changes(spec(bias=True), spec(bias=False), REGISTRY)) == {
        ("argument", "bias", "encoder.*.more.in_x")
    }


def computes(spec):
    """Return everything that determines the computation of the nodes, independent of their order."""
    outline = Outline(spec, REGISTRY)
    nodes = {
        node.address: (outline.nodes[node.address].part if node.block else None, node.reads, node.owner, node.tie, node.pre, node.post, node.shape, node.shrink)
        for node in spec.nodes
    }  # fmt: skip
    return spec.inputs, nodes


@pytest.mark.usefixtures("plugged")
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(a=models(), b=models())
def test_random_models_differ_exactly_if_they_compute_differently_and_directions_mirror(a, b):
    try:
        one, two = spec_of(a), spec_of(b)
    except ConfigError:
        reject()
    assert find_changes(one, spec_of(a), REGISTRY) == []
    changes = find_changes(one, two, REGISTRY)
    assert (changes == []) == (computes(one) == computes(two))
    assert mirror(find_changes(two, one, REGISTRY)) == set(changes)


@pytest.mark.usefixtures("plugged")
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(models())
def test_an_argument_that_changes_in_a_random_model_is_named_alone(model):
    model = merge(model, graph(extra={"block": "ffn", "before": "logits"}))
    try:
        one = spec_of(model)
    except ConfigError:
        reject()
    two = spec_of(merge(model, graph(extra={"activation": "squared_relu"})))
    assert keys(find_changes(one, two, REGISTRY)) == {("argument", "activation", "extra")}
