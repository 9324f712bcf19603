"""Families that are only doors: equal logits, equal greedy output, the same bytes back, and errors by key."""

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tfm_blocks as tfm
from tests.exchange.doors import DOORS, config_of, door, sizes_of
from tests.exchange.layouts import change_config, change_weights, of_current_names
from tests.exchange.published import write_tokenizer
from tests.exchange.test_import import far_apart, files_of, logits_of_both, logits_of_encoders
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.vocabulary import OwnVocabulary
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.exchange.config import read_published, with_knobs, write_published
from tfm_blocks.exchange.exporting import export_run, find_published
from tfm_blocks.exchange.family import families, is_shipped
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.exchange.weights import names_pattern
from tfm_blocks.network.build import check_model
from tfm_blocks.translation.settings import Search

TOKENS = 20
QUICK = ("mistral", "gpt_neox", *(families().keys() - DOORS.keys()))
MARKED = {name: pytest.param(name, marks=[] if name in QUICK else [pytest.mark.grid]) for name in families()}
each_family = pytest.mark.parametrize("name", [MARKED[name] for name in DOORS])


def greedy_of_both(theirs, translator):
    """Return the words of 20 tokens of greedy search, ours and theirs."""
    text, ids = "w3 w4 w7", [3, 4, 7]
    if translator.inputs:
        (ours,) = translator.translate([text], longest=(0.0, TOKENS))
        read = torch.tensor([[*ids, *[theirs.config.eos_token_id] * translator.conventions.adds_eos]])
    else:
        ((best,),) = translator.generate([text], TOKENS, Search())
        ours, read = best.text, torch.tensor([ids])
    options = {"attention_mask": torch.ones_like(read), "max_new_tokens": TOKENS, "do_sample": False}
    out = theirs.generate(read, **options)[0, 1 if translator.inputs else read.shape[1] :].tolist()
    eos = theirs.config.eos_token_id
    out = out[: out.index(eos)] if eos in out else out
    return ours.split(), [f"w{id}" for id in out if id != translator.tokenizer.vocabulary.start]


@torch.compiler.set_stance("force_eager")  # the layers of BitNet are compiled
@each_family
def test_a_folder_becomes_a_run_of_equal_outputs_and_the_same_folder_again(name, tmp_path):
    theirs = door(name, tmp_path / "theirs")
    assert import_folder(tmp_path / "theirs", tmp_path / "run").family == name
    ours = tfm.load(tmp_path / "run")
    if families()[name].encoder:
        assert far_apart(*logits_of_encoders(theirs, ours)) < 1e-5
    else:
        assert far_apart(*logits_of_both(theirs, ours, least=3)) < 1e-5  # M2M100 counts no position of padding
        words, expected = greedy_of_both(theirs, ours)
        assert words == expected
    export_run(tmp_path / "run", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "theirs")


@pytest.mark.parametrize("name", MARKED.values())
def test_a_missing_key_has_the_default_of_its_class(name):
    """The keys that the class of transformers would set, and a config without them, give the same model or errors."""
    family, config = families()[name], getattr(transformers, families()[name].architecture).config_class
    whole, outcomes = json.loads(config().to_json_string(use_diff=False)), []
    if name == "t5_v1_1":  # the class has the defaults of version 1.0
        whole |= {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True}
    for content in (whole, {"model_type": whole["model_type"]}):
        try:
            published = read_published(family, content, {}, 10**6, "config.json")
            outcomes.append((published.knobs, published.vocabulary))
        except RunError as error:
            outcomes.append(sorted(str(error).replace("None", "missing").splitlines()))
    assert outcomes[0] == outcomes[1]


def other(value):
    """Return a value of the same kind that differs."""
    if isinstance(value, bool) or value is None:
        return not value
    return [*value, "other"] if isinstance(value, list) else value + (1 if isinstance(value, int | float) else "_other")


