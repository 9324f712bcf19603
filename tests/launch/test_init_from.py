"""Initial weights from another run."""

from pathlib import Path

import pytest
import torch

import tfm_blocks as tfm
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import RunError
from tfm_blocks.launch.init_from import expect_base, expect_source, load_matching_weights
from tfm_blocks.network.matching import weights_of
from tfm_blocks.runs.model import write_model, write_weights
from tfm_blocks.runs.records import Status

KNOBS = {"d_model": 16, "d_ff": 8, "heads": 2, "model.graph.logits.out_bias": True}
NGRAMS = str(Path(__file__).parents[1] / "models" / "ngrams.yaml")


def tokenizer(*words):
    return Tokenizer.train([" ".join(words)] * 9, 300)


@pytest.fixture
def run(tmp_path):
    """Return a run of two layers with its own vocabulary, and its weights."""
    pieces = tokenizer("haus", "hund", "katze")
    network = tfm.build("tiny", **KNOBS, layers=2, vocab=pieces.size, seed=5)
    torch.nn.init.normal_(weights_of(network)["logits.block.bias"])
    write_weights(tmp_path, weights_of(network))
    pieces.save(tmp_path / "tokenizer.json")
    return tmp_path, pieces, weights_of(network)


def test_the_same_model_and_vocabulary_load_all_weights(run):
    folder, pieces, weights = run
    network = tfm.build("tiny", **KNOBS, layers=2, vocab=pieces.size, seed=1)
    start = load_matching_weights(network, pieces, folder)
    assert (sorted(start.loaded), start.new, start.unused, start.subwords) == (sorted(weights), [], [], pieces.size)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(network).items())


def test_a_larger_model_loads_shared_weights_and_lists_the_others(run):
    folder, pieces, weights = run
    network = tfm.build("prenorm", **KNOBS, layers=3, vocab=pieces.size, seed=1)
    before = {name: tensor.clone() for name, tensor in weights_of(network).items()}
    start = load_matching_weights(network, pieces, folder)
    assert "encoder.1.attn.block.qkv.weight" in start.loaded
    assert "encoder.2.attn.block.qkv.weight" in start.new and "encoder.last.norm.weight" in start.new
    assert set(start.loaded) | set(start.new) == set(before) and set(start.unused) == set(weights) - set(start.loaded)
    for name, tensor in weights_of(network).items():
        assert torch.equal(tensor, weights[name] if name in start.loaded else before[name])
    assert "init: new: encoder.last.norm.weight" in str(start)


def test_weights_of_a_run_that_is_trained_for_longer_are_a_warning(run, capsys, monkeypatch):
    folder, pieces, _ = run
    spec = tfm.build("tiny", **KNOBS, layers=2, vocab=pieces.size).spec
    write_model(folder, spec.mapping, [])
    for state, warning in (("done", ""), ("preempted", "its weights are from before that")):
        Status(state).write(folder)
        expect_source(spec, folder)
        assert bool(said := capsys.readouterr().err) == bool(warning) and warning in said
    for variables in ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1"}, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}):
        with monkeypatch.context() as changed:
            for name, value in variables.items():
                changed.setenv(name, value)
            expect_source(spec, folder)
        assert not capsys.readouterr().err, "rank 0 prints it"


@pytest.mark.parametrize("words", [("hund", "vogel", "katzen"), ("hund", "haus", "katze")], ids=["size", "order"])
def test_tokens_in_both_vocabularies_keep_their_rows_and_biases(run, words):
    """The vocabulary has another size, or the same subwords with other ids."""
    folder, old, weights = run
    new = tokenizer(*words)
    assert new.ids != old.ids
    network = tfm.build("tiny", **KNOBS, layers=2, vocab=new.size, seed=1)
    before = {name: one.clone() for name, one in weights_of(network).items() if one.shape[0] == new.size}
    assert before.keys() == {"src_emb.block.weight", "logits.block.bias"}
    start = load_matching_weights(network, new, folder)
    assert 260 <= start.subwords < new.size and start.new == []
    for table in before:
        for piece, row in new.ids.items():
            expected = weights[table][old.ids[piece]] if piece in old.ids else before[table][row]
            assert torch.equal(weights_of(network)[table][row], expected)


@pytest.mark.parametrize(
    ("words", "changed", "is_loaded"),
    [("haus hund", {}, True), ("haus hund", {"seed": 1}, False), ("hund haus", {}, False), ("haus hund", {"vocab": 900}, False)],
)  # fmt: skip
def test_tables_of_ngrams_are_loaded_if_ids_and_hash_functions_are_equal(tmp_path, words, changed, is_loaded):
    old, new = tokenizer("haus", "hund"), tokenizer(*words.split())
    sizes = {"d_model": 16, "d_ff": 8, "heads": 2, "layers": 1, "vocab": old.size}
    network = tfm.build(NGRAMS, **sizes)
    write_weights(tmp_path, weights_of(network))
    write_model(tmp_path, network.spec.mapping, [])
    old.save(tmp_path / "tokenizer.json")
    knobs = {f"model.graph.ngrams.{name}": value for name, value in changed.items()}
    start = load_matching_weights(tfm.build(NGRAMS, **sizes, **knobs), new, tmp_path)
    table = "ngrams.block.weight"
    assert (table in start.loaded, table in start.new, table in start.unused) == (
        is_loaded,
        not is_loaded,
        not is_loaded,
    )


def test_adapters_need_the_same_hash_functions(tmp_path):
    sizes = {"d_model": 16, "d_ff": 8, "heads": 2, "layers": 1, "vocab": 300}
    write_model(tmp_path, tfm.build(NGRAMS, **sizes).spec.mapping, [])
    adapt = {"where": {"role": "matrix"}, "rank": 2, "alpha": 2}
    spec = tfm.build(NGRAMS, **sizes, **{"model.graph.ngrams.vocab": 900, "model.adapt.a": adapt}).spec
    with pytest.raises(RunError, match="vocab of ngrams: 300 → 900"):
        expect_base(spec, tokenizer("a"), str(tmp_path))


@pytest.mark.parametrize("experts", [4, 3])
def test_tokens_in_both_vocabularies_keep_their_experts_if_these_are_loaded(tmp_path, experts):
    old, new = tokenizer("haus", "hund", "katze"), tokenizer("hund", "haus", "katze")
    own = f"{Path(__file__).parents[1]}/models/hashed_experts.yaml"
    sizes = {"d_model": 16, "d_ff": 8, "heads": 2, "layers": 1, "vocab": old.size}
    saved = weights_of(tfm.build(own, **sizes, seed=5))
    write_weights(tmp_path, saved)
    old.save(tmp_path / "tokenizer.json")
    network = tfm.build(own, **sizes, **{"model.graph.encoder.layer.ffn.experts": experts}, seed=1)
    table, before_VK = "encoder.0.ffn.block.experts_VK", saved["encoder.0.ffn.block.experts_VK"].clone()
    start = load_matching_weights(network, new, tmp_path)
    assert new.size == old.size and new.ids != old.ids and (table in start.loaded) == (experts == 4)
    own_VK = weights_of(network)[table]
    assert own_VK.max() < experts
    if experts == 4:
        for piece in new.ids.keys() & old.ids.keys():
            assert torch.equal(own_VK[new.ids[piece]], before_VK[old.ids[piece]])


def test_a_run_without_weights_is_an_error(tmp_path):
    pieces = tokenizer("a")
    network = tfm.build("tiny", **KNOBS, layers=1, vocab=pieces.size)
    with pytest.raises(RunError, match="has no weights of a validation"):
        load_matching_weights(network, pieces, tmp_path)
