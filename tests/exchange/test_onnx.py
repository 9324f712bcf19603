"""ONNX Runtime gives the outputs of the run, by the loop of docs/exporting.md, and other nodes are refused."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import tfm_blocks as tfm
from tests.conftest import WORDS, sentences
from tests.network.examples import SHIPPED, TESTS, build
from tests.network.small import noisy
from tfm_blocks.blocks.layers.state import State
from tfm_blocks.cli import main
from tfm_blocks.compose.folders import CONF
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.vocabulary import BOS
from tfm_blocks.errors import RunError
from tfm_blocks.exchange.onnx.export import Engine, compare_graphs, write_graphs
from tfm_blocks.exchange.onnx.tracing import UNCOVERED, StateLayout, trace_network
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.incremental import Decoding
from tfm_blocks.runs.model import read_network
from tfm_blocks.translation.search import Bounds, one_by_one

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

PAGE = Path(__file__).parents[2] / "docs" / "exporting.md"
SIZES = {"d_model": 16, "d_ff": 24, "heads": 4, "layers": 2, "vocab": 300}
SMALL = {"r": 4, "kv_heads": 2, "experts": 8, "max_length": 60}  # knobs of some models
REFUSED = {"recurrent"}


def scattered(model, overrides=(), **knobs):
    text = (CONF / "model" / f"{model}.yaml").read_text("utf-8")
    small = {name: value for name, value in SMALL.items() if f"\n{name}:" in text}
    return noisy(model, {**SIZES, **small, **knobs}, overrides)


def saved(folder, model):
    """Write the folder of an untrained run with a tokenizer of words."""
    tokenizer = Tokenizer.train(WORDS * 3, 300)
    return tfm.save(scattered(model, vocab=tokenizer.size), folder / "run", tokenizer=tokenizer)


def exported(network, folder):
    folder.mkdir()
    write_graphs(network, folder, "run")
    return folder


def loop_of_the_page():
    """Return the functions of translate_onnx.py as the page shows it."""
    code = re.search(r"```python\n(# translate_onnx\.py\n.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[1]
    names = {"__name__": "translate_onnx"}
    exec(code, names)
    return SimpleNamespace(**names)


def export(run, folder):
    main(["export", str(run), "--to", "onnx", "-o", str(folder)])


@pytest.mark.grid
@pytest.mark.parametrize("model", ["base", "gqa", "t5", "restricted"])
def test_the_loop_of_the_page_gives_200_translations_of_the_run(model, tmp_path, capsys):
    run, folder = saved(tmp_path, model), tmp_path / "new"
    export(run, folder)
    assert re.search(r"new: encoder\.onnx, first\.onnx, step\.onnx\nlog probabilities of", capsys.readouterr().out)
    certificate = json.loads((folder / "certificate.json").read_text())
    print(model, certificate["log_probabilities"])
    assert certificate["log_probabilities"]["largest"] < 1e-4
    assert certificate["versions"].keys() >= {"opset", "onnx", "onnxruntime", "onnxscript", "torch", "tfm-blocks"}
    text = [*sentences(199, seed=5), ""]
    expected = tfm.load(run).translate(text)
    assert len(set(expected)) > 10
    assert loop_of_the_page().translate(folder, text) == expected
    assert (folder / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    with pytest.raises(SystemExit):
        export(run, folder)
    assert "exists already" in capsys.readouterr().err


@pytest.mark.grid
def test_the_script_of_the_page_prints_a_line_for_each_line(tmp_path):
    run, folder, script = saved(tmp_path, "base"), tmp_path / "new", tmp_path / "translate_onnx.py"
    export(run, folder)
    script.write_text(re.search(r"```python\n(# translate_onnx\.py\n.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[1])
    for text in ("a red\u2028boat\na\x0bblue\x85house\r\n", ""):
        done = subprocess.run([sys.executable, script, folder], input=text.encode(), capture_output=True, check=True)
        lines = [line.removesuffix("\r") for line in text.split("\n")[:-1]]
        outputs = tfm.load(run).translate(lines)
        assert done.stdout.decode() == "".join(f"{output}\n" for output in outputs)


@pytest.mark.grid
def test_the_loop_of_the_page_continues_200_prompts_as_the_run_does(tmp_path):
    network, page = scattered("decoder_only"), loop_of_the_page()
    folder = exported(network, tmp_path / "new")
    prompts = torch.randint(4, 300, (200, 5), generator=torch.Generator().manual_seed(1))
    prompts[:, -1] = BOS
    bounds = Bounds(torch.zeros(200), torch.full((200,), 20), torch.zeros(200, 0, dtype=torch.int64))
    expected = [hypothesis.ids for hypothesis in one_by_one(network, {}, bounds, before_BN=prompts)]
    ids = page.decode(*page.load(folder, "first", "step"), {"tgt": prompts.numpy()}, 20).tolist()
    assert len({tuple(row) for row in ids}) > 20
    assert [row[: row.index(page.EOS)] if page.EOS in row else row for row in ids] == expected


@pytest.mark.grid
def test_a_run_without_target_is_one_graph_and_is_not_compared_without_the_runtime(tmp_path, capsys, monkeypatch):
    run, folder = saved(tmp_path, "encoder_only"), tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        export(run, folder)
    assert "model.onnx\nnot compared with the run, because onnxruntime is not installed" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["model.onnx", "tokenizer.json", "weights.safetensors"]
    assert compare_graphs(Engine(folder, onnxruntime), read_network(run)).largest < 1e-4


@pytest.mark.grid
@pytest.mark.parametrize("classes", [1, 3])
def test_outputs_of_classifiers_are_compared_without_the_output_that_padding_lacks(classes, tmp_path):
    network = scattered("classifier", [f"classes={classes}"])
    engine = Engine(exported(network, tmp_path / "onnx"), onnxruntime)
    assert compare_graphs(engine, network).largest < 1e-4
    with torch.no_grad():
        dict(network.named_parameters())["logits.block.bias"].add_(torch.linspace(0.5, 1.0, classes))
    assert compare_graphs(engine, network).largest > 0.1


def test_missing_libraries_are_reported_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(SystemExit):
        export(tmp_path / "run", tmp_path / "new")
    assert "onnxscript: the library is not installed" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


ATTENTION, SELF = "model.graph.encoder.layer.attn", "model.graph.decoder.layer.self"
REFUSALS = {
    **{name: ("recurrent", [f"{ATTENTION}.block={name}"], "encoder.*.attn") for name in ("rnn", "gru", "lstm")},
    **{name: ("retention", [f"{SELF}.block={name}"], "decoder.*.self") for name in ("gated_delta_rule", "rwkv7")},
    "native_sparse_attention": ("base", [f"{SELF}.block=native_sparse_attention"], "decoder.*.self"),
    "top_blocks": ("base", [f"{ATTENTION}.selection=top_blocks"], "encoder.*.attn"),
    "restricted_global_attention": ("restricted", [f"{ATTENTION}.block=restricted_global_attention"], "encoder.*.attn"),
}


@pytest.mark.parametrize("block", UNCOVERED)
def test_blocks_that_are_not_covered_are_refused_by_node(block):
    model, overrides, address = REFUSALS[block]
    with pytest.raises(RunError, match=rf"error: run: {re.escape(address)}: the export to ONNX does not cover"):
        trace_network(scattered(model, overrides), "run")


def test_entries_that_change_are_separate_inputs_of_the_step_also_if_they_begin_as_one_tensor():
    zeros = torch.zeros(2, 3)
    state = State(fixed={"mask": zeros}, moving={"sum": zeros, "squares": zeros})
    layout = StateLayout(Decoding({}, {}, {"a": state}, torch.ones(2, 1, 1, 1, dtype=torch.bool)))
    assert layout.read == ["a.mask", "a.sum", "a.squares"]
    passed = layout.decoding({name: zeros + number for number, name in enumerate(layout.read)}, 1).states["a"]
    values = {name: tensor[0, 0].item() for name, tensor in {**passed.fixed, **passed.moving}.items()}
    assert values == {"mask": 0, "sum": 1, "squares": 2}


def test_inputs_of_vectors_are_refused():
    network = tfm.build(str(Path(__file__).parents[1] / "models" / "vectors.yaml"), vocab=30)
    with pytest.raises(RunError, match=r"run: inputs\.img: the export to ONNX covers inputs of token ids"):
        trace_network(network, "run")


class FixesLength(nn.Module):
    def forward(self, x_BTD):
        return x_BTD * len(x_BTD[0])


class HasNoCounterpart(nn.Module):
    def forward(self, x_BTD):
        return x_BTD + torch.linalg.matrix_exp(x_BTD @ x_BTD.mT).sum()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("block", "rule"),
    [(FixesLength, "needs any batch and any lengths"), (HasNoCounterpart, "has no counterpart of the operation aten")],
)
def test_other_blocks_that_cannot_be_exported_are_refused_by_node_or_graph(block, rule, tmp_path):
    network = scattered("encoder_only", layers=1)
    network.get_submodule("encoder.0.ffn").block = block()
    with pytest.raises(RunError, match=rf"error: run: (encoder\.\*\.ffn|model): the export to ONNX {rule}"):
        exported(network, tmp_path / "new")


@pytest.mark.grid
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("restricted", []),
        ("base", [f"{SELF}.block=segment_attention", f"{SELF}.segment=16", f"{SELF}.memory=16"]),
        ("retention", [f"{SELF}.block=mlstm"]),
        ("retention", [f"{SELF}.block=mamba3", f"{SELF}.d_inner=64", f"{SELF}.d_state=4"]),
        ("retention", [f"{SELF}.slope=1.0", f"{SELF}.rotate=false", f"{SELF}.out_norm=rmsnorm"]),
    ],
)
def test_batch_and_lengths_are_free(model, changes, tmp_path):
    network = scattered(model, changes)
    engine = Engine(exported(network, tmp_path / "new"), onnxruntime)
    for batch, source, target in ((1, 1, 1), (5, 90, 70)):
        inputs = {"src": torch.randint(4, 300, (batch, source)), "tgt": torch.randint(4, 300, (batch, target))}
        values = {name: ids.numpy() for name, ids in inputs.items()}
        engine.run("encoder", values)
        logits = engine.run("first", values)
        np.testing.assert_allclose(logits, network(**inputs).detach().numpy(), atol=1e-4)


def with_layer(name, **layer):
    """Return a language model with one layer."""
    graph = {
        "emb": {"block": "embedding", "in": "tgt", "vocab": 30, "d_model": 8},
        name: layer,
        "out": {"block": "unembed", "vocab": 30},
    }
    return build_network(check_model({"inputs": {"tgt": "B T"}, "graph": graph}), seed=1).eval()


@pytest.mark.grid
@pytest.mark.parametrize("layer", [{"block": "mamba", "d_inner": 16, "d_state": 5}, {"block": "rg_lru", "heads": 2}])
def test_tensors_of_a_scan_grow_linearly_with_the_length(layer):
    first, _ = trace_network(with_layer("self", **layer), "run")
    values = {node.name: node.meta.get("val") for node in first.program.graph.nodes}
    batch, length = (size.node.expr for size in values[first.program.graph_signature.user_inputs[0]].shape)
    sizes = [x.numel() for x in values.values() if isinstance(x, torch.Tensor)]
    sizes = [size.node.expr for size in sizes if isinstance(size, torch.SymInt)]
    short, long = (max(size.subs({batch: 1, length: positions}) for size in sizes) for positions in (500, 1000))
    assert long <= 2.1 * short


@pytest.mark.grid
@pytest.mark.parametrize("bias", [-12.0, -110.0])
def test_an_almost_closed_decay_gate_has_equal_logits(bias, tmp_path):
    network = with_layer("self", block="rg_lru", heads=2)
    network.get_parameter("self.block.decay_bias").data.fill_(bias)
    largest = compare_graphs(Engine(exported(network, tmp_path / "new"), onnxruntime), network).largest
    assert largest < 1e-3  # the sigmoid of ONNX Runtime has few digits below 1e-5


@pytest.mark.grid
def test_a_node_can_be_called_next(tmp_path):
    network = with_layer("next", block="attention", heads=2, mask="causal", position="rotary")
    assert compare_graphs(Engine(exported(network, tmp_path / "new"), onnxruntime), network).largest < 1e-4


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("hyper_connections", {"kind": "manifold"}),
        *((name, {}) for name in ("routed_updates", "segments", "ternary", "mamba", "mamba2", "griffin")),
        *((name, {}) for name in ("ngrams", "attention_residuals", "adaptive", "hashed_experts", "kv_sharing")),
        ("scalenorm", {"model.graph.encoder.layer.ffn": {"block": "expert_choice_moe", "experts": 4}}),
    ],
)
def test_models_with_other_blocks_have_equal_logits_also_in_steps(name, knobs, tmp_path):
    network = build(next(path for path in TESTS if path.stem == name), **knobs).eval()
    assert compare_graphs(Engine(exported(network, tmp_path / "new"), onnxruntime), network).largest < 1e-4


@pytest.mark.grid
def test_concatenated_sources_of_any_lengths_have_equal_logits(tmp_path):
    embed = {"block": "embedding", "vocab": 30, "d_model": 8}
    graph = {
        "one": {**embed, "in": "src"},
        "two": {**embed, "in": "doc"},
        "both": {"block": "concat_sequence", "in": ["one", "two"]},
        "attn": {"block": "attention", "heads": 2, "position": "rotary"},
        "out": {"block": "unembed", "vocab": 30},
    }
    network = build_network(check_model({"inputs": {"src": "B S", "doc": "B P"}, "graph": graph}), seed=1).eval()
    engine = Engine(exported(network, tmp_path / "new"), onnxruntime)
    inputs = {"src": torch.randint(4, 30, (5, 9)), "doc": torch.randint(4, 30, (5, 4))}
    inputs["src"][1, 3:] = inputs["doc"][2, 1:] = 0
    logits = engine.run("model", {name: ids.numpy() for name, ids in inputs.items()})
    np.testing.assert_allclose(logits, network(**inputs).detach().numpy(), atol=1e-4)


@pytest.mark.grid
def test_changed_positions_have_equal_logits(tmp_path):
    graph = {
        "emb": {"block": "embedding", "vocab": 30, "d_model": 8, "in": "src"},
        "down": {"block": "strided_convolution", "kernel_size": 3, "stride": 2, "d_out": 8},
        "mem": {"block": "learned_tokens", "tokens": 3},
        "attn": {"block": "attention", "heads": 2, "position": "rotary"},
        "out": {"block": "unembed", "vocab": 30},
    }
    network = build_network(check_model({"inputs": {"src": "B S"}, "graph": graph}), seed=1).eval()
    engine = Engine(exported(network, tmp_path / "new"), onnxruntime)
    for length in (9, 4):
        src_BS = torch.randint(4, 30, (5, length))
        src_BS[1, 2:] = 0
        logits = engine.run("model", {"src": src_BS.numpy()})
        np.testing.assert_allclose(logits, network(src=src_BS).detach().numpy(), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_model_is_exported_or_refused(path, tmp_path):
    network = scattered(path.stem, layers=2 if " at:" in path.read_text("utf-8") else 1)
    if path.stem in REFUSED:
        with pytest.raises(RunError, match="the export to ONNX does not cover"):
            exported(network, tmp_path / "new")
        return
    difference = compare_graphs(Engine(exported(network, tmp_path / "new"), onnxruntime), network)
    print(path.stem, difference)
    assert difference.largest < 1e-4
