"""In no figure do boxes or texts overlap, or lines cross them."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, assume, given, settings

from tests.figures.geometry import faults
from tests.network.examples import DEFAULT, SHIPPED, TESTS
from tests.network.random_graphs import models
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.figures.draw import Content
from tfm_blocks.figures.figure import picture_of
from tfm_blocks.language.sources import Sources
from tfm_blocks.network.build import read_model
from tfm_blocks.registry.blocks import REGISTRY

MODELS = {path.stem: path.stem for path in SHIPPED} | {path.stem: str(path) for path in TESTS}
QUICK = {*DEFAULT & {path.stem for path in SHIPPED}, "adaptive"}  # the other test models run only in CI
each_model = pytest.mark.parametrize(
    "name",
    [pytest.param(name, id=stem, marks=[pytest.mark.grid] * (stem not in QUICK)) for stem, name in MODELS.items()],
)
FOLDS = ("none", "layers", "stacks")
INPUTS = {"src": "B S", "tgt": "B T"}
ARGS = {"d_model": 8, "d_ff": 12, "heads": 2, "vocab": 11, "dropout": 0.1}


@cache
def shipped_spec(name, *overrides):
    composed = compose_model(name, overrides)
    return read_model(composed.model, composed.sources)


def spec_of(graph, **keys):
    return read_model({"inputs": INPUTS, "args": ARGS, "add_norm": "post", "graph": graph, **keys}, Sources())


def contents(spec):
    costs = {node.address: (123_456_789, 987_654_321) for node in spec.nodes}
    for fold in FOLDS:
        yield Content(fold)
        yield Content(fold, shapes=True, costs=costs)


@each_model
def test_nothing_overlaps_in_the_figures_of_a_model(name):
    spec = shipped_spec(name, "layers=4")
    for content in contents(spec):
        assert faults(picture_of(spec, REGISTRY, content)) == [], content


@pytest.mark.parametrize("address", ["encoder", "encoder.0", "decoder.0", "decoder.0.cross", "src_emb", "logits"])
def test_nothing_overlaps_in_the_figure_of_a_part(address):
    spec = shipped_spec("prenorm")
    assert faults(picture_of(spec, REGISTRY, Content(of=address, shapes=True))) == []


def branches(count):
    return {f"branch_{number}": {"block": "ffn"} for number in range(count)}


LONG = "long_" * 12
EMB, LOGITS = {"emb": {"block": "embedding", "in": "tgt"}}, {"logits": {"block": "unembed"}}
LAYER = {"attn": {"block": "attention", "mask": "causal"}, "ffn": {"block": "ffn"}}
CHANGES = {0: {"ffn": {"d_ff": 7}}, 5: {"extra": {"block": "ffn"}}, -1: {"ffn": None}}
ODD = {
    "twelve branches": {**EMB, "wide": {"join": "mean", "parallel": branches(12)}, **LOGITS},
    "one node": {"logits": {"block": "linear", "d_out": 8, "in": "vectors"}},
    "long names": {
        f"{LONG}emb": {"block": "embedding", "in": "tgt"},
        f"{LONG}stack": {"repeat": 3, "layer": {f"{LONG}node": {"block": "ffn"}}},
        "logits": {"block": "unembed", "tie": f"{LONG}emb"},
    },
    "layers that differ": {**EMB, "deep": {"repeat": 12, "at": CHANGES, "layer": LAYER}, **LOGITS},
}


def encoder(source):
    return {f"{source}_emb": {"block": "embedding", "in": source}, f"{source}_stack": {"repeat": 2, "layer": LAYER}}


@pytest.mark.parametrize("graph", ODD.values(), ids=ODD)
def test_nothing_overlaps_in_the_figure_of_an_odd_model(graph):
    inputs = {"vectors": "B P 6"} if len(graph) == 1 else {"tgt": "B T"}
    spec = spec_of(graph, inputs=inputs)
    for content in contents(spec):
        assert faults(picture_of(spec, REGISTRY, content)) == [], content


def test_nothing_overlaps_in_the_figure_of_three_stacks():
    cross = {name: {"block": "attention", "kv": f"{name}_stack.(i)"} for name in ("src", "doc")}
    read = {f"from_{name}": node for name, node in cross.items()}
    graph = {**encoder("src"), **encoder("doc"), **encoder("tgt"), "read": {"repeat": 2, "layer": read}, **LOGITS}
    spec = spec_of(graph, inputs={**INPUTS, "doc": "B P"})
    for content in contents(spec):
        assert faults(picture_of(spec, REGISTRY, content)) == [], content


def test_lines_of_two_boxes_on_one_side_of_a_frame_have_different_heights():
    wide = {"join": "sum", "repeat": 1, "layer": {f"node_{i}": {"block": "ffn", "add_norm": "post"} for i in range(3)}}
    reader = {"block": "sum", "in": [{"block": "linear", "d_out": "d_model", "in": "emb"}]}
    first, second = ({**reader, "in": [before, "emb", *reader["in"]]} for before in ("wide", "first"))
    spec = spec_of({**EMB, "wide": wide, "first": first, "second": second, **LOGITS}, inputs={"tgt": "B T"})
    for content in contents(spec):
        assert faults(picture_of(spec, REGISTRY, content)) == [], content


def test_a_box_that_is_moved_onto_another_or_onto_a_line_is_noticed():
    picture = picture_of(shipped_spec("base"), REGISTRY, Content())
    first, second, *others = picture.boxes
    side = next(placed for placed in picture.arrows if placed.end == "side")
    for place, word in (((second.x, second.y), "overlaps"), (side.points[1], "crosses")):
        moved = replace(first, x=place[0] - 5, y=place[1] - 5)
        assert any(word in fault for fault in faults(replace(picture, boxes=(moved, second, *others))))


def check_random(model):
    try:
        spec = read_model(model, Sources())
    except ConfigError:
        assume(False)
    for content in contents(spec):
        assert faults(picture_of(spec, REGISTRY, content)) == [], (content.fold, content.shapes)


COMMON = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@pytest.mark.grid
@settings(max_examples=8, **COMMON)
@given(models())
def test_nothing_overlaps_in_the_figure_of_a_random_model(plugged, model):
    check_random(model)


@pytest.mark.grid
@settings(max_examples=300, **COMMON)
@given(models())
def test_nothing_overlaps_in_the_figures_of_300_random_models(plugged, model):
    check_random(model)