@each_family
def test_values_that_the_blocks_cannot_express_are_refused_by_key_with_a_fix(name):
    family, config = families()[name], sizes_of(name)
    read_published(family, config, {}, 10**6, "config.json")
    for key, value in [*family.fixed.items(), ("another_feature", 7)]:
        changed = json.loads(json.dumps(config))
        if key == "attention_layers":  # of GPT-Neo, whose class computes it from attention_types
            changed.pop("attention_types", None)
        *outer, inner = key.split(".")
        place = changed
        for part in outer:
            place = place.setdefault(part, {}) if isinstance(place.get(part), dict | None) else {}
        place[inner] = other(value)
        with pytest.raises(RunError) as error:
            read_published(family, changed, {}, 10**6, "config.json")
        text = str(error.value)
        assert f"config.json: {key}: " in text and "help: " in text, text


@pytest.mark.parametrize(
    ("name", "key", "value", "without"),
    [
        ("dbrx", "ffn_config.moe_normalize_expert_weights", None, ""),  # its weights of experts are not normalised
        ("deepseek_v3", "norm_topk_prob", None, ""),
        ("camembert", "is_decoder", True, ""),
        ("deberta_v3", "pos_att_type", ["p2c"], ""),
        ("deberta_v3", "pos_att_type", None, ""),
        ("deberta_v3", "share_att_key", None, ""),
        ("gemma3", "sliding_window_pattern", 3, "layer_types"),
        ("cohere2", "sliding_window_pattern", 3, "layer_types"),
        ("gpt_neo", "attention_types", [[["global"], 3]], "attention_layers"),
        ("gpt_neo", "attention_types", 7, "attention_layers"),
        ("gemma", "hidden_act", "relu", ""),
        ("lfm2", "layer_types", ["conv", "other", "conv"], ""),
        ("deepseek_v32", "layer_types", [], ""),
        ("lfm2", "layer_types", ["conv"], ""),
        ("bamba", "attn_layer_indices", [3], ""),
        ("kimi_linear", "linear_attn_config.full_attn_layers", [7], "layer_types"),
        ("bamba", "time_step_limit", [0.1, 1.0], ""),
        ("xlstm", "hidden_size", 64, ""),  # not the embedding_dim
        ("xlstm", "num_hidden_layers", 3, ""),  # not the num_blocks
        ("gemma3n", "intermediate_size", [28] * 9, ""),
        ("gemma3n", "activation_sparsity_pattern", "0.95", ""),
        ("gemma3n", "final_logit_softcapping", None, ""),
        ("gemma3n", "num_kv_shared_layers", 0, ""),
    ],
)
def test_a_value_that_changes_the_model_of_transformers_is_refused(name, key, value, without):
    config = json.loads(json.dumps(sizes_of(name)))
    config.pop(without, None)
    *outer, inner = key.split(".")
    place = config
    for part in outer:
        place = place.setdefault(part, {})
    place[inner] = value
    with pytest.raises(RunError) as error:
        read_published(families()[name], config, {}, 10**6, "config.json")
    assert f"config.json: {'attention_layers' if name == 'gpt_neo' else key}: " in str(error.value)


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_gemma_2_without_one_of_its_caps_is_refused(key):
    read_published(families()["gemma2"], {"model_type": "gemma2"}, {}, 10**6, "config.json")
    with pytest.raises(RunError) as error:
        read_published(families()["gemma2"], {"model_type": "gemma2", key: None}, {}, 10**6, "config.json")
    assert f"config.json: {key}: " in str(error.value)


