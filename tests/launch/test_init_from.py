"""Initial weights from another run."""

import pytest
import torch

import tfm_blocks as tfm
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import RunError
from tfm_blocks.launch.init_from import load_matching_weights
from tfm_blocks.network.matching import weights_of
from tfm_blocks.runs.model import write_weights

KNOBS = {"d_model": 16, "d_ff": 8, "heads": 2, "model.graph.logits.out_bias": True}


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


def test_a_run_without_weights_is_an_error(tmp_path):
    pieces = tokenizer("a")
    network = tfm.build("tiny", **KNOBS, layers=1, vocab=pieces.size)
    with pytest.raises(RunError, match="has no weights of a validation"):
        load_matching_weights(network, pieces, tmp_path)
