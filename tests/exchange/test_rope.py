"""Scaled rotary positions of config.json: equal logits after the import, and the same scaling after the export."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

import tfm_blocks as tfm
from tests.exchange.doors import sizes_of
from tests.exchange.published import VOCAB, publish
from tests.exchange.test_import import far_apart, imported, own_ids
from tfm_blocks.errors import RunError
from tfm_blocks.exchange.config import SCALING, read_published, with_knobs
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.exchange.family import families
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.translation.save import save_network

LENGTH = {"original_max_position_embeddings": 6}
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTH}
YARN = {"rope_type": "yarn", "factor": 4.0, **LENGTH}
TUNED_YARN = {**YARN, "beta_fast": 3.0, "beta_slow": 0.5, "attention_factor": 1.3, "truncate": False}
SCALINGS = {"linear": LINEAR, "llama3": LLAMA3, "yarn": YARN, "tuned_yarn": TUNED_YARN}
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "olmo2")


def logits_of_both(theirs, translator):
    """Return our logits and theirs for sequences three times longer than the trained length."""
    ids_BN = torch.randint(VOCAB, (3, 18), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits_BNV = translator.network(tgt=own_ids(translator, ids_BN))
        return logits_BNV[..., own_ids(translator, torch.arange(VOCAB)[None])[0]], theirs(input_ids=ids_BN).logits


def each_scaling(*families):
    default = [(families[0], name) for name in ("llama3", "tuned_yarn")]
    return pytest.mark.parametrize(
        ("family", "scaling"),
        [
            pytest.param(family, name, marks=[] if (family, name) in default else [pytest.mark.grid])
            for family in families
            for name in SCALINGS
        ],
    )


@each_scaling(*FAMILIES)
def test_logits_match_transformers_beyond_the_trained_length(family, scaling, tmp_path):
    rope = {"rope_theta": 100.0, **SCALINGS[scaling]}
    width = {} if family == "olmo2" else {"head_dim": 8}  # Mixtral's YaRN needs the key, and OLMo 2 has none
    theirs, translator = imported(family, tmp_path, hidden_size=32, **width, rope_parameters=rope)
    logits_BNV, expected = logits_of_both(theirs, translator)
    assert far_apart(logits_BNV, expected) < 1e-5
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", rope_parameters={"rope_type": "default", "rope_theta": 100.0})  # fmt: skip
    assert far_apart(logits_of_both(plain.eval(), translator)[1], expected) > 1e-3  # the scaling has an effect


@pytest.mark.parametrize(
    "scaling", [pytest.param(name, marks=[] if name == "yarn" else pytest.mark.grid) for name in SCALINGS]
)
def test_the_keys_of_earlier_transformers_mean_the_same(scaling, tmp_path):
    rope = SCALINGS[scaling]
    theirs = publish("llama", tmp_path / "theirs", rope_parameters={"rope_theta": 100.0, **rope})
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    for name, key in (("new", "rope_type"), ("old", "type")):
        earlier = {key: rope["rope_type"], **{name: value for name, value in rope.items() if name != "rope_type"}}
        path.write_text(json.dumps({**config, "rope_theta": 100.0, "rope_scaling": earlier}))
        import_folder(tmp_path / "theirs", tmp_path / name)
        assert far_apart(*logits_of_both(theirs, tfm.load(tmp_path / name))) < 1e-5


@pytest.mark.parametrize("name", [name for name, family in families().items() if SCALING in family.fixed])
def test_a_family_without_scaled_positions_refuses_the_keys_of_earlier_transformers(name):
    config = {"model_type": families()[name].model_type, "rope_theta": 1e4, SCALING: {**YARN, "factor": 8.0}}
    with pytest.raises(RunError, match=r"rope_scaling\.factor: has no counterpart in our blocks: 8\.0"):
        read_published(families()[name], config, {}, 10**6, "config.json")


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_keys_of_two_versions_of_transformers_are_refused(name):
    config = {"model_type": name, "rope_parameters": {"rope_theta": 1e4, **YARN}, SCALING: {**YARN, "factor": 8.0}}
    with pytest.raises(RunError, match="rope_scaling: replaces rope_parameters in transformers"):
        read_published(families()[name], config, {}, 10**6, "config.json")


def test_deepseek_v3_has_its_scaling_after_further_training_and_refuses_a_factor_of_attention():
    family, kind = families()["deepseek_v3"], transformers.DeepseekV3Config
    config = {key: value for key, value in sizes_of("deepseek_v3").items() if key != "rope_parameters"}
    config |= {"rope_theta": 100.0, SCALING: {**YARN, "mscale": 0.7}}
    stated = read_published(family, config, {}, 10**6, "config.json")
    changed = with_knobs(config, stated, replace(stated, knobs={**stated.sizes, "factor": 8.0}))
    expected = {**YARN, "mscale": 0.7, "rope_theta": 100.0, "factor": 8.0}
    assert kind.from_dict(changed).rope_parameters.items() >= expected.items()
    with pytest.raises(RunError, match=r"rope_scaling\.attention_factor: has no counterpart"):
        read_published(family, {**config, SCALING: {**YARN, "attention_factor": 2.0}}, {}, 10**6, "config.json")


@pytest.mark.parametrize(
    ("given", "knobs", "expected"),
    [
        ({"rope_theta": 100.0}, {"factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_theta": 100.0, "rope_scaling": LLAMA3}, {"factor": 16.0}, {**LLAMA3, "factor": 16.0}),
        ({"rope_theta": 100.0, "rope_scaling": LLAMA3}, {"base": 50.0}, {**LLAMA3, "rope_theta": 50.0}),
        ({"rope_parameters": {"rope_theta": 100.0, **LINEAR}}, {"factor": 1.0}, {"rope_type": "default"}),
        ({"rope_parameters": {"rope_theta": 100.0, **LINEAR}}, {"eps": 1e-3}, LINEAR),
    ],
)
def test_a_further_trained_model_has_the_changed_scaling_and_no_key_of_the_published_one(given, knobs, expected):
    """`given` has the keys of any version of transformers."""
    config = {key: value for key, value in LlamaConfig(vocab_size=VOCAB).to_dict().items() if "rope" not in key}
    stated = read_published(families()["llama"], config | given, {}, 10**6, "config.json")
    changed = with_knobs(config | given, stated, replace(stated, knobs={**stated.sizes, **knobs}))
    assert LlamaConfig.from_dict(changed).rope_parameters == {"rope_theta": 100.0, **expected}


@pytest.mark.parametrize(
    "scaling",
    [None, *(pytest.param(name, marks=[] if name == "tuned_yarn" else pytest.mark.grid) for name in SCALINGS)],
)
def test_a_new_run_is_exported_with_its_scaling(scaling, tmp_path):
    rope = {"rope_theta": 100.0, **(SCALINGS[scaling] if scaling else {"rope_type": "default"})}
    _, translator = imported("llama", tmp_path, rope_parameters=rope)
    knobs = SavedRun(tmp_path / "run").config
    save_network(translator.network, tmp_path / "new", translator.tokenizer, knobs)  # without the imported config.json
    export_run(tmp_path / "new", tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())["rope_parameters"]
    assert written.items() >= rope.items() and (scaling or written == rope)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert far_apart(*logits_of_both(back, translator)) < 1e-5


@pytest.mark.parametrize(
    ("scaling", "rule"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_scaling.rope_type: must be 'default' or 'linear' or"),
        ({"type": ["yarn"], "factor": 2.0}, "rope_scaling.type: must be"),
        ({"factor": 2.0}, "rope_scaling.factor: has no counterpart in our blocks: 2.0"),
        ({"type": "linear"}, "rope_parameters.factor: is missing"),
        ({**YARN, "mscale_all_dim": 0.7}, "rope_scaling.mscale_all_dim: has no counterpart in our blocks: 0.7"),
        ({**YARN, "factor": "4"}, "rope_scaling.factor: must be a number, but is '4'"),
        ({**YARN, "truncate": "no"}, "truncate must be a bool"),
        ({**LLAMA3, **dict.fromkeys(LENGTH, 6.5)}, "original_max_position_embeddings: must be a whole number"),
    ],
)
def test_a_scaling_that_the_blocks_cannot_express_is_refused_by_key(scaling, rule, tmp_path):
    publish("llama", tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps({**config, "rope_scaling": scaling}))
    with pytest.raises(RunError, match=r"config\.json") as error:
        import_folder(tmp_path / "theirs", tmp_path / "run")
    assert rule in str(error.value)
