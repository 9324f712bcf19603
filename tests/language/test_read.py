"""Pass 1: keys, names and forms."""

import pytest

from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.read import order_nodes
from tfm_blocks.network.build import check_model


def problems(overrides, model="tiny"):
    with pytest.raises(ConfigError) as caught:
        composed = compose_model(model, overrides)
        check_model(composed.model, composed.sources)
    return caught.value.problems


def only(overrides, model="tiny"):
    (problem,) = problems(overrides, model)
    return problem


def test_all_problems_of_the_pass_are_reported_together():
    reported = problems(
        ["model.graph.encoder.layer.attn.block=x", "model.graph.decoder.layer.ffn.block=y", "model.grph=1"]
    )
    assert len(reported) == 3


def test_null_removes_an_inherited_node_and_an_absent_key():
    composed = compose_model("tiny", ["layers=1", "model.graph.encoder.layer.ffn=null"])
    addresses = [node.address for node in check_model(composed.model, composed.sources).nodes]
    assert "encoder.0.attn" in addresses and "encoder.0.ffn" not in addresses


def encoder_layer(added):
    """Return the nodes of a layer of tiny's encoder in execution order, with overrides."""
    composed = compose_model("tiny", ["layers=1", *(f"model.graph.encoder.layer.{text}" for text in added)])
    spec = check_model(composed.model, composed.sources)
    return [node.address.split(".")[-1] for node in spec.nodes if node.address.startswith("encoder.")]


@pytest.mark.parametrize(
    ("where", "expected"), [("before: attn", ["extra", "attn", "ffn"]), ("after: attn", ["attn", "extra", "ffn"])]
)
def test_before_and_after_place_a_node_that_a_child_adds(where, expected):
    assert encoder_layer([f"extra={{block: ffn, {where}}}"]) == expected


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (["a={block: ffn, before: b}", "b={block: ffn, before: ffn}"], ["attn", "a", "b", "ffn"]),
        (["a={block: ffn, after: b}", "b={block: ffn, before: attn}"], ["b", "a", "attn", "ffn"]),
        (["a={block: ffn, after: attn}", "b={block: ffn, after: attn}"], ["attn", "a", "b", "ffn"]),
        (["a={block: ffn, before: ffn}", "b={block: ffn, before: ffn}"], ["attn", "a", "b", "ffn"]),
        (["a={block: ffn, after: ffn}", "attn.after=a"], ["ffn", "a", "attn"]),
    ],
)
def test_a_node_stays_beside_its_neighbour_wherever_that_is_placed(added, expected):
    assert encoder_layer(added) == expected


def test_nodes_that_are_placed_beside_each_other_alone_are_refused():
    layer = "model.graph.encoder.layer"
    problem = only([f"{layer}.a={{block: ffn, before: b}}", f"{layer}.b={{block: ffn, after: a}}"])
    assert problem.address == "model.graph.encoder.layer.a.before"
    assert problem.rule == "a and b are placed only relative to each other"


def test_thousands_of_nodes_can_be_placed_each_beside_the_next():
    nodes = {f"n{number}": {"after": f"n{number + 1}"} for number in range(5000)} | {"n5000": {}}
    assert order_nodes(nodes, (), lambda *problem: pytest.fail(str(problem))) == list(nodes)[::-1]


def test_before_an_unknown_node_lists_the_nodes_beside_it():
    assert "did you mean attn?" in only(["model.graph.encoder.layer.x={block: ffn, before: atn}"]).help


MIXERS = ["attention", "retention", "gated_delta_rule", "mamba2", "lstm", "rnn", "convolution"]


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_knob_chooses_the_block_which_takes_the_args_of_its_node_that_it_has(mixer):
    composed = compose_model(
        "probe_decoder",
        [
            f"mixer={mixer}",
            "layers=1",
            *(["model.graph.decoder.layer.self.args.kernel_size=4"] * (mixer == "convolution")),
        ],
    )
    spec = check_model(composed.model, composed.sources)
    (node,) = (node for node in spec.nodes if node.address == "decoder.0.self")
    assert node.block == mixer
    expected = {"mask": "causal", "heads": 4, "beta_max": 1.0}
    arguments = {name: value for name, value in node.arguments.items() if name in expected}
    assert arguments == {name: value for name, value in expected.items() if name in node.arguments}


@pytest.mark.parametrize("args", [{}, {"heads": 4}], ids=str)
def test_a_part_takes_a_required_argument_from_its_block(args):
    graph = {"node": {"block": "attention", "in": "x", "heads": 2, "position": "alibi", "gate": "headwise_gate"}}
    (node,) = check_model({"inputs": {"x": "B N 8"}, "args": args, "graph": graph}).nodes
    assert all(node.arguments[part].arguments["heads"] == 2 for part in ("position", "gate"))


def test_an_arg_of_a_node_that_no_block_takes_is_refused_with_its_place():
    problem = only(["model.graph.decoder.layer.self.args.haeds=4"], "probe_decoder")
    assert problem.address == "model.graph.decoder.layer.self.args.haeds"
    assert problem.help.startswith("did you mean heads?")


def test_a_key_of_the_node_itself_takes_precedence_over_its_args():
    composed = compose_model("probe_decoder", ["layers=1", "model.graph.decoder.layer.self.heads=8"])
    (node,) = (node for node in check_model(composed.model).nodes if node.address == "decoder.0.self")
    assert node.arguments["heads"] == 8


def test_a_typed_knob_that_the_chosen_block_does_not_take_is_warned_of():
    composed = compose_model("probe_decoder", ["mixer=lstm", "heads=8"])
    (warning,) = check_model(composed.model, composed.sources).warnings
    assert "lstm does not take heads" in warning.rule and "heads=8" in warning.origin
    composed = compose_model("probe_decoder", ["mixer=attention", "heads=8"])
    assert not check_model(composed.model, composed.sources).warnings
