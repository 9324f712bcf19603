"""The drawing tree of a figure: boxes, arrows, and layers that are drawn once."""

import pytest

from tests.figures.test_layout import ARGS, EMB, LAYER, LOGITS, each_model, encoder, shipped_spec, spec_of
from tfm_blocks.errors import ConfigError
from tfm_blocks.figures.draw import Content, Drawer
from tfm_blocks.figures.drawing import boxes
from tfm_blocks.figures.labels import cost_notes, layer_note
from tfm_blocks.registry.blocks import REGISTRY

PAPER = {  # figure 1 of Vaswani et al. 2017, from bottom to top
    "encoder": ["Inputs", "Input Embedding", "Positional Encoding", "Multi-Head Attention", "Add & Norm", "Feed Forward", "Add & Norm"],
    "decoder": [
        "Outputs (shifted right)", "Output Embedding", "Positional Encoding", "Masked Multi-Head Attention", "Add & Norm",
        "Multi-Head Attention", "Add & Norm", "Feed Forward", "Add & Norm", "Linear", "Softmax", "Output Probabilities",
    ],
}  # fmt: skip


def drawing_of(spec, **content):
    return Drawer(spec, REGISTRY, Content(**content)).draw()


def titles(items):
    return [" ".join(box.title) or "+" for box in items]


def boxes_of_chain(chain):
    for item in chain.items:
        yield from [item] if hasattr(item, "title") else boxes(item)


def read_by(drawing, box):
    return {(arrow.source.addresses[0], arrow.end) for arrow in drawing.arrows if arrow.target is box}


def box_at(drawing, address):
    return next(box for box in boxes(drawing) if address in box.addresses)


def notes(drawing):
    return " ".join(note for box in boxes(drawing) for note in box.notes)


def plates(frame):
    for item in frame.items():
        if not hasattr(item, "title"):
            yield from [item] if item.plate else []
            yield from plates(item)


def test_base_has_the_boxes_of_figure_1_in_the_same_two_columns():
    drawing = drawing_of(shipped_spec("base"))
    assert [titles(boxes_of_chain(chain)) for chain in drawing.chains] == list(PAPER.values())


def test_base_has_the_arrows_of_figure_1():
    drawing = drawing_of(shipped_spec("base"))
    attention, adding = [box for box in boxes(drawing) if "decoder.0.cross" in box.addresses]
    assert read_by(drawing, attention) == {("decoder.0.self", "main"), ("encoder.0.ffn", "port")}
    assert read_by(drawing, adding) == {("decoder.0.cross", "main"), ("decoder.0.self", "side")}


def test_pre_norm_has_a_norm_below_each_branch_and_a_sum_above_it():
    drawing = drawing_of(shipped_spec("prenorm"))
    layer = next(plates(drawing))
    assert titles(boxes(layer)) == ["Norm", "Multi-Head Attention", "+", "Norm", "Feed Forward", "+"]


@each_model
def test_every_node_has_a_box_unless_it_only_passes_its_input_on(name):
    spec = shipped_spec(name)
    for fold in ("none", "layers", "stacks"):
        drawn = {address for box in boxes(drawing_of(spec, fold=fold)) for address in box.addresses}
        assert {node.address for node in spec.nodes if node.block != "none"} <= drawn


@each_model
def test_without_folding_the_arrows_are_the_reads_of_the_spec(name):
    spec = shipped_spec(name, "layers=4")
    drawing = drawing_of(spec, fold="none")
    drawn = {address for box in boxes(drawing) for address in box.addresses}
    passed = {}
    for node in spec.nodes:
        if node.address not in drawn:
            passed[node.address] = passed.get(node.entry, node.entry)
    expected = set()
    for node in spec.nodes:
        if node.address not in passed:
            ends = [
                (address, "port" if place else "main") for place, of in enumerate(node.reads.values()) for address in of
            ]
            ends += [(node.residual, "side")] * any(step.kind == "add" for step in node.post)
            expected |= {(passed.get(address, address), node.address, end) for address, end in ends}
    arrows = [
        (arrow.source.addresses[0], arrow.target.addresses[0], arrow.end)
        for arrow in drawing.arrows
        if arrow.target.addresses and arrow.source.addresses != arrow.target.addresses
    ]
    assert sorted(arrows) == sorted(expected)


def plate_labels(repeat, layer, **keys):
    spec = spec_of({**EMB, "deep": {"repeat": repeat, "layer": layer, **keys}, **LOGITS}, inputs={"tgt": "B T"})
    return [" ".join(plate.label) for plate in plates(drawing_of(spec))]


