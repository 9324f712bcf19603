"""The JSON schema of editors agrees with the checker, as far as one file allows."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from torch import nn

from tests.network.examples import ALL, each
from tfm_blocks.compose.folders import CONF
from tfm_blocks.language.schema import REFERENCE, build_schema
from tfm_blocks.language.tree import read_reference
from tfm_blocks.registry.blocks import REGISTRY, Registry, block
from tfm_blocks.registry.values import Rate

FILE = CONF / "model.schema.json"
ORACLES = sorted((Path(__file__).parents[1] / "oracles").glob("*.yaml"))
MODELINE = re.compile(r"^# yaml-language-server: \$schema=(\S+)$", re.MULTILINE)


def as_json(value):
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, list) else value


@cache
def shipped_validator():
    return Draft202012Validator(json.loads(FILE.read_text("utf-8")))


def places(text, schema=None):
    """Return the outermost place of each error of the schema."""
    validator = Draft202012Validator(schema) if schema else shipped_validator()
    return [error.json_path for error in validator.iter_errors(as_json(yaml.safe_load(text)))]


def test_the_schema_in_conf_is_the_registry():
    """Plug-ins that other tests loaded are ignored."""
    shipped = build_schema(
        Registry({name: info for name, info in REGISTRY.blocks.items() if info.shipped}, REGISTRY.reserved)
    )
    Draft202012Validator.check_schema(shipped)
    assert json.loads(FILE.read_text("utf-8")) == shipped, "tfm schema -o conf/model.schema.json"


@each([*ALL, *ORACLES])
def test_every_model_file_names_the_schema_and_is_valid(path):
    text = path.read_text("utf-8")
    assert (path.parent / MODELINE.search(text)[1]).resolve() == FILE.resolve()
    assert places(text) == []


GRAPH = "model: {graph: {encoder: {layer: {%s}}}}"


@pytest.mark.parametrize(
    "text",
    [
        GRAPH % "attn: {kv: src_emb.(n-1-i), heads: d_model // 64}",
        GRAPH % "attn: {block: null, same: null, layer: null}",
        GRAPH % "both: {join: {block: gate}, parallel: {a: {block: ffn, activation: {block: gelu}}, b: null}}",
        GRAPH % "ffn: {block: ffn, heads: null, d_ff: '${d_ff}', before: attn}",
        GRAPH % "ffn: {block: '${kind}', d_ff: 8}",
        "model: {graph: {mix: {block: concat, in: [a, b.0, {block: linear, in: c, d_out: 4}]}}}",
        "model: {graph: {encoder: {repeat: {times: 6, share: true}, at: {0: {ffn: null}, -1: null}, layer: {a: {same: b}}}}}",
        "model: {add_norm: {pre: [norm], post: [{gain: 1e-4, per: channel}, {droppath: 0.1}, dropout, add], last: null}}",
        "model: {args: {norm: {block: rmsnorm, eps: 1e-6}, window: 4*heads}, inputs: {img: B P 768, src: null}}",
        "defaults: [base]\nheads: null\nname_of_mine: 0.5\n",
        GRAPH % f"ffn: {{block: ffn, d_ff: {'512 ' * 24}}}",
    ],
)
def test_every_construct_of_the_language_is_valid(text):
    assert places(text) == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("heads: [4]", "$.heads"),
        ("layers-of-mine: 4", "$"),
        ("model: {grahp: {}}", "$.model"),
        ("model: {inputs: {src: b s}}", "$.model.inputs.src"),
        ("model: {args: {dropout: 1.5}}", "$.model.args.dropout"),
        ("model: {args: {i: 1}}", "$.model.args"),
        ("model: {add_norm: prenorm}", "$.model.add_norm"),
        ("model: {add_norm: {post: [scale]}}", "$.model.add_norm"),
        ("model: {graph: {before: {block: ffn}}}", "$.model.graph"),
        (GRAPH % "attn: {block: atention}", "$.model.graph.encoder"),
        (GRAPH % "attn: {haeds: 4}", "$.model.graph.encoder"),
        (GRAPH % "attn: {block: attention, heads: true}", "$.model.graph.encoder"),
        (GRAPH % "attn: {block: attention, heads: 2.5}", "$.model.graph.encoder"),
        (GRAPH % "attn: {block: attention, heads: 'eight!'}", "$.model.graph.encoder"),
        (GRAPH % "attn: {block: attention, mask: causl}", "$.model.graph.encoder"),
        (GRAPH % "attn: {block: attention, d_ff: 8}", "$.model.graph.encoder"),
        (GRAPH % "attn: {block: attention, kv: [a, b]}", "$.model.graph.encoder"),
        (GRAPH % "attn: {block: attention, kv: a b}", "$.model.graph.encoder"),
        (GRAPH % "attn: {block: attention, layer: {a: {block: ffn}}}", "$.model.graph.encoder"),
        (GRAPH % "both: {join: summ, parallel: {a: {block: ffn}}}", "$.model.graph.encoder"),
        ("model: {graph: {encoder: {repeat: 0}}}", "$.model.graph.encoder"),
        ("model: {graph: {encoder: {at: {1st: null}}}}", "$.model.graph.encoder"),
    ],
)
def test_a_misspelt_key_or_a_wrong_type_is_found_with_its_place(text, place):
    assert places(text) == [place]


@pytest.mark.parametrize("text", ["encoder", "encoder.0", "encoder.-1", "encoder.*", "encoder.(n-1-i)", "été.(i)"])
def test_editors_accept_references(text):
    read_reference(text)
    assert re.search(REFERENCE["pattern"], text)


@pytest.fixture
def sifted():
    """Register a block of a plug-in."""

    @block("sifted", "x: B T D, also[]?: B T D -> B T D", source="a test")
    class Sifted(nn.Module):
        def __init__(self, *, share: Rate, names: list[str] | None = None) -> None:
            super().__init__()

        def forward(self, x_BTD, also=None):
            return x_BTD

    yield build_schema(REGISTRY)
    del REGISTRY.blocks["sifted"]


def test_a_block_of_a_plug_in_is_known(sifted):
    assert places("model: {graph: {a: {block: sifted, share: 0.5, also: [b, c], names: [x]}}}", sifted) == []
    assert places("model: {graph: {a: {block: sifted, share: 1.0}}}", sifted) == ["$.model.graph.a"]
    assert places("model: {graph: {a: {block: sifted, share: 0.5}}}") == ["$.model.graph.a"]


def test_the_schema_is_written_to_a_file(tmp_path, capsys):
    from tfm_blocks.cli import main

    main(["schema"])
    main(["schema", "-o", str(tmp_path / "model.schema.json")])
    assert Path(tmp_path / "model.schema.json").read_text("utf-8") == capsys.readouterr().out
