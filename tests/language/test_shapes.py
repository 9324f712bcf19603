"""Passes 3 and 4: shapes, rules and causality."""

import pytest

from tests.language.test_expand import spec_of
from tests.language.test_read import only, problems
from tfm_blocks.language.spec import format_shape


@pytest.mark.parametrize("knob", ["heads=0", "heads=-1", "d_ff=0", "d_ff=-3", "d_model=-8"])
def test_sizes_are_at_least_one(knob):
    name, value = knob.split("=")
    assert f"({name} >= 1), but {name} = {value}" in problems([knob])[0].rule


def test_a_vocabulary_has_a_row():
    assert "(vocab > first_id), but vocab = 0" in problems(["vocab=0"])[0].rule


def test_widths_follow_from_what_a_node_reads():
    spec = spec_of(["layers=1", "d_model=64"])
    assert {format_shape(node.shape) for node in spec.nodes if node.address.startswith("decoder")} == {"B T 64"}
    assert format_shape(spec.sink.shape) == "B T 10000"


def test_a_decoder_that_sees_later_tokens_is_refused_at_the_node_that_does():
    problem = only(["model.graph.decoder.layer.self.mask=null"])
    assert problem.address == "model.graph.decoder.layer.self"
    assert "mask: causal" in problem.help


def test_the_rules_of_a_block_within_a_block_in_an_argument_hold():
    sparse = "{block: statistical_top_k, function: {block: xielu, beta: -1}}"
    problem = only([f"model.graph.encoder.layer.ffn.activation={sparse}"])
    assert "beta = -1" in problem.rule
