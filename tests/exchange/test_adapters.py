"""Adapters of imported models: the numbers of peft, and their ways out of a run."""

import json
import shutil
from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

import tfm_blocks as tfm
from tests.exchange.doors import door
from tests.exchange.published import VOCAB
from tests.exchange.test_import import (
    far_apart,
    imported,
    logits_of_both,
    logits_of_encoders,
    own_ids,
    random_ids,
)
from tfm_blocks.cli import main
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.exchange.adapters import export_to_peft, merge_run
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.network.adapters import merge_adapters
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.matching import fill, saved_weights, weights_of
from tfm_blocks.runs.folder import WEIGHTS
from tfm_blocks.runs.model import find_base, write_model, write_weights
from tfm_blocks.runs.records import SavedModel

ADAPT = {
    "attention": {"where": {"block": "attention"}, "rank": 3, "alpha": 6},
    "rest": {"where": {"role": "matrix"}, "rank": 2, "alpha": 3, "scaling": "rslora"},
}


def adapted(network, folder, adapt=ADAPT):
    """Write a run whose adapters of the network of `folder`/run are random, and return its network."""
    spec = check_model({**network.spec.mapping, "adapt": adapt})
    ours = build_network(spec, seed=3)
    fill(ours, weights_of(network))
    generator = torch.Generator().manual_seed(5)
    for tensor in saved_weights(ours).values():
        torch.nn.init.normal_(tensor, std=0.1, generator=generator)
    run, base = folder / "adapters", folder / "run"
    shutil.copytree(base, run, ignore=shutil.ignore_patterns("*.safetensors"))
    saved = SavedModel.read(base)
    write_model(run, spec.mapping, saved.plugins, saved.columns, find_base(spec, base))
    write_weights(run, saved_weights(ours))
    return ours, run


def relative(actual, expected):
    """Return the norm of the difference by the norm of the expected values; logits of -inf count as 0."""
    actual, expected = (one.nan_to_num(neginf=0) for one in (actual, expected))
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.grid) for name in ("llama", "t5", "marian"))]
)
def test_logits_and_gradients_equal_those_of_peft(name, tmp_path):
    theirs, translator = imported(name, tmp_path)
    ours, run = adapted(translator.network, tmp_path)
    export_to_peft(run, tmp_path / "peft")
    wrapped = PeftModel.from_pretrained(theirs, tmp_path / "peft", is_trainable=True).eval().double()
    ours.double()  # float32 rounds gradients of llama to 1e-5
    src_BS, tgt_BT = random_ids(3, 7), random_ids(3, 5, 1)
    order = own_ids(translator, torch.arange(VOCAB)[None])[0]
    if translator.inputs:
        expected = wrapped(input_ids=src_BS, decoder_input_ids=tgt_BT).logits
        logits_BTV = ours.eval()(src=own_ids(translator, src_BS), tgt=own_ids(translator, tgt_BT))
    else:
        expected = wrapped(input_ids=tgt_BT).logits
        logits_BTV = ours.eval()(tgt=own_ids(translator, tgt_BT))
    logits_BTV = logits_BTV[..., order]
    assert far_apart(logits_BTV, expected) < 1e-5
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7))
    (logits_BTV * direction).nansum().backward()
    (expected * direction).sum().backward()
    gradients = {name: ours.get_parameter(name).grad for name in saved_weights(ours)}
    assert all(parameter.grad is None for name, parameter in ours.named_parameters() if name not in gradients)
    write_weights(run, gradients)
    export_to_peft(run, tmp_path / "gradients")
    stored, matrices = load_file(tmp_path / "gradients" / "adapter_model.safetensors"), dict(wrapped.named_parameters())
    weights = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    for key, gradient in stored.items():
        theirs_grad = matrices[key.replace(".weight", ".default.weight")].grad
        counted = theirs_grad if "lora_A" in key else theirs_grad * (weights[key] != 0)  # B of several maps has blocks
        assert relative(gradient, counted) < (1e-4 if name == "t5" else 1e-5), key  # its norms are in float32