def test_a_node_that_passes_its_input_on_is_drawn_only_where_nothing_else_is():
    drawing = drawing_of(shipped_spec("probe_decoder"))
    assert "Identity" not in titles(boxes(drawing))
    branches = {"ffn": {"block": "ffn"}, "skip": {"block": "none"}}
    graph = {**EMB, "both": {"join": "sum", "parallel": branches}, **LOGITS}
    assert "Identity" in titles(boxes(drawing_of(spec_of(graph, inputs={"tgt": "B T"}))))


def test_a_decoder_on_its_own_reads_tokens():
    assert titles(boxes(drawing_of(shipped_spec("decoder_only"))))[:2] == ["Tokens", "Token Embedding"]
    assert titles(boxes(drawing_of(shipped_spec("base"))))[0] == "Inputs"


@pytest.mark.parametrize(("block", "title"), [("lstm", "LSTM"), ("attention", "Masked Multi-Head Attention"), ("convolution", "Causal Convolution")])  # fmt: skip
def test_a_causal_block_has_the_name_of_the_field(block, title):
    graph = {**EMB, "node": {"block": block, "mask": "causal"}, **LOGITS}
    spec = spec_of(graph, inputs={"tgt": "B T"}, args={**ARGS, "kernel_size": 3})
    assert title in titles(boxes(drawing_of(spec)))


@pytest.mark.parametrize("block", ["moe", "expert_choice_moe"])
def test_experts_have_the_colour_of_feed_forward_networks(block):
    graph = {"emb": {"block": "embedding", "in": "src"}, "node": {"block": block, "experts": 4}, **LOGITS}
    spec = spec_of(graph, inputs={"src": "B S"})
    assert box_at(drawing_of(spec), "node").kind == "ffn"


def test_layers_that_differ_are_drawn_as_groups():
    assert plate_labels(6, LAYER) == ["6×"]
    assert plate_labels(6, LAYER, at={0: {"ffn": {"d_ff": 7}}}) == ["layer 0", "5× layers 1–5"]
    assert plate_labels(6, LAYER, at={-1: {"ffn": None}}) == ["5× layers 0–4", "layer 5"]
    assert plate_labels({"times": 6, "share": True}, LAYER) == ["6× shared weights"]


def test_the_argument_in_which_layers_differ_is_shown():
    deep = {"repeat": 3, "layer": LAYER, "at": {0: {"ffn": {"d_ff": 7}}}}
    drawing = drawing_of(spec_of({**EMB, "deep": deep, **LOGITS}, inputs={"tgt": "B T"}))
    assert [box_at(drawing, f"deep.{index}.ffn").notes for index in (0, 1)] == [("d_ff 7",), ("d_ff 12",)]


def windows(r):
    return {"attn": {"block": "restricted_attention", "mask": "causal", "r": r}, "ffn": {"block": "ffn"}}


def test_a_repeated_series_of_layers_is_one_group_with_a_plate_for_each_kind():
    assert plate_labels(6, windows("1 + i%2*7")) == ["3×", "", ""]
    assert plate_labels(5, windows("1 + i%2*7")) == ["2× layers 0–3", "", "", "layer 4"]
    assert plate_labels(9, windows("1 + i%3//2*7")) == ["3×", "2×", ""]
    deep = {"repeat": 9, "layer": windows("1 + i%3//2*7")}
    drawing = drawing_of(spec_of({**EMB, "deep": deep, **LOGITS}, inputs={"tgt": "B T"}))
    drawn = {index for box in boxes(drawing) for index in range(9) if f"deep.{index}.attn" in box.addresses}
    assert drawn == set(range(9))


def test_many_layers_that_differ_in_a_number_are_drawn_once():
    assert len(plate_labels(12, windows("1 + i"))) == 12
    assert plate_labels(13, windows("1 + i")) == ["13×"]
    deep = {"repeat": 13, "layer": windows("1 + i")}
    drawing = drawing_of(spec_of({**EMB, "deep": deep, **LOGITS}, inputs={"tgt": "B T"}))
    assert box_at(drawing, "deep.0.attn").notes == ("r by layer",)


def cross(kv):
    return {"block": "attention", "kv": kv}


@pytest.mark.parametrize(
    ("kv", "note"),
    [
        ("src_stack", ""),
        ("src_stack.(i)", "reads src_stack layer i"),
        ("src_stack.(n-1-i)", "reads src_stack layer 1−i"),
        ("src_stack.0", "reads src_stack layer 0"),
        ({"block": "weighted_sum", "in": "src_stack.*"}, "reads all layers of src_stack"),
    ],
)
@pytest.mark.parametrize("add_norm", ["post", "pre"])
def test_layers_that_read_another_stack_in_one_way_are_drawn_once(kv, note, add_norm):
    decoder = {"repeat": 2, "layer": {**LAYER, "cross": cross("src_stack"), "other": cross(kv)}}
    graph = {**encoder("src"), "emb": {"block": "embedding", "in": "tgt"}, "decoder": decoder, **LOGITS}
    drawing = drawing_of(spec_of(graph, add_norm=add_norm))
    assert [plate.label for plate in plates(drawing)] == [("2×",), ("2×",)]
    assert notes(drawing) == note


