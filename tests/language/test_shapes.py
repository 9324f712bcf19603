"""Passes 3 and 4: shapes, rules and causality."""

import pytest

from tests.language.test_expand import spec_of
from tests.language.test_read import only, problems
from tfm_blocks.language.spec import format_shape


def test_heads_that_do_not_divide_the_width_are_an_error_with_origin_and_fix():
    problem = problems(["heads=7"])[0]
    assert "(D % heads == 0), but D = 128 (the width of src_pos), heads = 7" in problem.rule
    assert problem.origin == "heads comes from the command line: heads=7"
    assert problem.help.startswith("heads can be 1, 2, 4, 8")


@pytest.mark.parametrize("knob", ["heads=0", "heads=-1", "d_ff=0", "d_ff=-3", "d_model=-8"])
def test_sizes_are_at_least_one(knob):
    name, value = knob.split("=")
    assert f"({name} >= 1), but {name} = {value}" in problems([knob])[0].rule


def test_a_vocabulary_has_a_row():
    assert "(vocab > first_id), but vocab = 0" in problems(["vocab=0"])[0].rule


def test_a_shape_clash_in_a_residual_names_both_shapes():
    problem = problems(["model.graph.encoder.layer.out={block: unembed, vocab: 64, add_norm: post}"])[0]
    assert problem.rule.startswith("its output B S 64 cannot be added to its input B S 128")


def test_a_repeated_layer_that_changes_the_width_is_refused():
    problem = only(["model.graph.encoder.layer.out={block: unembed, vocab: 64}"])
    assert problem.rule == "a repeated layer must keep the shape, but this turns B S 128 into B S 64"


def test_vectors_in_place_of_ids_are_an_error_with_both_shapes():
    problem = only(["model.graph.src_pos={block: embedding, in: src_emb}"])
    assert problem.rule == "x of embedding reads token ids, but src_emb is B S 128"


def test_widths_follow_from_what_a_node_reads():
    spec = spec_of(["layers=1", "d_model=64"])
    assert {format_shape(node.shape) for node in spec.nodes if node.address.startswith("decoder")} == {"B T 64"}
    assert format_shape(spec.sink.shape) == "B T 10000"


def test_same_at_another_width_is_refused():
    wide = "model.graph.wide={block: embedding, d_model: 64, in: src, before: tgt_emb}"
    again = "model.graph.again={same: src_pos, in: wide, before: tgt_emb}"
    cross = "model.graph.decoder.layer.cross.kv=again"
    problem = only([wide, again, cross, "model.graph.decoder.layer.more={block: attention, kv: encoder}"])
    assert problem.rule == "the module of src_pos does not fit: D is 64 here, but 128 at src_pos"


def test_a_decoder_that_sees_later_tokens_is_refused_at_the_node_that_does():
    problem = only(["model.graph.decoder.layer.self.mask=null"])
    assert problem.address == "model.graph.decoder.layer.self"
    assert "mask: causal" in problem.help


def test_a_mask_on_cross_attention_is_refused():
    assert "leave one of them out" in only(["model.graph.decoder.layer.cross.mask=causal"]).rule


@pytest.mark.parametrize("override", ["model.graph.logits=null"])
def test_a_graph_that_does_not_end_position_by_position_is_refused(override):
    assert "each position of tgt separately" in only([override]).rule


def test_tying_matrices_of_two_sizes_is_refused():
    assert "its matrix is [300, 128]" in only(["model.graph.logits.vocab=300"]).rule
