"""References of nodes: layers of a stack, the entry, inline nodes."""

import pytest

from tests.language.test_expand import spec_of
from tfm_blocks.language.tree import Reference, read_reference

CROSS = "model.graph.decoder.layer.cross.kv"


def read_by_cross(reference, model="tiny", layers=3):
    """Return the inputs of the cross-attention of each decoder layer."""
    spec = spec_of([f"layers={layers}", f"{CROSS}={reference}"], model)
    return [node.reads["kv"] for node in spec.nodes if node.address.endswith(".cross")]


@pytest.mark.parametrize(
    ("reference", "read"),
    [
        ("encoder", ["encoder.2.ffn"] * 3),
        ("encoder.-1", ["encoder.2.ffn"] * 3),
        ("encoder.2", ["encoder.2.ffn"] * 3),
        ("encoder.(i)", ["encoder.0.ffn", "encoder.1.ffn", "encoder.2.ffn"]),
        ("encoder.(n-1-i)", ["encoder.2.ffn", "encoder.1.ffn", "encoder.0.ffn"]),
        ("encoder.(-1-i)", ["encoder.2.ffn", "encoder.1.ffn", "encoder.0.ffn"]),
        ("encoder.(2*(i//2))", ["encoder.0.ffn", "encoder.0.ffn", "encoder.2.ffn"]),
    ],
)
def test_a_layer_is_read_by_its_index(reference, read):
    assert read_by_cross(reference) == [(address,) for address in read]


def test_a_layer_of_a_pre_norm_stack_is_seen_after_the_norm_at_the_stacks_end():
    spec = spec_of(["layers=3", f"{CROSS}=encoder.(i)"], "prenorm")
    read = [node.reads["kv"] for node in spec.nodes if node.address.endswith(".cross")]
    assert read == [("encoder.0.last",), ("encoder.1.last",), ("encoder.last",)]
    nodes = {node.address: node for node in spec.nodes}
    assert nodes["encoder.0.last"].owner == nodes["encoder.1.last"].owner == "encoder.last"
    assert nodes["encoder.0.last"].reads == {"x": ("encoder.0.ffn",)}
    assert nodes["encoder.1.attn"].reads == {"x": ("encoder.0.ffn",)}, "within the stack layers read each other bare"


@pytest.mark.parametrize("model", ["tiny", "prenorm"])
def test_the_last_layer_is_the_stack(model):
    assert read_by_cross("encoder.-1", model) == read_by_cross("encoder", model)


@pytest.mark.parametrize(("model", "last"), [("tiny", "encoder.2.ffn"), ("prenorm", "encoder.last")])
def test_all_layers_go_to_a_port_of_several_tensors(model, last):
    spec = spec_of(["layers=3", f"{CROSS}={{block: weighted_sum, in: encoder.*}}"], model)
    nodes = {node.address: node for node in spec.nodes}
    first = "encoder.0.ffn" if model == "tiny" else "encoder.0.last"
    for layer in range(3):
        inline = nodes[f"decoder.{layer}.cross.in_kv"]
        assert inline.read[0] == first and inline.read[-1] == last and inline.axes["M"] == 3
        assert nodes[f"decoder.{layer}.cross"].reads["kv"] == (inline.address,)


def test_a_node_of_a_layer_is_read_from_outside_the_stack():
    read = "{block: weighted_sum, in: [encoder, encoder.0.attn, encoder.*.attn]}"
    nodes = {node.address: node for node in spec_of(["layers=3", f"{CROSS}={read}"]).nodes}
    each = [f"encoder.{layer}.attn" for layer in range(3)]
    assert nodes["decoder.1.cross.in_kv"].read == ("encoder.2.ffn", "encoder.0.attn", *each)


def test_a_layer_reads_earlier_layers_of_its_stack():
    """A node of its own layer that is above the reader can be read by the index of the layer, too."""
    inner = "{block: sum, in: [self, tgt_pos, decoder.*, decoder.0.self, decoder.*.self], before: cross}"
    nodes = {node.address: node for node in spec_of(["layers=3", f"model.graph.decoder.layer.both={inner}"]).nodes}
    for layer in range(3):
        own, exits = f"decoder.{layer}.self", [f"decoder.{earlier}.ffn" for earlier in range(layer)]
        inside = [f"decoder.{earlier}.self" for earlier in range(layer)]
        assert nodes[f"decoder.{layer}.both"].read == (own, "tgt_pos", *exits, "decoder.0.self", *inside)


def test_entry_is_the_input_of_the_layer():
    skip_node = "{block: sum, in: [attn, entry], before: ffn}"
    spec = spec_of(["layers=2", f"model.graph.encoder.layer.skip={skip_node}"])
    nodes = {node.address: node for node in spec.nodes}
    assert nodes["encoder.0.skip"].read == ("encoder.0.attn", "src_pos")
    assert nodes["encoder.1.skip"].read == ("encoder.1.attn", "encoder.0.ffn")


def test_a_name_is_sought_in_its_own_graph_first_and_then_outwards():
    inner = "{block: sum, in: [self, tgt_pos], before: cross}"
    spec = spec_of(["layers=1", f"model.graph.decoder.layer.both={inner}"])
    nodes = {node.address: node for node in spec.nodes}
    assert nodes["decoder.0.both"].read == ("decoder.0.self", "tgt_pos")


@pytest.mark.parametrize(
    "text", ["encoder", "encoder.*", "encoder.0", "encoder.-1", "encoder.(n-1-i)", "a_1.(2*(i//2))"]
)
def test_a_reference_is_written_as_it_is_read(text):
    assert str(read_reference(text)) == text


@pytest.mark.parametrize(
    "value", ["", "encoder.", "a.b", "encoder.1.2", "encoder.00", "encoder.(", "1a", "a b", 3, None]
)
def test_an_invalid_reference_is_refused(value):
    with pytest.raises(ValueError, match="must name an input, an earlier node"):
        read_reference(value)


def test_a_reference_knows_its_layer():
    assert read_reference("encoder.(i)") == Reference("encoder", "i")