@pytest.mark.parametrize(
    ("name", "key", "value", "without"),
    [
        ("deberta_v3", "pos_att_type", "p2c|c2p", ""),
        ("gemma3", "sliding_window_pattern", 6, "layer_types"),
        ("exaone4", "sliding_window_pattern", "LLLG", ""),  # layer_types decides
        ("gpt_neo", "attention_types", [[["global", "local"], 2]], "attention_layers"),
        ("lfm2", "full_attn_idxs", [1], "layer_types"),
        ("bamba", "time_step_limit", [0.0, float("inf")], ""),  # before transformers 5
        ("kimi_linear", "linear_attn_config", {"full_attn_layers": [5], "kda_layers": [1, 2, 3, 4, 6]}, "layer_types"),
        ("kimi_linear", "first_k_dense_replace", 1, "mlp_layer_types"),
        ("xlstm", "embedding_dim", 32, "hidden_size"),  # as published
        ("xlstm", "num_blocks", 2, "num_hidden_layers"),
        ("gemma", "hidden_act", "gelu", ""),  # the first releases wrote it, and transformers reads gelu_pytorch_tanh
    ],
)
def test_another_spelling_of_the_same_model_is_read(name, key, value, without):
    config = {**sizes_of(name), key: value}
    config.pop(without, None)
    expected = read_published(families()[name], sizes_of(name), {}, 10**6, "config.json")
    assert read_published(families()[name], config, {}, 10**6, "config.json") == expected


def test_gpt_neo_states_the_kinds_of_its_layers_as_its_class_reads_them():
    sizes = ["d_model=16", "heads=2", "layers=3", "vocab=30", "d_ff=64", "max_length=8"]
    composed = compose_model("gpt_neo", sizes)
    published = find_published(check_model(composed.model, composed.sources), composed.mapping, OwnVocabulary(30, 1, 2))
    written = write_published(published)
    assert transformers.GPTNeoConfig.from_dict(written).attention_layers == ["global", "local", "global"]
    deeper = replace(published, knobs={**published.knobs, "layers": 4})
    changed = with_knobs(written, published, deeper)
    assert transformers.GPTNeoConfig.from_dict(changed).attention_layers == ["global", "local"] * 2


def test_the_layers_of_lfm2_follow_the_number_of_layers():
    sizes = ["d_model=16", "heads=2", "kv_heads=1", "vocab=30", "d_ff=256", "layers=7"]
    composed = compose_model("lfm2", sizes)
    published = find_published(check_model(composed.model, composed.sources), composed.mapping, OwnVocabulary(30, 1, 2))
    written = write_published(published)
    assert [kind == "full_attention" for kind in written["layer_types"]] == [index in (2, 5) for index in range(7)]
    assert transformers.Lfm2Config.from_dict(written).layer_types == written["layer_types"]
    deeper = replace(published, knobs={**published.knobs, "layers": 12})
    changed = with_knobs(written, published, deeper)
    assert [index for index, kind in enumerate(changed["layer_types"]) if kind != "conv"] == [2, 5, 8, 10]


@pytest.mark.parametrize(("layers", "shared"), [(35, 15), (30, 10), (10, 5), (11, 5), (12, 5), (13, 7), (9, 4), (6, 1)])
def test_shared_layers_of_gemma_3n_read_the_layers_that_transformers_reads(layers, shared):
    knobs = [
        "d_model=16",
        "heads=2",
        "kv_heads=1",
        "d_head=4",
        "vocab=30",
        "d_ff=8",
        f"layers={layers}",
        f"kv_shared={shared}",
    ]
    composed = compose_model("gemma3n", knobs)
    nodes = {node.address: node for node in check_model(composed.model, composed.sources).nodes}
    kinds = ["full_attention" if layer % 5 == 4 else "sliding_attention" for layer in range(layers)]
    source = {kinds[layer]: layer for layer in range(layers - shared)}  # the last one of each kind
    for layer, kind in enumerate(kinds):
        attention = nodes[f"decoder.{layer}.self"]
        is_full = kind == "full_attention"
        assert attention.block == ("shared_attention" if is_full else "restricted_shared_attention")
        assert attention.arguments["position"].arguments["base"] == (1e6 if is_full else 1e4)
        read = layer if layer < layers - shared else source[kind]
        assert attention.reads["k"] == (f"decoder.{read}.key",) and attention.reads["v"] == (f"decoder.{read}.value",)
        assert (f"decoder.{layer}.key" in nodes) == (read == layer)


