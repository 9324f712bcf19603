"""CTranslate2 gives the outputs of the run, and graphs that the export does not cover are refused by node."""

import json
import os
import re
import sys

import pytest
import torch

import tfm_blocks as tfm
from tests.conftest import WORDS
from tests.exchange.published import VOCAB, publish
from tests.network.small import noisy
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.tokenizer import SPECIAL, Tokenizer
from tfm_blocks.errors import DataError, RunError
from tfm_blocks.exchange.ctranslate2.export import compare_log_p, export_to_ctranslate2, write_network
from tfm_blocks.exchange.ctranslate2.rules import read_engine_graph, table
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.network.build import check_model
from tfm_blocks.network.matching import weights_of
from tfm_blocks.registry.blocks import REGISTRY

SIZES = {"d_model": 16, "d_ff": 24, "heads": 4, "layers": 2, "vocab": 37}
SUBWORDS = [*SPECIAL, *(f"t{id}" for id in range(4, SIZES["vocab"]))]
ENCODER, CROSS = "model.graph.encoder.layer.attn", "model.graph.decoder.layer.cross"
ACTIVATION = "model.graph.encoder.layer.ffn.activation"
COVERED = {
    "base": {},
    "gpt2": {"max_length": 30, "first_id": 2},
    "prenorm": {},
    "swiglu": {},
    "rotary": {},
    "gqa": {},
    "marian": {"first_id": 1},
    "bart": {"first_id": 2, "max_length": 30},
    "decoder_only": {},
    "llama": {"kv_heads": 2, "d_head": 6},
}
DEFAULT = ("base", "gpt2")


def scattered(model, overrides=(), **knobs):
    return noisy(model, {**SIZES, **knobs}, overrides)


def engine_of(network, folder, quantization="float32"):
    ctranslate2 = pytest.importorskip("ctranslate2")
    folder.mkdir(exist_ok=True)
    write_network(network, SUBWORDS, folder, quantization, "run")
    return (ctranslate2.Translator if network.spec.sources else ctranslate2.Generator)(str(folder))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.grid]) for name in COVERED]
)
def test_log_probabilities_match_the_network(name, tmp_path):
    network = scattered(name, **COVERED[name])
    assert compare_log_p(engine_of(network, tmp_path), network, SUBWORDS).largest < 1e-4


@pytest.mark.grid
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        *(("base", [f"{ACTIVATION}={name}"]) for name in table()["blocks"]["ffn"]["only"]["activation"][0]),
        ("base", ["model.graph.src_pos.block=fairseq_sinusoidal", "model.graph.tgt_pos.block=none"]),
        ("base", ["model.graph.src_emb.scale=3", "model.graph.logits.out_bias=true", "model.graph.logits.tie=null"]),
        (
            "prenorm",
            [
                "model.args.norm={block: layernorm, bias: false, eps: 1.0e-3}",
                f"{ENCODER}.bias=qkv",
                f"{ENCODER}.scores={{block: softmax, beta: 0.7}}",
            ],
        ),
        ("rotary", ["model.graph.encoder.layer.attn.position={block: rotary, layout: pairs, share: 0.5, base: 99.0}"]),
    ],
)
def test_arguments_that_the_table_allows_are_exported(model, overrides, tmp_path):
    network = scattered(model, overrides)
    assert compare_log_p(engine_of(network, tmp_path), network, SUBWORDS).largest < 1e-4


def test_a_quantised_export_does_not_change_the_network(tmp_path):
    network = scattered("base")
    before = {name: tensor.clone() for name, tensor in weights_of(network).items()}
    exact = compare_log_p(engine_of(network, tmp_path / "float32"), network, SUBWORDS)
    rounded = compare_log_p(engine_of(network, tmp_path / "int8", "int8"), network, SUBWORDS)
    assert exact.largest < rounded.largest  # by how much depends on the CPU: 3 with AVX2 alone
    assert rounded.mean < 1
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(network).items())


