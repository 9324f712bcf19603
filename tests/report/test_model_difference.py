"""`tfm diff`: costs, weights, and the forms of the output."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from xml.etree import ElementTree

import pytest
import torch

import tfm_blocks as tfm
from tests.conftest import refused
from tests.figures.geometry import faults
from tests.figures.test_layout import shipped_spec
from tfm_blocks.cli import main
from tfm_blocks.cli.view import split_models
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.launch.init_from import load_matching_weights
from tfm_blocks.network import incremental
from tfm_blocks.network.matching import weights_of
from tfm_blocks.report.model_difference import compare_models, difference_picture
from tfm_blocks.runs.model import write_model, write_weights

KNOBS = ["d_model=16", "d_ff=8", "heads=2", "layers=2"]


def difference(*words, capsys):
    main(["diff", "--json", *words])
    return json.loads(capsys.readouterr().out)


def test_a_model_is_the_same_as_itself(capsys):
    main(["diff", "tiny", "tiny"])
    assert capsys.readouterr().out == "tiny and tiny are the same model\n"


def test_costs_match_built_networks(capsys):
    words = ["tiny", *KNOBS, "vocab=99", "gqa", *KNOBS, "vocab=99", "kv_heads=1"]
    costs = difference(*words, capsys=capsys)["costs"]
    knobs = {"d_model": 16, "d_ff": 8, "heads": 2, "layers": 2, "vocab": 99}
    for place, network in enumerate([tfm.build("tiny", **knobs), tfm.build("gqa", **knobs, kv_heads=1)]):
        assert costs["parameters"][place] == sum(one.numel() for one in network.parameters())
        source = {"src": torch.ones(1, 32, dtype=torch.int64)}
        decoding = incremental.start(network.eval(), source, 32)
        tensors = [one for state in decoding.states.values() for part in (state.fixed, state.caches, state.moving) for one in part.values()]  # fmt: skip
        tensors += decoding.values.values()
        assert costs["floats of decoding state"][place] == sum(
            one.numel() for one in tensors if one.is_floating_point()
        )


def test_the_weights_that_load_are_those_that_init_from_loads(tmp_path, capsys):
    pieces = Tokenizer.train(["haus hund katze"] * 9, 300)
    knobs = {"d_model": 16, "d_ff": 8, "heads": 2, "vocab": pieces.size}
    saved = tfm.build("tiny", **knobs, layers=2)
    write_weights(tmp_path, weights_of(saved))
    pieces.save(tmp_path / "tokenizer.json")
    report = load_matching_weights(tfm.build("prenorm", **knobs, layers=3), pieces, tmp_path)
    typed = [f"{name}={value}" for name, value in knobs.items()]
    weights = difference("tiny", *typed, "layers=2", "prenorm", *typed, "layers=3", capsys=capsys)["weights"]
    assert (weights["loaded"], weights["new"]) == (report.loaded, report.new)
    assert sorted(weights["unused"]) == sorted(report.unused)


def test_alike_layers_and_equal_changes_are_one_line(capsys):
    main(["diff", "tiny", "tiny", "heads=2"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if "argument heads" in line]
    assert len(rows) == 1 and "encoder.*.attn, decoder.*.self, decoder.*.cross" in rows[0]


@pytest.mark.grid
def test_the_rows_have_one_order_with_every_hash_seed(tmp_path):
    pairs = [("redundant", "macaron"), ("local_global", "universal"), ("layer_to_layer", "parallel")]
    code = f"from tfm_blocks.cli import main\nfor pair in {pairs}: main(['diff', *pair])"
    path = os.pathsep.join(sys.path)
    outputs = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", code]
        outputs.add(subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True).stdout)
    assert len(outputs) == 1 and b"macaron" in outputs.pop()


def test_the_difference_of_a_run_and_a_model_is_what_the_run_changed(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    write_model(run, compose_model("base", ["heads=4", "vocab=300"]).model, [])
    shown = difference("base", str(run), capsys=capsys)
    assert {(change["key"], change["before"], change["after"]) for change in shown["changes"]} == {
        ("heads", "8", "4"),
        ("vocab", "37000", "300"),
    }
    assert shown["models"] == ["base", str(run)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["base"], "command line: needs 2 models, but has 1: 'base'"),
        (["base", "tiny", "big"], "command line: needs 2 models, but has 3: 'base tiny big'"),
        (["heads=2", "base"], "no model is called 'heads=2'"),
        (["base", "nosuch"], "no model is called 'nosuch'"),
        (["base", "base", "heads=7"], "the width must split evenly into heads"),
        (["decoder_only", "llama", "--src", "3"], "--src: the model has no input 'src'"),
        (["base", "tiny", "--length", "doc=3"], "--length: the model has no input 'doc'"),
    ],
)
def test_a_wrong_command_line_is_one_error_and_status_2(words, message):
    assert re.search(re.escape(message), refused("diff", *words))


def test_overrides_belong_to_the_model_before_them():
    assert split_models(["base", "heads=8", "base", "heads=4", "layers=2"], (2,)) == [
        ("base", ["heads=8"]),
        ("base", ["heads=4", "layers=2"]),
    ]


def signs(path):
    """Return the nodes with each sign, from both figures."""
    nodes = defaultdict(set)
    for group in ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}g"):
        for text in group.iter("{http://www.w3.org/2000/svg}text"):
            nodes[text.text].add(group.get("data-node"))
    return nodes


@pytest.mark.grid
def test_a_figure_marks_what_was_added_removed_and_changed(tmp_path):
    added = {"doc_emb", "doc_pos", "doc_encoder.0.attn", "doc_encoder.0.ffn", "decoder.0.second"}
    changed = {"src_emb", "tgt_emb", "encoder.0.attn", "encoder.0.ffn", "decoder.0.self", "decoder.0.cross", "decoder.0.ffn", "logits"}  # fmt: skip
    wide = ["two_sources", "d_model=128"]
    for sign, words in (("+", ["tiny", *wide]), ("−", [*wide, "tiny"])):
        main(["diff", *words, "-o", str(tmp_path / "figure.svg")])
        shown = signs(tmp_path / "figure.svg")
        assert (shown[sign], shown["~"]) == (added, changed)
        assert len({"+", "−"} & shown.keys()) == 1


def test_nothing_overlaps_in_the_figure_of_a_difference():
    a, b = shipped_spec("two_sources"), shipped_spec("tiny")
    difference = compare_models(("two_sources", "tiny " + "d_model=128 " * 20), a, b, {})
    assert faults(difference_picture(a, b, difference)) == []