def test_adapters_of_an_encoder_are_loaded_by_peft(tmp_path):
    theirs = door("distilbert", tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    encoder = tfm.load(tmp_path / "run")
    ours, run = adapted(encoder.network, tmp_path)
    export_to_peft(run, tmp_path / "peft")
    wrapped = PeftModel.from_pretrained(theirs, tmp_path / "peft").eval()
    wrapped.config = theirs.config
    encoder.network = ours.eval()
    with torch.no_grad():
        assert far_apart(*logits_of_encoders(wrapped, encoder)) < 1e-5


@pytest.mark.parametrize("name", ["llama", pytest.param("marian", marks=pytest.mark.grid)])
def test_adapters_of_some_parts_of_an_attention_leave_the_others_to_the_base(name, tmp_path):
    theirs, translator = imported(name, tmp_path)
    group = {"where": {"block": "attention"}, "rank": 2, "alpha": 4, "parts": ["q", "v"]}
    ours, run = adapted(translator.network, tmp_path, {"some": group})
    export_to_peft(run, tmp_path / "peft")
    wrapped = PeftModel.from_pretrained(theirs, tmp_path / "peft").eval()
    assert not any("k_proj.lora" in name for name, _ in wrapped.named_parameters())
    translator.network = ours.eval()
    with torch.no_grad():  # Marian's sinusoids are rounded differently: 2e-6 in float64, 1.5e-5 in float32
        assert far_apart(*logits_of_both(wrapped, translator)) < 3e-5


def test_a_fused_map_has_the_adapter_of_peft_if_its_parts_share_a(tmp_path):
    theirs, translator = imported("gpt2", tmp_path)
    group = {"where": {"block": "attention"}, "rank": 2, "alpha": 4, "parts": ["q", "k", "v"]}
    ours, _ = adapted(translator.network, tmp_path, {"qkv": group})
    a_RI = torch.randn(2, ours.get_submodule("decoder.0.self.block.qkv").in_features)
    with torch.no_grad():
        for name, tensor in saved_weights(ours).items():
            if name.endswith(".a"):
                tensor.copy_(a_RI.repeat(3, 1))
    wrapped = get_peft_model(
        theirs, LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True)
    ).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                layer = name.split(".h.")[1][0]
                b = saved_weights(ours)[f"decoder.{layer}.self.block.qkv.adapter.b"]
                parameter.copy_(a_RI if "lora_A" in name else b)
    translator.network = ours.eval()
    logits_BTV, expected = logits_of_both(wrapped, translator)
    assert far_apart(logits_BTV, expected) < 1e-5


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.grid) for name in ("t5", "mixtral", "deepseek_v2"))]
)
def test_a_merged_run_has_the_logits_of_its_adapters_and_is_exported(name, tmp_path):
    _, translator = imported(name, tmp_path)
    ours, run = adapted(
        translator.network,
        tmp_path,
        {"all": {"where": {"role": ["matrix", "experts", "router"]}, "rank": 2, "alpha": 4}},
    )
    translator.network, before = ours.eval(), translator.network
    loaded = tfm.load(run)
    merge_run(run, tmp_path / "merged")
    merged = tfm.load(tmp_path / "merged")
    ids = {name: own_ids(translator, random_ids(3, 7)) for name in (*translator.inputs, "tgt")}
    with torch.no_grad():
        expected = ours(**ids)
        for network in (loaded.network, merged.network):
            assert relative(network(**ids), expected) < 1e-5
        wide = deepcopy(ours).double()
        assert relative(merge_adapters(deepcopy(wide))(**ids), wide(**ids)) < 1e-6
        assert relative(before(**ids), expected) > 1e-3
    assert "adapt" not in SavedModel.read(tmp_path / "merged").model
    assert (run / WEIGHTS).stat().st_size < (tmp_path / "run" / WEIGHTS).stat().st_size
    export_run(run, tmp_path / "published")  # compares with transformers
    export_run(tmp_path / "merged", tmp_path / "again")
    assert (
        load_file(tmp_path / "published" / "model.safetensors").keys()
        == load_file(tmp_path / "again" / "model.safetensors").keys()
    )


def test_a_missing_or_changed_base_is_an_error_and_a_moved_one_is_found(tmp_path, capsys):
    _, translator = imported("gpt2", tmp_path)
    _, run = adapted(translator.network, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for name in ("run", "adapters"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    run, base = tmp_path / "elsewhere" / "adapters", tmp_path / "elsewhere" / "run"
    tfm.load(run)
    weights = {name: tensor + 1e-3 for name, tensor in load_file(base / WEIGHTS).items()}
    write_weights(base, weights)
    with pytest.raises(RunError, match=r"trained on weights that differ from the current weights of .*elsewhere/run"):
        tfm.load(run)
    shutil.rmtree(base)
    with pytest.raises(SystemExit, match="1"):
        main(["merge", str(run), "-o", str(tmp_path / "merged")])
    assert "its adapters change the weights of" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_only_runs_of_adapters_of_a_family_become_folders_of_peft(tmp_path):
    imported("gpt2", tmp_path)
    with pytest.raises(ConfigError, match="no adapters, so there is no adapter to write"):
        export_to_peft(tmp_path / "run", tmp_path / "peft")
    with pytest.raises(ConfigError, match="no adapters, so nothing is merged"):
        merge_run(tmp_path / "run", tmp_path / "merged")


def test_the_one_dropout_of_peft_is_a_warning_if_the_adapters_have_several(tmp_path, capsys):
    _, translator = imported("gpt2", tmp_path)
    adapt = {
        name: {**part, "dropout": dropout} for (name, part), dropout in zip(ADAPT.items(), (0.1, 0.2), strict=True)
    }
    _, run = adapted(translator.network, tmp_path, adapt)
    export_to_peft(run, tmp_path / "peft")
    assert "have the dropouts 0.1, 0.2, but peft's folder has one" in capsys.readouterr().err
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["lora_dropout"] == 0.2


@pytest.mark.parametrize(
    ("name", "adapted_nodes"),
    [
        pytest.param("qwen3_next", "decoder.ffn", marks=pytest.mark.grid),
        pytest.param("glm4_moe", "decoder.ffn", marks=pytest.mark.grid),
        ("deepseek_v3", "decoder.ffn"),
        pytest.param("kimi_linear", "decoder.self", marks=pytest.mark.grid),
    ],
)
def test_modules_that_peft_takes_for_others_are_refused(name, adapted_nodes, tmp_path):
    door(name, tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    group = {"where": {"role": "matrix", "node": adapted_nodes}, "rank": 2, "alpha": 4}
    _, run = adapted(tfm.load(tmp_path / "run").network, tmp_path, {"some": group})
    with pytest.raises(ConfigError, match=f"in {name} as one of experts, or does not find the module"):
        export_to_peft(run, tmp_path / "peft")
    assert not (tmp_path / "peft").exists()


@pytest.mark.grid
def test_peft_refuses_experts(tmp_path):
    _, translator = imported("mixtral", tmp_path)
    _, run = adapted(translator.network, tmp_path, {"experts": {"where": {"role": "experts"}, "rank": 2, "alpha": 4}})
    with pytest.raises(ConfigError, match="is of experts, which peft's folder cannot express"):
        export_to_peft(run, tmp_path / "peft")
