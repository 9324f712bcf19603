"""A saved model is restored unchanged, or the error names the problem."""

import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

import tfm_blocks as tfm
from tests.plugged import PLUGGED
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import RunError
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.matching import weights_of
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.runs.checkpoints import mean_weights
from tfm_blocks.runs.folder import claim_folder
from tfm_blocks.runs.model import read_network, write_model, write_tensors, write_weights

KNOBS = {"layers": 1, "vocab": 40, "d_model": 16, "d_ff": 8, "heads": 2}


@pytest.fixture
def folder(tmp_path):
    composed = compose_model("tiny", [f"{name}={value}" for name, value in KNOBS.items()])
    write_model(tmp_path, composed.model, [])
    write_weights(tmp_path, weights_of(tfm.build("tiny", **KNOBS, seed=5)))
    return tmp_path


def test_a_saved_network_loads_bit_equal(folder):
    written, read = tfm.build("tiny", **KNOBS, seed=5).eval(), read_network(folder)
    src_BS, tgt_BT = torch.randint(4, 40, (2, 5)), torch.randint(4, 40, (2, 3))
    assert torch.equal(written(src=src_BS, tgt=tgt_BT), read(src=src_BS, tgt=tgt_BT))


def test_a_tied_weight_is_stored_once_at_its_source(folder):
    names = load_file(folder / "weights.safetensors")
    assert "src_emb.block.weight" in names
    assert not any(name.startswith(("logits", "tgt_emb")) for name in names)


@pytest.fixture
def umask():
    """Set the umask of this process, and restore it afterwards."""
    before = os.umask(0)
    os.umask(before)
    yield os.umask
    os.umask(before)


@pytest.mark.skipif(os.name != "posix", reason="permissions are others elsewhere")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_weights_have_the_permissions_of_the_umask_each_time_they_are_written(tmp_path, umask, mask, mode):
    umask(mask)
    for _ in range(2):
        write_weights(tmp_path, {"x": torch.zeros(3)})
        assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [mode]


def damage_json(folder):
    (folder / "model.json").write_text('{"format": 1, "mod')


def future_format(folder):
    record = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**record, "format": 99}))


def foreign_block(folder):
    record = json.loads((folder / "model.json").read_text())
    record["model"]["graph"]["src_pos"] = {"block": "os.system"}
    (folder / "model.json").write_text(json.dumps(record))


def truncate_weights(folder):
    weights = folder / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])


def drop_a_weight(folder):
    tensors = load_file(folder / "weights.safetensors")
    del tensors["encoder.0.ffn.block.out.bias"]
    save_file(tensors, folder / "weights.safetensors")


def other_shape(folder):
    tensors = load_file(folder / "weights.safetensors")
    tensors["encoder.0.ffn.block.out.bias"] = torch.zeros(3)
    save_file(tensors, folder / "weights.safetensors")


def not_a_number(folder):
    tensors = load_file(folder / "weights.safetensors")
    tensors["encoder.0.ffn.block.out.bias"][1] = torch.nan
    save_file(tensors, folder / "weights.safetensors")


def beyond_all_memory(folder):
    text = (folder / "model.json").read_text()
    (folder / "model.json").write_text(text.replace('"vocab": 40', f'"vocab": {2**34}'))


def a_pickle(folder):
    torch.save({"x": torch.zeros(3)}, folder / "weights.safetensors")


def needs_a_plugin(folder):
    record = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**record, "plugins": ["antigravity"]}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_json, "model.json: is damaged"),
        (future_format, "has the format 99, but this version reads 1"),
        (foreign_block, "no block is called 'os.system'"),
        (truncate_weights, "weights.safetensors: is damaged"),
        (drop_a_weight, "has no weights for encoder.0.ffn.block.out.bias"),
        (other_shape, r"has the shape \[3\], but the model has \[16\]"),
        (not_a_number, "out.bias is damaged: it does not hold finite numbers"),
        (beyond_all_memory, r"src_emb.block.weight has the shape \[40, 16\], but the model has \[17179869184, 16\]"),
        (a_pickle, "weights.safetensors: is damaged"),
        (needs_a_plugin, "plug-in 'antigravity'"),
        (lambda folder: (folder / "model.json").unlink(), "model.json: the file is missing"),
        (lambda folder: (folder / "weights.safetensors").unlink(), "training did not finish"),
    ],
)
def test_a_damaged_or_foreign_folder_is_an_error(folder, damage, message):
    damage(folder)
    with pytest.raises(RunError, match=message):
        read_network(folder)


def test_no_run_writes_into_the_folder_of_another(tmp_path):
    assert [claim_folder(tmp_path, "x").name for _ in range(3)] == ["x", "x-2", "x-3"]


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Return the folder and network of a model with a persistent integer buffer."""
    monkeypatch.setattr(REGISTRY, "blocks", {**REGISTRY.blocks, **PLUGGED})
    graph = {"node": {"block": "counted", "in": "x"}, "out": {"block": "linear", "d_out": 3}}
    model = {"inputs": {"x": "B T 4"}, "graph": graph}
    network = build_network(check_model(model), seed=1).eval()
    network["node"].block.rising += 5
    write_model(tmp_path, model, [])
    return tmp_path, network


def test_persistent_buffers_are_loaded_and_others_are_created(counted):
    folder, network = counted
    write_weights(folder, weights_of(network))
    assert set(load_file(folder / "weights.safetensors")) == {
        "node.block.rising", "out.block.weight", "out.block.bias",
    }  # fmt: skip
    read = read_network(folder)
    assert torch.equal(read.get_buffer("node.block.rising"), torch.arange(4) + 5)
    x_BTD = torch.randn(2, 3, 4)
    assert torch.equal(read(x=x_BTD), network(x=x_BTD))


def test_a_buffer_of_another_kind_is_damaged(counted):
    folder, network = counted
    tensors = weights_of(network)
    write_weights(folder, {**tensors, "node.block.rising": tensors["node.block.rising"].float()})
    with pytest.raises(RunError, match=r"node.block.rising is damaged"):
        read_network(folder)


def test_averaging_keeps_integer_buffers_of_the_newest_file(counted):
    folder, network = counted
    files = [folder / "a.safetensors", folder / "b.safetensors"]
    for file in files:
        write_tensors(file, weights_of(network))
        network["node"].block.rising += 3
        with torch.no_grad():
            network["out"].block.bias += 1
    mean = mean_weights(files)
    assert torch.equal(mean["node.block.rising"], torch.arange(4) + 8)
    torch.testing.assert_close(mean["out.block.bias"], torch.full((3,), 0.5))