REFUSED = {
    "d_value": ("base", [f"{ENCODER}.d_value=3"], "encoder.*.attn"),
    "position": ("alibi", [], "decoder.*.self"),
    "scores": ("base", [f"{ENCODER}.scores=softcap"], "encoder.*.attn"),
    "selection": ("base", [f"{ENCODER}.selection=top_blocks"], "encoder.*.attn"),
    "qk_norm": ("base", [f"{ENCODER}.qk_norm=rmsnorm"], "encoder.*.attn"),
    "qk_norm_kind": ("base", [f"{ENCODER}.qk_norm=rmsnorm", f"{ENCODER}.qk_norm_kind=joint"], "encoder.*.attn"),
    "bias": ("base", [f"{ENCODER}.bias=except_keys"], "encoder.*.attn"),
    "v_norm": ("base", [f"{ENCODER}.v_norm=rmsnorm"], "encoder.*.attn"),
    "gate": ("base", [f"{ENCODER}.gate=sigmoid_gate"], "encoder.*.attn"),
    "forget_gate": ("base", ["model.graph.decoder.layer.self.forget_gate=true"], "decoder.*.self"),
    "out_norm": ("base", [f"{ENCODER}.out_norm=layernorm"], "encoder.*.attn"),
    "inner_norm": ("base", ["model.graph.encoder.layer.ffn.inner_norm=layernorm"], "encoder.*.ffn"),
    "clip_qkv": ("base", [f"{ENCODER}.clip_qkv=3"], "encoder.*.attn"),
    "activation": ("base", [f"{ACTIVATION}=squared_relu"], "encoder.*.ffn"),
    "factor": ("rotary", [f"{ENCODER}.position={{block: rotary, factor: 2}}"], "encoder.*.attn"),
    "unknown_id": ("base", ["model.graph.src_emb.unknown_id=3"], "src_emb"),
    "groups": ("base", ["model.args.norm={block: rmsnorm, groups: 2}"], "encoder.*.attn"),
    "cross position": ("base", [f"{CROSS}.position=rotary"], "decoder.*.cross"),
    "does not cover the block moe": ("moe", [], "encoder.*.ffn"),
    "does not cover the block scalenorm": ("base", ["model.args.norm=scalenorm"], "encoder.*.attn"),
    "needs norm or attention after the position of the encoder": ("macaron", [], "encoder.*.ffn_in"),
    "kv is encoder.*.ffn": ("layer_to_layer", [], "decoder.*.cross"),
    "needs the block none if attention is rotary": ("base", [f"{ENCODER}.position=rotary"], "src_pos"),
    "needs the same heads in all layers": ("base", [f"{CROSS}.heads=2"], "decoder.*.cross"),
    "needs the same norm in the whole model": ("bart", ["model.graph.src_norm.eps=1.0e-3"], "encoder.*.attn"),
    "covers the add & norm pre or post": ("sandwich", [], "encoder.*.attn"),
    "adds the residual without a factor": ("deepnorm", [], "encoder.*.attn"),
    "the inputs are src, tgt, doc": ("two_sources", [], "inputs"),
    "the inputs are src": ("encoder_only", [], "inputs"),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_other_graphs_are_refused_by_node_with_the_rule(rule):
    model, overrides, address = REFUSED[rule]
    composed = compose_model(model, overrides)
    name = rule.removeprefix("cross ")
    with pytest.raises(RunError) as refused:
        read_engine_graph(check_model(composed.model, composed.sources), "run")
    text = f"needs {name}:" if " " not in name else name
    assert re.search(rf"^error: run: {re.escape(address)}: .*{re.escape(text)}", str(refused.value), re.MULTILINE)


def test_every_restricted_argument_has_a_case():
    restricted = {name for rules in table()["blocks"].values() for name in rules.get("only", {})}
    assert restricted | {f"cross {name}" for name in table()["cross"]} <= REFUSED.keys()


@pytest.mark.parametrize("block", table()["blocks"])
def test_the_table_lists_every_argument_of_its_blocks(block):
    rules = table()["blocks"][block]
    assert sorted([*rules["any"], *rules.get("only", {})]) == sorted(REGISTRY.blocks[block].arguments)


@pytest.fixture
def run(tmp_path):
    """Write the folder of an untrained run with a tokenizer of words."""
    tokenizer = Tokenizer.train(WORDS * 3, 300)
    tfm.save(tfm.build("base", **{**SIZES, "vocab": tokenizer.size}), tmp_path / "run", tokenizer=tokenizer)
    return tmp_path / "run"


@pytest.mark.grid
def test_the_command_writes_a_folder_with_a_certificate(run, tmp_path, capsys):
    pytest.importorskip("ctranslate2")
    (tmp_path / "text").write_text("a house\n\na boat\n")
    text = str(tmp_path / "text")
    command = ["export", str(run), "--to", "ctranslate2", "-o", str(tmp_path / "new")]
    main([*command, "--src", text, "--ref", text])
    assert "3 of 3 translations are equal" in capsys.readouterr().out
    certificate = json.loads((tmp_path / "new" / "certificate.json").read_text())
    assert certificate["quantization"] == "float32" and certificate["log_probabilities"]["largest"] < 1e-4
    assert certificate["translations"]["bleu"] == certificate["translations"]["bleu_of_run"]
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    with pytest.raises(SystemExit):
        main(command)
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "huggingface", "--quantization", "int8"], "--quantization: is an option of --to ctranslate2"),
        (["--to", "ctranslate2", "--ref", "FILE"], "--ref: needs as many lines as --src, but they have 1 and 0"),
        (["--to", "ctranslate2", "--src", "FILE", "--ref", os.devnull], "but they have 0 and 1"),
        (["--to", "ctranslate2", "--src", os.devnull], "--src: has no line"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, run, tmp_path, capsys):
    (tmp_path / "lines").write_text("a house\n")
    options = [str(tmp_path / "lines") if option == "FILE" else option for option in options]
    with pytest.raises(SystemExit):
        main(["export", str(run), *options, "-o", str(tmp_path / "new")])
    assert message in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_missing_library_is_reported_before_anything_is_written(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(RunError, match="the library is not installed"):
        export_to_ctranslate2(run, tmp_path / "new", "float32")
    assert not (tmp_path / "new").exists()


def test_an_empty_translation_is_compared_too(run, tmp_path):
    tokenizer = tfm.load(run).tokenizer
    network = tfm.build("marian", **{**SIZES, "vocab": tokenizer.size, "first_id": 1})
    with torch.no_grad():
        network.get_parameter("logits.block.bias")[Tokenizer.EOS - 1] += 20  # rows begin with id 1
    tfm.save(network, tmp_path / "silent", tokenizer=tokenizer)
    certificate = export_to_ctranslate2(tmp_path / "silent", tmp_path / "new", "float32", ["a house", "a boat"])
    assert tfm.load(tmp_path / "silent").translate(["a house"], beam=4) == [""]
    assert certificate.translations.equal == 2


def test_a_failed_export_leaves_no_folder(run, tmp_path):
    pytest.importorskip("ctranslate2")
    tokenizer = tfm.load(run).tokenizer
    network = tfm.build("bart", **{**SIZES, "vocab": tokenizer.size, "max_length": 30})
    tfm.save(network, tmp_path / "short", tokenizer=tokenizer)
    with pytest.raises(DataError, match="sentence 1: has"):
        export_to_ctranslate2(tmp_path / "short", tmp_path / "new", "float32", ["a house " * 40])
    assert not (tmp_path / "new").exists()
    export_to_ctranslate2(tmp_path / "short", tmp_path / "new", "float32", ["a house"])


@pytest.mark.grid
@pytest.mark.parametrize("name", ["bart", "marian", "gpt2"])
def test_imported_models_are_exported_with_the_subwords_of_their_tokenizer(name, tmp_path):
    pytest.importorskip("ctranslate2")
    publish(name, tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    text = ["w3 w4", "w20"] if name == "bart" else []  # 20 positions; padding and bos have no logit
    certificate = export_to_ctranslate2(tmp_path / "run", tmp_path / "new", "float32", text)
    assert certificate.log_probabilities.mean < 1e-5  # single tokens of bart differ by 1e-4
    assert name != "bart" or certificate.translations.equal == 2
    (vocabulary,) = (tmp_path / "new").glob("*vocabulary.json")
    assert {f"w{id}" for id in range(VOCAB)} <= {*json.loads(vocabulary.read_text())}


@pytest.mark.slow
def test_beam_search_translates_a_thousand_sentences_as_the_run_does(tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2")
    monkeypatch.chdir(tmp_path)
    knobs = ["heads=4", "layers=2", "d_model=64", "d_ff=128", "data.test=1000", "trainer.steps=300"]
    settings = ["trainer.validate_every=300", "schedule.warmup=150", "logger=csv"]
    run = tfm.train("base", overrides=[*knobs, *settings], name="dates").folder
    rows = [json.loads(line) for line in (run / "translations.jsonl").read_text().splitlines()]
    text = [row["source"] for row in rows], [row["reference"] for row in rows]
    exact = export_to_ctranslate2(run, tmp_path / "float32", "float32", *text).translations
    rounded = export_to_ctranslate2(run, tmp_path / "int8", "int8", *text).translations
    print(exact, rounded)
    assert (exact.sentences, exact.equal) == (1000, 1000) and exact.bleu == exact.bleu_of_run
    assert rounded.bleu_of_run == exact.bleu_of_run
    assert abs(rounded.bleu - exact.bleu) < 10  # 7 on a CPU without VNNI, 0.1 with it
