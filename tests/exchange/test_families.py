"""Families that are only doors: equal logits, equal greedy output, the same bytes back, and errors by key."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

import tfm_blocks as tfm
from tests.exchange.doors import DOORS, ROPE, YARN, config_of, door, sizes_of
from tests.exchange.layouts import change_config, change_weights, of_current_names
from tests.exchange.published import write_tokenizer
from tests.exchange.test_import import (
    expect_equal_texts,
    expect_restored,
    far_apart,
    logits_of_both,
    logits_of_encoders,
)
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.published_libraries import published_tokenizer
from tfm_blocks.data.tokenizer import Tokenizer as LearnedTokenizer
from tfm_blocks.data.vocabulary import OwnVocabulary, Vocabulary
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.exchange.config import read_published, with_knobs, write_published
from tfm_blocks.exchange.exporting import export_run, find_published
from tfm_blocks.exchange.family import families, is_shipped
from tfm_blocks.exchange.importing import ImportReport, conversion_of, import_folder
from tfm_blocks.exchange.weights import names_pattern
from tfm_blocks.network.build import build_network, check_model, network_without_values
from tfm_blocks.network.matching import weights_of
from tfm_blocks.translation.save import save_network

ALPHA = {
    **ROPE,
    "rope_type": "dynamic",
    "alpha": 50.0,
    "factor": 1.0,
    "beta_fast": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
QUANTIZATION = {
    **DOORS["bitnet"]["quantization_config"],
    "rms_norm_eps": 1e-6,
    "use_rms_norm": False,
    "modules_to_not_convert": None,
}
LOOSE = {"minimax": 1e-4}  # transformers' own rounding errors are above 1e-5, on some processors of the largest logit
REPEATING = ("m2m_100", "marian_separate", "t5gemma")  # random models that repeat a token
QUICK = ("mistral", "gpt_neox", *(families().keys() - DOORS.keys()))
MARKED = {name: pytest.param(name, marks=[] if name in QUICK else [pytest.mark.grid]) for name in families()}
each_family = pytest.mark.parametrize("name", [MARKED[name] for name in DOORS])


@torch.compiler.set_stance("force_eager")  # the layers of BitNet are compiled
@each_family
def test_a_folder_becomes_a_run_of_equal_outputs_and_the_same_folder_again(name, tmp_path):
    theirs = door(name, tmp_path / "theirs")
    assert import_folder(tmp_path / "theirs", tmp_path / "run").family == name
    ours = tfm.load(tmp_path / "run")
    if families()[name].encoder:
        assert far_apart(*logits_of_encoders(theirs, ours)) < 1e-5
    else:
        bound = LOOSE.get(name, 1e-5)
        assert far_apart(*logits_of_both(theirs, ours, least=3)) < bound  # M2M100 counts no position of padding
        expect_equal_texts(theirs, ours, least=1 if name in REPEATING else 4)
    expect_restored(tmp_path)


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
            text = str(error).replace("None", "missing")
            outcomes.append(sorted(re.sub("is null.*", "is missing", text).splitlines()))
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
        if key == "use_sliding_window":  # it has an effect only without layer_types
            changed = {**changed, "layer_types": None, "sliding_window": 8, "max_window_layers": 0}
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
        ("bamba", "time_step_limit", [0.1, 1.0], ""),
        ("xlstm", "hidden_size", 64, ""),  # not the embedding_dim
        ("xlstm", "num_hidden_layers", 3, ""),  # not the num_blocks
        ("gemma3n", "intermediate_size", [28] * 9, ""),
        ("gemma3n", "activation_sparsity_pattern", "0.95", ""),
        ("gemma3n", "final_logit_softcapping", None, ""),
        ("gemma3n", "num_kv_shared_layers", 0, ""),
        ("gpt_neo", "attention_layers", ["global"] * 3, ""),  # it replaces attention_types
        ("cohere2", "layer_types", ["sliding_attention"] * 3, ""),
        ("deepseek_v3", "rope_parameters.truncate", False, ""),
        ("deepseek_v3", "rope_parameters.factor", None, ""),
        ("mistral", "is_causal", False, ""),
        ("mistral", "is_causal", None, ""),
        ("mbart", "is_causal", False, ""),
        ("t5gemma", "decoder.is_causal", False, ""),
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


@pytest.mark.parametrize(
    ("name", "config", "rule"),
    [
        (
            "gptj",
            {"rotary_dim": 3},
            "rotary_dim: must be an even number, but is 3",
        ),  # transformers fails in its forward
        ("modernbert", {"local_attention": 127}, "local_attention: must be an even number, but is 127"),
        ("olmo3", {"rope_theta": 1e4}, "rope_parameters.sliding_attention.rope_theta: must be 10000.0 for our blocks"),
        ("hunyuan", {"rope_parameters": ALPHA | {"alpha": None}}, "rope_parameters.alpha: is null, which has no"),
        ("llama", {"rope_parameters": ALPHA}, "rope_parameters.rope_type: must be 'default' or 'linear' or"),
        (
            "arcee",
            {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.4}},
            "rope_parameters.mscale_all_dim: has",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "rope_scaling.type: must be 'default' or 'longrope' or",
        ),
        (
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": [28], "kda_layers": [1]}},
            "linear_attn_config.full_attn_layers: must list layers from 1 to 27, or linear_attention or",
        ),
    ],
)
def test_keys_that_change_the_model_of_transformers_are_refused_with_the_rule(name, config, rule):
    with pytest.raises(RunError) as error:
        read_published(families()[name], config, {}, 10**6, "config.json")
    assert f"config.json: {rule}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen2", {"max_window_layers": 4}),
        ("qwen2", {"max_window_layers": 3}),
        ("qwen2", {"max_window_layers": 0, "layer_types": ["full_attention"] * 4}),
        ("qwen3", {"sliding_window": None, "max_window_layers": 0}),
        ("qwen3", {"num_hidden_layers": 28}),  # the default of max_window_layers
        ("qwen3", {"num_hidden_layers": 29}),
        ("qwen2_moe", {"max_window_layers": 4}),
        ("qwen2_moe", {"layer_types": ["full_attention"] * 4}),
        ("smollm3", {"sliding_window": 8}),
        ("smollm3", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}),
        ("smollm3", {}),
        ("qwen3_moe", {"max_window_layers": 4, "layer_types": ["full_attention"] * 4}),
        ("qwen3_moe", {"sliding_window": None}),
    ],
)
def test_use_sliding_window_is_refused_only_if_a_layer_of_transformers_has_a_window(name, config):
    config = {"num_hidden_layers": 4, **config, "use_sliding_window": True}
    theirs = getattr(transformers, families()[name].architecture).config_class(**config)
    kinds = theirs.layer_types if name != "qwen3_moe" else ["sliding_attention"] * bool(theirs.sliding_window)
    given = {**config, "bos_token_id": 1, "eos_token_id": 2}
    if "sliding_attention" in kinds:
        with pytest.raises(RunError, match="use_sliding_window: must be False"):
            read_published(families()[name], given, {}, 10**6, "config.json")
    else:
        read_published(families()[name], given, {}, 10**6, "config.json")


@pytest.mark.parametrize("name", ["smollm3", "ernie4_5", "bamba"])
def test_null_for_the_heads_of_keys_stands_for_all_heads_as_in_transformers(name):
    config = {"num_key_value_heads": None, "num_attention_heads": 8}
    theirs = getattr(transformers, families()[name].architecture).config_class.from_dict(config)
    knobs = read_published(families()[name], config, {}, 10**6, "config.json").knobs
    assert knobs["kv_heads"] == theirs.num_key_value_heads == 8


@pytest.mark.parametrize("top", [{}, {"eos_token_id": 5}])
def test_t5gemma_reads_eos_from_its_decoder_unless_the_top_level_has_it(top):
    config = {**top, "decoder": {"eos_token_id": [1, 107]}}
    vocabulary = read_published(families()["t5gemma"], config, {}, 10**6, "config.json").vocabulary
    assert vocabulary.written_eos == transformers.T5GemmaConfig.from_dict(config).eos_token_id


@pytest.mark.parametrize(
    "content", [{}, {"quantization_config": None}, {"quantization_config": {"quant_method": "bitnet"}}]
)
def test_a_bitnet_without_the_rounding_of_its_blocks_is_refused(content):
    config = {key: value for key, value in sizes_of("bitnet").items() if key != "quantization_config"}
    with pytest.raises(RunError, match=r"quantization_config\.linear_class: must be 'autobitlinear'"):
        read_published(families()["bitnet"], config | content, {}, 10**6, "config.json")


def test_null_for_the_width_of_heads_of_ernie_is_the_width_that_the_class_computes():
    config = {**sizes_of("ernie4_5"), "head_dim": None}
    knobs = read_published(families()["ernie4_5"], config, {}, 10**6, "config.json").knobs
    assert knobs["d_head"] == transformers.Ernie4_5Config.from_dict(config).head_dim == 4


def test_an_exaone_4_without_the_width_of_heads_divides_the_width_of_the_model():
    config = {key: value for key, value in sizes_of("exaone4").items() if key != "head_dim"}
    assert read_published(families()["exaone4"], config, {}, 10**6, "config.json").knobs["d_head"] == 4


@pytest.mark.parametrize(
    ("mscale", "whole"), [(0.7, 1.4), (0.7, 0.0), (1.0, 1.0), (0.0, 1.0), (None, 1.0), (None, None)]
)
def test_the_amplitude_of_the_positions_of_deepseek_is_that_of_transformers(mscale, whole):
    rope = {**YARN, "mscale": mscale, "mscale_all_dim": whole}
    config = {**sizes_of("deepseek_v3"), "rope_parameters": rope}
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    expected = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))[1]
    composed = read_published(families()["deepseek_v3"], config, {}, 10**6, "config.json").compose()
    nodes = {node.address: node for node in check_model(composed.model, composed.sources).nodes}
    factor = nodes["decoder.0.self"].arguments["position"].arguments["attention_factor"]
    assert factor == pytest.approx(expected)


def test_a_factor_of_mscale_alone_does_not_scale_positions():
    """AFM has it, and transformers reads it only together with mscale_all_dim."""
    configs = [sizes_of("arcee") | {"rope_parameters": YARN | extra} for extra in ({}, {"mscale": 1.0})]
    first, second = (read_published(families()["arcee"], config, {}, 10**6, "config.json") for config in configs)
    assert first == second


@pytest.mark.parametrize("name", ["apertus", "gpt_oss"])
@pytest.mark.parametrize("content", [{}, {"rope_scaling": None}, {"rope_parameters": None}, {"rope_parameters": {}}])
def test_a_base_without_a_kind_of_positions_has_the_kind_of_the_class(name, content):
    config = {"model_type": families()[name].model_type, "rope_theta": 5e5, **content}
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(config))).rope_parameters
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    knobs = read_published(families()[name], config | ids, {}, 10**6, "config.json").knobs
    blocks = {"yarn": "yarn", "llama3": "llama3_rotary", "default": "rotary"}
    assert knobs["rope"] == blocks[theirs["rope_type"]] and knobs["base"] == theirs["rope_theta"]
    assert "factor" not in theirs or knobs["factor"] == theirs["factor"]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
        ("t5gemma", "encoder.attn_logit_softcapping"),
        ("t5gemma", "decoder.attn_logit_softcapping"),
        ("t5gemma", "decoder.final_logit_softcapping"),
        ("exaone4", "sliding_window"),
        ("cohere2", "sliding_window"),
        ("gemma2", "sliding_window"),
        ("gemma3", "sliding_window"),
        ("gemma3n", "sliding_window"),
        ("gpt_oss", "sliding_window"),
        ("gptj", "rotary_dim"),
        ("deepseek_v2", "q_lora_rank"),
    ],
)
def test_a_feature_that_null_disables_is_refused_if_the_blocks_need_it(name, key):
    config = {"model_type": families()[name].model_type}
    outer, _, inner = key.rpartition(".")
    config |= {outer: {inner: None}} if outer else {inner: None}
    with pytest.raises(RunError) as error:
        read_published(families()[name], config, {}, 10**6, "config.json")
    assert f"config.json: {key}: is null, which has no counterpart in our blocks" in str(error.value)


@pytest.mark.parametrize(
    ("name", "key", "value", "without"),
    [
        ("deberta_v3", "pos_att_type", "p2c|c2p", ""),
        ("gemma3", "sliding_window_pattern", 6, "layer_types"),
        ("exaone4", "sliding_window_pattern", "LLLG", ""),  # layer_types decides
        ("gpt_neo", "attention_types", [[["global", "local", "global"], 1]], "attention_layers"),
        ("lfm2", "full_attn_idxs", [1], "layer_types"),
        ("bamba", "time_step_limit", [0.0, float("inf")], ""),  # before transformers 5
        ("kimi_linear", "linear_attn_config", {"full_attn_layers": [5], "kda_layers": [1, 2, 3, 4, 6]}, "layer_types"),
        ("kimi_linear", "linear_attn_config", {"full_attn_layers": [3]}, "layer_types"),  # not read without kda_layers
        ("kimi_linear", "first_k_dense_replace", 1, "mlp_layer_types"),
        ("minimax", "rope_scaling", {}, ""),
        ("mistral", "layer_types", ["full_attention"] * 2, ""),  # their classes do not read it
        ("qwen3_moe", "layer_types", ["full_attention"] * 2, ""),
        ("xlstm", "embedding_dim", 32, "hidden_size"),  # as published
        ("xlstm", "num_blocks", 2, "num_hidden_layers"),
        ("gemma", "use_bidirectional_attention", False, ""),
        ("gpt_neox", "rope_theta", 7.0, ""),  # transformers 5 reads rotary_emb_base
        ("gpt_neox", "partial_rotary_factor", 0.7, ""),
        ("mamba2", "intermediate_size", 8192, ""),  # the class computes it
        ("mamba2", "norm_before_gate", True, ""),
        ("mamba2", "time_step_init_scheme", "random", ""),
        ("mamba2", "time_step_scale", 1.0, ""),
        ("qwen3_moe", "max_window_layers", 48, ""),  # as published
        ("whisper", "forced_decoder_ids", [[1, 50259]], ""),  # as published
        ("bitnet", "quantization_config", QUANTIZATION, ""),  # as transformers saves it again
        ("cohere2", "layer_switch", 4, ""),  # as published, as are the next ones
        ("blenderbot", "do_blenderbot_90_layernorm", True, ""),
        ("starcoder2", "rms_norm_eps", 1e-5, ""),
        ("starcoder2", "scale_attention_softmax_in_fp32", True, ""),
        ("bamba", "use_mamba_kernels", True, ""),
        ("falcon", "ff_factor", 4, ""),
        ("hunyuan", "attention_head_dim", 128, ""),
        ("gemma", "hidden_act", "gelu", ""),  # the first releases wrote it, and transformers reads gelu_pytorch_tanh
    ],
)
def test_another_spelling_of_the_same_model_is_read(name, key, value, without):
    config = {**sizes_of(name), key: value}
    config.pop(without, None)
    expected = read_published(families()[name], sizes_of(name), {}, 10**6, "config.json")
    assert read_published(families()[name], config, {}, 10**6, "config.json") == expected


SMALL = ["d_model=16", "heads=2", "layers=2", "vocab=30", "d_ff=8"]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("t5gemma", [*SMALL, "kv_heads=1", "d_head=8"]),  # its encoder and its decoder state a vocab_size
        ("mamba2", ["d_model=16", "heads=4", "layers=1", "vocab=30", "groups=1"]),  # and this one a head_dim
        ("t5_v1", ["layers=1", "vocab=30", "logit_scale=0.04419417382415922"]),  # 512**-0.5, which rounds differently
    ],
)
def test_a_new_model_has_the_config_of_its_family(name, knobs, tmp_path):
    composed = compose_model(name, knobs)
    spec = check_model(composed.model, composed.sources)
    published = find_published(spec, composed.mapping, OwnVocabulary(30, 1, 2), imported=name)
    written = write_published(published)
    (tmp_path / "config.json").write_text(json.dumps(written))
    kind = getattr(transformers, published.family.architecture)
    with torch.device("meta"):
        theirs = kind(kind.config_class.from_pretrained(tmp_path)).state_dict()
    ours = conversion_of(published).to_theirs(weights_of(network_without_values(spec)))
    assert {name: weight.shape for name, weight in ours.items()}.items() <= {
        name: weight.shape for name, weight in theirs.items()
    }.items()
    assert read_published(published.family, written, {}, 10**6, "config.json").knobs.keys() <= published.knobs.keys()


@pytest.mark.parametrize(("name", "key"), [("mamba2", "head_dim"), ("t5gemma", "decoder.vocab_size")])
def test_a_key_that_contradicts_the_keys_that_imply_it_is_refused(name, key):
    config = json.loads(json.dumps(sizes_of(name)))
    place = config["decoder"] if "." in key else config
    place[key.rpartition(".")[2]] += 1
    with pytest.raises(RunError, match=rf"config\.json: {key}: must be \d+ for the other keys, but is "):
        read_published(families()[name], config, {}, 10**6, "config.json")


def test_gpt_neo_states_the_kinds_of_its_layers_as_its_class_reads_them():
    sizes = ["d_model=16", "heads=2", "layers=3", "vocab=30", "d_ff=64", "max_length=8"]
    composed = compose_model("gpt_neo", sizes)
    published = find_published(check_model(composed.model, composed.sources), composed.mapping, OwnVocabulary(30, 1, 2))
    written = write_published(published)
    assert transformers.GPTNeoConfig.from_dict(written).attention_layers == ["global", "local", "global"]
    deeper = replace(published, knobs={**published.knobs, "layers": 4})
    changed = with_knobs(written, published, deeper)
    assert transformers.GPTNeoConfig.from_dict(changed).attention_layers == ["global", "local"] * 2


@pytest.mark.parametrize("name", ["cohere", "falcon"])
def test_a_mapping_of_config_json_that_is_null_takes_a_changed_knob(name):
    config = {**sizes_of(name), "rope_parameters": None}
    stated = read_published(families()[name], config, {}, 10**6, "config.json")
    changed = with_knobs(config, stated, replace(stated, knobs={**stated.knobs, "base": 700.0}))
    assert changed["rope_parameters"]["rope_theta"] == 700.0


def test_lfm2_has_the_values_of_its_published_keys_which_replace_the_usual_ones():
    config = {**sizes_of("lfm2"), "intermediate_size": 384, "tie_word_embeddings": True}
    config |= {"block_ff_dim": 768, "tie_embedding": False}
    theirs = transformers.Lfm2Config.from_dict(config)
    knobs = read_published(families()["lfm2"], config, {}, 10**6, "config.json").knobs
    assert (knobs["d_ff"], knobs["tie"]) == (512, None) and not theirs.tie_word_embeddings
    assert theirs.intermediate_size == 768


@pytest.mark.grid
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


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gpt_bigcode", {"multi_query": False}),
        ("mamba2", {"time_step_limit": (0.0, 0.7)}),
        pytest.param("gpt_neox", {"hidden_act": "gelu_fast"}, marks=pytest.mark.grid),  # GPT-NeoX 20B
        pytest.param("hunyuan", {"rope_parameters": ALPHA}, marks=pytest.mark.grid),  # as published
    ],
)
def test_a_variant_of_a_family_has_equal_logits_and_comes_back(name, config, tmp_path, monkeypatch):
    monkeypatch.setitem(DOORS, name, DOORS[name] | config)
    theirs = door(name, tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    assert far_apart(*logits_of_both(theirs, tfm.load(tmp_path / "run"))) < 1e-5
    expect_restored(tmp_path)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("bamba", {"attn_layer_indices": []}),
        pytest.param("lfm2", {"full_attn_idxs": []}, marks=pytest.mark.grid),
        pytest.param("deepseek_v32", {"first_k_dense_replace": 0}, marks=pytest.mark.grid),
        pytest.param("kimi_linear", {"mlp_layer_types": ["sparse"] * 6}, marks=pytest.mark.grid),
        pytest.param("kimi_linear", {"layer_types": ["linear_attention"] * 6}, marks=pytest.mark.grid),
    ],
)
def test_the_printed_command_builds_a_model_without_layers_of_one_kind(name, config, tmp_path, monkeypatch):
    monkeypatch.setitem(DOORS, name, DOORS[name] | config)
    door(name, tmp_path / "theirs")
    printed = shlex.split(str(import_folder(tmp_path / "theirs", tmp_path / "run")).rpartition("tfm train model=")[2])
    model, *overrides = printed[: -len(["init_from", "data.tokenizer", "data"])]
    ours = tfm.load(tmp_path / "run")
    composed = compose_model(model, [*overrides, f"vocab={ours.tokenizer.size}"])
    assert check_model(composed.model, composed.sources).nodes == ours.network.spec.nodes


def test_the_report_of_a_model_that_no_command_line_builds_says_so():
    report = str(ImportReport(Path("runs/a b"), "bamba", (), 5))
    assert "no command line builds this model; " in report and report.endswith(
        "add 'init_from=runs/a b' 'data.tokenizer=runs/a b'"
    )


@pytest.mark.grid
def test_a_mamba_2_of_transformers_4_has_an_infinite_bound_of_steps_and_comes_back(tmp_path):
    door("mamba2", tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    text = re.sub(r'\{\s*"__float__": "Infinity"\s*\}', "Infinity", path.read_text())
    assert json.loads(text)["time_step_limit"] == [0.0, float("inf")]
    path.write_text(text)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    expect_restored(tmp_path)


def test_whisper_with_an_encoder_has_the_logits_of_its_decoder_and_keeps_the_other_tensors(tmp_path):
    torch.manual_seed(1)
    whole = transformers.WhisperForConditionalGeneration(config_of("whisper")).eval()
    whole.save_pretrained(tmp_path / "theirs")
    write_tokenizer(tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    theirs = transformers.WhisperForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert far_apart(*logits_of_both(theirs, tfm.load(tmp_path / "run"))) < 1e-5
    expect_restored(tmp_path)


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


@pytest.mark.grid
@pytest.mark.parametrize("layout", [of_kimi, of_current_names])
def test_kimi_linear_comes_back_in_each_of_its_layouts(layout, tmp_path):
    theirs = door("kimi_linear", tmp_path / "theirs")
    layout(tmp_path / "theirs", theirs)
    theirs = transformers.KimiLinearForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    import_folder(tmp_path / "theirs", tmp_path / "run")
    assert far_apart(*logits_of_both(theirs, tfm.load(tmp_path / "run"), least=3)) < 1e-5
    expect_restored(tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("name", [name for name in DOORS if families()[name].also])
def test_a_door_is_read_with_the_names_of_transformers_in_memory(name, tmp_path):
    theirs = door(name, tmp_path / "theirs")
    of_current_names(tmp_path / "theirs", theirs)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    assert far_apart(*logits_of_both(theirs, tfm.load(tmp_path / "run"), least=3)) < LOOSE.get(name, 1e-5)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("special", "architecture"),
    [(["w1"], "M2M100ForConditionalGeneration"), ([], "custom code"), (None, "custom code")],
)
def test_a_new_m2m_100_is_exported_as_such_only_if_the_id_of_padding_is_no_token_of_texts(
    special, architecture, tmp_path
):
    """Without `special`, the tokenizer is learned, and has BOS in this place."""
    if special is None:
        tokenizer = LearnedTokenizer.train(["a red house", "a blue boat"] * 9, 270)
    else:
        write_tokenizer(tmp_path)
        pieces = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        pieces.add_special_tokens(special)
        tokenizer = published_tokenizer(Vocabulary(37, 2, 2), {"tokenizer.json": pieces.to_str().encode()}, "here")
    knobs = ["d_model=16", "heads=2", "d_ff=8", "layers=1", f"vocab={tokenizer.size}"]
    knobs += [] if special is None else ["first_id=2"]
    composed = compose_model("m2m_100", knobs)
    network = build_network(check_model(composed.model, composed.sources), seed=1)
    values = composed.knobs
    save_network(network, tmp_path / "run", tokenizer, values)
    assert export_run(tmp_path / "run", tmp_path / "out")[0] == architecture


@pytest.mark.grid
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
    assert far_apart(*logits_of_both(loaded, tfm.load(tmp_path / "run"), least=3)) < LOOSE["minimax"]
    assert loaded.model.layers[1].self_attn.slope_rate.equal(theirs.model.layers[1].self_attn.slope_rate)


@pytest.mark.grid
def test_rates_of_lightning_attention_that_are_rounded_are_not_exported(tmp_path):
    """Transformers would compute with the rounded ones."""
    door("minimax", tmp_path / "theirs").to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")  # raises if its outputs differ from the run
    names = [load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("theirs", "back")]
    assert {name.rpartition(".")[2] for name in names[0] - names[1]} == {
        "slope_rate", "query_decay", "key_decay", "diagonal_decay"
    }  # fmt: skip
    loaded = transformers.MiniMaxForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert far_apart(*logits_of_both(loaded, tfm.load(tmp_path / "run"), least=3)) < 1e-4  # 1.9e-2 with rounded rates


@pytest.mark.grid
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


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "ignored", "unknown"),
    [
        ("glm4_moe", ["layers.46.eh_proj.weight", "layers.92.self_attn.q_proj.weight"], "layers.47.eh_proj.weight"),
        (
            "deepseek_v3",
            ["layers.61.embed_tokens.weight", "layers.61.mlp.experts.0.up_proj.weight"],
            "layers.62.a.weight",
        ),
        (
            "gemma3n",
            [f"layers.9.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm")],
            "layers.9.a.weight",
        ),
    ],
)
def test_tensors_that_transformers_ignores_are_left_out_and_others_are_refused(name, ignored, unknown, tmp_path):
    theirs, path = door(name, tmp_path / "theirs"), tmp_path / "theirs" / "model.safetensors"
    patterns = "|".join(theirs._keys_to_ignore_on_load_unexpected)
    if name != "gemma3n":  # transformers names the layers of its base model
        assert all(re.search(patterns, f"model.{tensor}") for tensor in ignored)
    stored = {key: tensor.clone() for key, tensor in load_file(path).items()}
    save_file({**stored, **{f"model.{tensor}": torch.ones(2) for tensor in ignored}}, path)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == stored.keys()
    save_file({**stored, f"model.{unknown}": torch.ones(2)}, path)
    with pytest.raises(RunError, match=f"has the tensor model.{unknown}, which the model lacks"):
        import_folder(tmp_path / "theirs", tmp_path / "other")


HARMFUL = (
    "evil", "${oc.env:HOME}", "__import__('os').system('touch harmed')", 10**12, 10**400, -1, 0, 1.5, float("nan"), True, None, [], {}, [[]],
    {"a": 1},
)  # fmt: skip


@pytest.mark.grid
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


@pytest.mark.grid
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