@pytest.mark.parametrize(("kv", "note"), [("i+1", "i+1"), ("n-i", "3−i"), ("n-1-i", "2−i"), ("i", "i")])
def test_a_note_on_a_read_layer_has_its_offset(kv, note):
    decoder = {"repeat": 3, "layer": {**LAYER, "cross": cross("src_stack"), "other": cross(f"src_stack.({kv})")}}
    graph = encoder("src")
    graph["src_stack"] = {**graph["src_stack"], "repeat": 4}
    graph |= {"emb": {"block": "embedding", "in": "tgt"}, "decoder": decoder, **LOGITS}
    assert notes(drawing_of(spec_of(graph))) == f"reads src_stack layer {note}"
    readers = [f"decoder.{layer}.other" for layer in range(3)]
    assert layer_note("src_stack", 5, readers, [[0], [2], [4]]) == "reads src_stack layers 0, 2, 4"
    assert layer_note("src_stack", 5, ["decoder.2.x", "decoder.3.x"], [[1], [2]]) == "reads src_stack layer i−1"


def test_shared_and_tied_weights_are_marked():
    drawing = drawing_of(shipped_spec("base"))
    assert box_at(drawing, "tgt_emb").notes == ("weights of src_emb",)
    assert box_at(drawing, "logits").notes == ("tied to src_emb",)


def test_copies_of_a_layer_are_drawn_once_and_branches_side_by_side():
    drawing = drawing_of(shipped_spec("redundant"))
    assert ("6×", "side by side") in [plate.label for plate in plates(drawing)]
    drawing = drawing_of(shipped_spec("parallel"))
    columns = [box_at(drawing, f"decoder.0.all.{name}").column for name in ("self", "cross", "ffn")]
    assert columns == [0, 1, 2]


FEED = {"a": {"block": "ffn"}, "b": {"block": "ffn"}}


@pytest.mark.parametrize(
    "form", [{"layer": FEED}, {"layer": FEED, "repeat": 2, "join": "sum"}, {"parallel": FEED, "join": "gate"}]
)
def test_an_inline_node_is_drawn_before_the_stack_copies_or_branches_that_read_it(form):
    more = {"in": {"block": "linear", "d_out": "d_model"}, **form}
    spec = spec_of({**EMB, "more": more, **LOGITS}, inputs={"tgt": "B T"})
    drawing = drawing_of(spec)
    assert titles(boxes(drawing)).count("Feed Forward") == 2
    assert read_by(drawing, box_at(drawing, "more.in_x")) == {("emb", "main")}


def test_shapes_and_costs_are_shown_on_request_only():
    spec = shipped_spec("base")
    plain = drawing_of(spec)
    assert not any(box.output for box in boxes(plain)) and "parameters" not in notes(plain)
    full = drawing_of(spec, shapes=True, costs={"encoder.0.ffn": (2_099_712, 67_108_864)})
    assert box_at(full, "src").output == "B S" and box_at(full, "logits").output == "B T 37000"
    assert box_at(full, "encoder.0.ffn").notes == ("2.1M parameters", "67.1M multiply-adds")


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1k"), (999_499, "999k"), (999_500, "1M"), (999_500_000, "1G"), (1_000_000_000_000, "1T")],
)
def test_a_count_is_rounded_to_three_digits_of_its_unit(count, text):
    assert cost_notes(count, 0) == [f"{text} parameters"]


def test_the_figure_of_a_layer_has_what_it_reads_as_inputs():
    drawing = drawing_of(shipped_spec("base"), of="decoder.0")
    texts = [" ".join(box.title) for box in boxes(drawing) if box.kind == "text"]
    assert sorted(texts) == ["Output", "encoder.5.ffn", "tgt_pos"]


def test_an_unknown_address_is_an_error_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"nothing is called 'encodr'(.|\n)*did you mean encoder"):
        drawing_of(shipped_spec("base"), of="encodr")


def test_a_stack_as_one_box_reads_what_its_nodes_read():
    drawing = drawing_of(shipped_spec("base"), fold="stacks")
    decoder = box_at(drawing, "decoder.3.ffn")
    assert (decoder.title, decoder.notes) == (("Decoder",), ("6×",))
    assert read_by(drawing, decoder) == {("tgt_pos", "main"), ("encoder", "port")}