def test_equal_numbers_of_all_layers_of_gemma_3n_are_one_number():
    config = {**sizes_of("gemma3n"), "intermediate_size": [28] * 10, "activation_sparsity_pattern": [0.5] + [0] * 9}
    published = read_published(families()["gemma3n"], config, {}, 10**6, "config.json")
    assert published.knobs["d_ff"] == 28 and published.knobs["sparsity"] == "0.5 0 0 0 0 0 0 0 0 0"
    written = write_published(published)
    assert written["intermediate_size"] == [28] * 10
    assert written["activation_sparsity_pattern"] == config["activation_sparsity_pattern"]


def test_gpt_bigcode_with_one_head_of_keys_for_each_query_has_equal_logits(tmp_path, monkeypatch):
    monkeypatch.setitem(DOORS, "gpt_bigcode", {"n_inner": 28, "multi_query": False})
    theirs = door("gpt_bigcode", tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    assert far_apart(*logits_of_both(theirs, tfm.load(tmp_path / "run"))) < 1e-5
    export_run(tmp_path / "run", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "theirs")


def test_a_mamba_2_with_bounded_steps_has_equal_logits(tmp_path, monkeypatch):
    monkeypatch.setitem(DOORS, "mamba2", {**DOORS["mamba2"], "time_step_limit": (0.0, 0.7)})
    theirs = door("mamba2", tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    assert far_apart(*logits_of_both(theirs, tfm.load(tmp_path / "run"))) < 1e-5


def test_whisper_with_an_encoder_has_the_logits_of_its_decoder_and_keeps_the_other_tensors(tmp_path):
    torch.manual_seed(1)
    whole = transformers.WhisperForConditionalGeneration(config_of("whisper")).eval()
    whole.save_pretrained(tmp_path / "theirs")
    write_tokenizer(tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    theirs = transformers.WhisperForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert far_apart(*logits_of_both(theirs, tfm.load(tmp_path / "run"))) < 1e-5
    export_run(tmp_path / "run", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "theirs")


def of_kimi(folder, theirs):
    """Write the names and the keys of the published Kimi Linear, which transformers reads but does not write."""
    change_weights(
        folder, lambda weights: {name.replace("0.block_sparse_moe", "0.mlp"): w for name, w in weights.items()}
    )
    sizes = {"head_dim": 5, "num_heads": 3, "short_conv_kernel_size": 3}
    kinds = {"full_attn_layers": [5], "kda_layers": [1, 2, 3, 4, 6]}
    of_class = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    published = {
        "linear_attn_config": {**sizes, **kinds},
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
    }
    published |= {
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }
    change_config(
        folder, lambda config: {key: value for key, value in config.items() if key not in of_class} | published
    )


@pytest.mark.parametrize("layout", [of_kimi, of_current_names])
def test_kimi_linear_comes_back_in_each_of_its_layouts(layout, tmp_path):
    theirs = door("kimi_linear", tmp_path / "theirs")
    layout(tmp_path / "theirs", theirs)
    theirs = transformers.KimiLinearForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    import_folder(tmp_path / "theirs", tmp_path / "run")
    assert far_apart(*logits_of_both(theirs, tfm.load(tmp_path / "run"), least=3)) < 1e-5
    export_run(tmp_path / "run", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "theirs")


def test_rates_of_lightning_attention_that_differ_from_the_computed_ones_are_refused(tmp_path):
    theirs = door("minimax", tmp_path / "theirs")
    name = "model.layers.1.self_attn.slope_rate"
    change_weights(tmp_path / "theirs", lambda weights: weights | {name: 2 * weights[name]})
    rule = r"layers\.1\.self_attn\.slope_rate differs from the values that the model computes at decoder\.1\.lightning"
    with pytest.raises(RunError, match=rule):
        import_folder(tmp_path / "theirs", tmp_path / "run")
    constants = ("slope_rate", "_decay")  # transformers computes the ones that a folder lacks
    change_weights(tmp_path / "theirs", lambda weights: {n: w for n, w in weights.items() if not n.endswith(constants)})
    import_folder(tmp_path / "theirs", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    loaded = transformers.MiniMaxForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert far_apart(*logits_of_both(loaded, tfm.load(tmp_path / "run"), least=3)) < 1e-5
    assert loaded.model.layers[1].self_attn.slope_rate.equal(theirs.model.layers[1].self_attn.slope_rate)


def test_qwen3_next_keeps_all_tensors_of_further_tokens_which_transformers_ignores(tmp_path):
    door("qwen3_next", tmp_path / "theirs")
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    further = ["mtp.norm.weight", "mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"]
    assert all(
        re.match("|".join(transformers.Qwen3NextForCausalLM._keys_to_ignore_on_load_unexpected), name)
        for name in further
    )
    stored = {**tensors, **dict.fromkeys(further, torch.ones(2))}
    save_file({name: tensor.clone() for name, tensor in stored.items()}, tmp_path / "theirs" / "model.safetensors")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == stored.keys()


HARMFUL = (
    "evil", "${oc.env:HOME}", "__import__('os').system('touch harmed')", 10**12, 10**400, -1, 0, 1.5, float("nan"), True, None, [], {}, [[]],
    {"a": 1},
)  # fmt: skip


@each_family
def test_hostile_configs_and_weights_are_refused_or_read_without_another_error(name, tmp_path):
    door(name, tmp_path / "theirs")
    family, config, random = families()[name], sizes_of(name), Random(name)
    for _ in range(40):
        changed = json.loads(json.dumps(config))
        for key in random.sample(sorted(changed), random.choice((1, 1, 2))):
            place = (
                changed[key] if isinstance(changed[key], dict) and changed[key] and random.random() < 0.7 else changed
            )
            place[random.choice(sorted(place)) if place is not changed else key] = random.choice(HARMFUL)
        try:
            composed = read_published(family, changed, {}, 100, "config.json").compose()
            check_model(composed.model, composed.sources)
        except (RunError, ConfigError) as error:
            assert str(error).startswith("error: ")
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    needed = names_pattern([row for row in family.weights if row.ours])
    optional = {*family.zeros, *family.tied.values()}  # a missing original may have a copy
    victims = sorted(key for key in tensors if needed.fullmatch(key) and key not in optional)
    for victim in random.sample(victims, 3):
        for change in ({}, {victim: torch.zeros(3, 5, 7)}, {victim: tensors[victim], f"{victim}_more": torch.zeros(2)}):
            others = {key: tensor for key, tensor in tensors.items() if key != victim}
            save_file(others | change, tmp_path / "theirs" / "model.safetensors")
            with pytest.raises(RunError) as error:
                import_folder(tmp_path / "theirs", tmp_path / "run")
            assert str(error.value).count("error:") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "knob"), [("phi", "d_head=4"), ("gptj", "kv_heads=1")])
def test_a_model_with_a_knob_that_config_json_cannot_state_is_no_model_of_the_family(name, knob):
    small = [
        "d_model=16",
        "heads=2",
        "layers=1",
        "vocab=30",
        "d_ff=64",
        {"phi": "share=0.5", "gptj": "rotated=4"}[name],
    ]
    for overrides, expected in ((small, name), ([*small, knob], None)):
        composed = compose_model(name, overrides)
        spec = check_model(composed.model, composed.sources)
        found = find_published(spec, composed.mapping, OwnVocabulary(30, 1, 2))
        assert (found and found.family.name) == expected


def test_the_page_of_published_weights_lists_every_family_and_each_door_has_a_tiny_model():
    page = (Path(__file__).parents[2] / "docs" / "importing.md").read_text("utf-8")
    for name, family in families().items():
        assert f"[{family.model}](" in page and family.architecture in page, name
        assert is_shipped(family) or name in DOORS
