"""Exported folders have every tensor and every key that transformers reads."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tfm_blocks as tfm
from tests.exchange.doors import DOORS, door, sizes_of
from tests.exchange.layouts import change_weights
from tests.exchange.published import publish
from tests.exchange.test_import import far_apart, logits_of_both, logits_of_encoders
from tests.oracles.references import ENCODERS, REFERENCES
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.vocabulary import OwnVocabulary
from tfm_blocks.errors import RunError
from tfm_blocks.exchange.config import family_of, read_published, with_knobs, write_published
from tfm_blocks.exchange.exporting import export_run, find_published
from tfm_blocks.exchange.family import families
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.exchange.published_tensors import to_published
from tfm_blocks.exchange.rope import rope_knobs
from tfm_blocks.network.build import check_model, network_without_values
from tfm_blocks.network.matching import weights_of
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.translation.save import save_network


def export_as_new(run, folder):
    """Export a run as if it were trained here, without the imported config.json and leftovers."""
    ours = tfm.load(run)
    save_network(ours.network, folder / "new", ours.tokenizer, SavedRun(run).config)
    export_run(folder / "new", folder / "back")
    return folder / "back"


COPIES = {
    "bart": ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"],
    "bert": ["cls.predictions.decoder.bias"],
}


@pytest.mark.grid
@pytest.mark.parametrize("name", COPIES)
def test_an_untied_model_reads_and_writes_the_copies_that_transformers_unties_too(name, tmp_path):
    theirs = publish(name, tmp_path / "theirs", tie_word_embeddings=False)
    copies = {copy: load_file(tmp_path / "theirs" / "model.safetensors")[COPIES[name][0]] for copy in COPIES[name]}
    change_weights(tmp_path / "theirs", lambda weights: weights | copies)  # our model has one matrix for both
    theirs = type(theirs).from_pretrained(tmp_path / "theirs").eval()
    import_folder(tmp_path / "theirs", tmp_path / "run")
    logits = logits_of_encoders if name == "bert" else logits_of_both
    assert far_apart(*logits(theirs, tfm.load(tmp_path / "run"))) < 1e-5
    export_run(tmp_path / "run", tmp_path / "unchanged")  # raises unless transformers loads an equal model
    for folder in (tmp_path / "unchanged", export_as_new(tmp_path / "run", tmp_path)):
        back = load_file(folder / "model.safetensors")
        assert all(torch.equal(back[copy], matrix) for copy, matrix in copies.items())
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_untied_copies_that_differ_are_refused(tmp_path):
    publish("bart", tmp_path / "theirs", tie_word_embeddings=False)
    rule = r"model\.decoder\.embed_tokens\.weight differs from model\.encoder\.embed_tokens\.weight(.|\n)*--family FILE"
    with pytest.raises(RunError, match=rule):
        import_folder(tmp_path / "theirs", tmp_path / "run")


@pytest.mark.grid
def test_an_apertus_of_another_training_has_the_constants_of_its_activation(tmp_path):
    door("apertus", tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    back = export_as_new(tmp_path / "run", tmp_path)
    assert load_file(back / "model.safetensors")["model.layers.1.mlp.act_fn.beta"] == 0.5
    theirs = AutoModelForCausalLM.from_pretrained(back)
    assert far_apart(*logits_of_both(theirs, tfm.load(tmp_path / "run"))) < 1e-5


def config_of(name):
    """Return config.json of a tiny model of a family."""
    if name in DOORS:
        return sizes_of(name)
    _, kind, sizes = (REFERENCES | ENCODERS)["t5" if name == "t5_v1" else name]
    return kind(**sizes).to_dict()


def published_of(name, **changes):
    """Return the tiny model of a family, with changed knobs."""
    published = read_published(families()[name], config_of(name), {}, 10**6, name)
    positions = {knob: published.sizes[knob] for knob in rope_knobs(published.family.rope)}
    return replace(published, knobs={**positions, **published.knobs, **changes})


def read_by_transformers(config):
    """Return the config that transformers reads from config.json."""
    decoded = transformers.PreTrainedConfig._decode_special_floats(json.loads(json.dumps(config)))
    return transformers.AutoConfig.for_model(**decoded)


RENAMED = (  # by transformers when it loads
    "gate.", "experts", "conv1d", "forget_gate", "shared_expert", "gpt_neox.embed_out", "gpt_neox.lm_head", "kimi_linear.",
)  # fmt: skip
COMPUTED = ("embed_positions", "slope_rate", "_decay")  # transformers recomputes a missing one
KEPT = ("encoder_attn",)  # of Whisper, whose own runs have no cross-attention


@pytest.mark.grid
@pytest.mark.parametrize("name", families())
def test_a_written_config_and_its_tensors_have_the_names_and_shapes_of_transformers(name):
    sizes = published_of(name)
    knob = next(iter(sizes.family.output.values()), "")
    values = [value for row in sizes.family.config if row.knob == knob for value in row.values.values()]
    ties = [{knob: value} for value in values] or [{}]
    for tie in ties:
        published = replace(sizes, knobs=sizes.knobs | tie)
        config = write_published(published)
        assert family_of(config, name) == published.family
        with torch.device("meta"):
            theirs = getattr(transformers, published.family.architecture)(read_by_transformers(config))
        composed = published.compose()
        ours = to_published(
            published, weights_of(network_without_values(check_model(composed.model, composed.sources)))
        )
        expected = {key: tensor.shape for key, tensor in theirs.state_dict().items()}
        tied = {*theirs.all_tied_weights_keys, *theirs.all_tied_weights_keys.values()}
        lacking = (f"{name}.{key}" for key in expected.keys() - ours.keys() - tied)
        extra = (f"{name}.{key}" for key in ours.keys() - expected.keys())
        assert not [key for key in lacking if not any(part in key for part in RENAMED + COMPUTED + KEPT)]
        assert not [key for key in extra if not any(part in key for part in RENAMED)]
        assert all(ours[key].shape == expected[key] for key in ours.keys() & expected.keys())


@pytest.mark.parametrize(
    ("name", "knobs", "written"),
    [
        ("mamba2", {"heads": 2}, {"head_dim": 16}),
        ("llama", {"heads": 2, "kv_heads": 2}, {"head_dim": 4}),  # its default depends on the number of heads
        ("gptj", {"d_model": 8, "d_ff": 64}, {"n_inner": 64}),
        ("cohere2", {"heads": 2}, {"head_dim": 8}),
        ("bamba", {"state_heads": 2}, {"mamba_d_head": 16}),
        ("exaone4", {"layers": 8}, {"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2}),
        ("mbart", {"layers": 1}, {"encoder_layers": 1}),
        ("dbrx", {"base": 7.0}, {"rope_parameters.rope_theta": 7.0, "attn_config.rope_theta": 7.0}),
        ("electra_wide", {"d_model": 8}, {"embedding_size": 8}),
    ],
)
@pytest.mark.parametrize("is_own", [False, True])
def test_changed_knobs_are_read_by_transformers(name, knobs, written, is_own):
    stated = published_of(name)
    published = published_of(name, **knobs)
    imported = {
        **config_of(name),
        **{"mbart": {"num_hidden_layers": 2}, "exaone4": {"sliding_window_pattern": "LLLG"}}.get(name, {}),
    }
    if name in ("llama", "gptj"):
        imported = {key: value for key, value in imported.items() if key not in ("head_dim", "n_inner")}
        stated = read_published(families()[name], imported, {}, 10**6, name)
        published = replace(published, knobs={**published.knobs, **stated.knobs, **knobs})
    config = write_published(published) if is_own else with_knobs(imported, stated, published)
    theirs = read_by_transformers(config)
    for key, value in written.items():
        read = theirs
        for part in key.split("."):
            read = read[part] if isinstance(read, dict) else getattr(read, part)
        assert read == value, key
    assert read_published(families()[name], config, {}, 10**6, name).knobs.items() <= published.knobs.items()


@pytest.mark.grid
def test_a_dbrx_without_a_bound_of_queries_is_read_and_a_tied_one_has_no_config_json():
    config = config_of("dbrx")
    config["attn_config"]["clip_qkv"] = None
    assert read_published(families()["dbrx"], config, {}, 10**6, "dbrx").knobs["clip_qkv"] is None
    small = ["d_model=16", "heads=2", "kv_heads=1", "layers=1", "vocab=30", "d_ff=8", "experts=3", "top_k=2"]
    for tie, expected in (("null", "dbrx"), ("emb", None)):
        composed = compose_model("dbrx", [*small, f"tie={tie}"])
        spec = check_model(composed.model, composed.sources)
        published = find_published(spec, composed.mapping, OwnVocabulary(30, 1, 2))
        assert (published and published.family.name) == expected


@pytest.mark.parametrize(
    ("embedding", "architecture", "name"),
    [
        (12, "ElectraForMaskedLM", "electra"),
        (16, "ElectraForMaskedLM", "electra_wide"),
        (12, "ElectraForPreTraining", "electra_discriminator"),
        (16, "ElectraForPreTraining", "electra_wide_discriminator"),
    ],
)
def test_the_width_of_embeddings_selects_the_family_of_electra(embedding, architecture, name):
    config = {"model_type": "electra", "architectures": [architecture], "embedding_size": embedding, "hidden_size": 16}
    assert family_of(config, "config.json").name == name


@pytest.mark.grid
def test_an_electra_whose_embeddings_are_projected_to_their_own_width_has_no_config_json():
    small = ["d_model=16", "d_embedding=16", "heads=2", "layers=1", "vocab=30", "d_ff=8"]
    composed = compose_model("electra", small)
    spec = check_model(composed.model, composed.sources)
    assert find_published(spec, composed.mapping, OwnVocabulary(30, 1, 2)) is None


def test_constants_in_float16_are_those_of_the_model(tmp_path):
    theirs = door("apertus", tmp_path / "theirs")
    theirs.half().save_pretrained(tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "knobs"),
    [("bamba", {"attention": ":", "layers": 2}), ("gpt_neo", {"layers": 1}), ("gpt_neo", {"layers": 2})],
)
def test_a_knob_of_layers_that_a_model_lacks_is_no_mistake(name, knobs):
    composed = published_of(name, **knobs).compose()
    check_model(composed.model, composed.sources)
