"""Folders in the layouts of hubs and of earlier versions are imported with the logits of transformers."""

import itertools
import json
import shutil
from importlib.resources import files

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import tfm_blocks as tfm
from tests.exchange.layouts import LAYOUTS, change_config, change_weights
from tests.exchange.published import FAMILIES, GREEDY, publish
from tests.exchange.test_import import far_apart, logits_of_both, logits_of_encoders
from tests.oracles.references import ENCODERS
from tfm_blocks.errors import DataError, RunError
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.exchange.own_family import read_own_family
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.translation.save import save_network
from tfm_blocks.translation.settings import Search

PAIRS = [*itertools.product((*FAMILIES, *ENCODERS), LAYOUTS)]
QUICK = [(FAMILIES[number % len(FAMILIES)], layout) for number, layout in enumerate(LAYOUTS)]
QUICK += [("bert", "with_copies"), ("bert", "of_another_output")]


def load_theirs(folder, theirs):
    """Return the model that transformers reads from a folder."""
    load = AutoModelForSeq2SeqLM if theirs.config.is_encoder_decoder else AutoModelForCausalLM
    load = AutoModelForMaskedLM if theirs.config.model_type in ENCODERS else load
    return load.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.grid]) for pair in PAIRS],
)
def test_every_layout_of_every_family_has_the_logits_of_transformers(name, layout, tmp_path):
    saved = publish(name, tmp_path / "theirs")
    LAYOUTS[layout](tmp_path / "theirs", saved)
    theirs = load_theirs(tmp_path / "theirs", saved)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    ours = tfm.load(tmp_path / "run")
    logits = logits_of_encoders if name in ENCODERS else logits_of_both
    assert far_apart(*logits(theirs, ours)) < 2e-5
    export_run(tmp_path / "run", tmp_path / "back")
    back = load_theirs(tmp_path / "back", saved)
    wide = 1e-2 if layout in ("in_halves", "in_brain_floats") else 2e-5
    assert far_apart(*(logits(model, ours)[1] for model in (back, theirs))) < wide


def lengthened(folder, name, **config):
    """Return a published model without generation_config.json, and the ids that it generates after two prompts."""
    theirs = publish(name, folder, **config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    prompts = torch.tensor([[theirs.config.bos_token_id or 0, 5, 9], [theirs.config.bos_token_id or 0, 17, 4]])
    theirs.generation_config.eos_token_id = None
    return theirs, prompts, theirs.generate(prompts, attention_mask=torch.ones_like(prompts), **GREEDY)[:, 3:]


@pytest.mark.grid
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_each_of_several_ids_of_eos_ends_a_text(file, tmp_path):
    theirs, prompts, free = lengthened(tmp_path / "theirs", "llama", bos_token_id=1, eos_token_id=2)
    ends = [2, *{free[0, 3].item(), free[1, 2].item()} - {2}]
    path = tmp_path / "theirs" / file
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(config | {"eos_token_id": [*ends, 1000]}))  # the model cannot generate the last
    theirs.generation_config.eos_token_id = ends
    expected = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), pad_token_id=2, **GREEDY)[:, 3:]
    assert expected.shape[1] < free.shape[1]
    import_folder(tmp_path / "theirs", tmp_path / "run")
    ours = tfm.load(tmp_path / "run")
    texts = ["".join(f" w{id}" for id in row if id not in ends) for row in expected.tolist()]
    for beam in ({}, {"beam": 3, "patient": True}):
        written = [best.text for (best,) in ours.generate(["w1 w5 w9", "w1 w17 w4"], 9, Search(**beam))]
        assert written == texts if not beam else all(f"w{end}" not in text.split() for end in ends for text in written)
    export_run(tmp_path / "run", tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert [*{*back.generation_config.eos_token_id} & {*range(37)}] == [*{*ends}]
    save_network(ours.network, tmp_path / "new", ours.tokenizer, SavedRun(tmp_path / "run").config)
    export_run(tmp_path / "new", tmp_path / "new-back")  # without the imported config.json
    assert json.loads((tmp_path / "new-back" / "config.json").read_text())["eos_token_id"] == ends


def test_an_added_token_beyond_the_embeddings_is_refused_only_in_a_text(tmp_path):
    publish("llama", tmp_path / "theirs", pad_token_id=None)
    tokens = Tokenizer.from_file(str(tmp_path / "theirs" / "tokenizer.json"))
    tokens.add_tokens(["[PAD]"])
    tokens.save(str(tmp_path / "theirs" / "tokenizer.json"))
    change_config(tmp_path / "theirs", lambda config: config | {"pad_token_id": 37})
    import_folder(tmp_path / "theirs", tmp_path / "run")
    ours = tfm.load(tmp_path / "run")
    assert ours.generate(["w5 w9"], 3, Search())
    with pytest.raises(DataError, match=r"has the token \[PAD\] with the id 37, but the model has 37 ids"):
        ours.generate(["w5 [PAD]"], 3, Search())


@pytest.mark.parametrize("rope_type", ["yarn", "llama3"])
def test_scaled_positions_without_their_trained_length_have_the_default_of_transformers(rope_type, tmp_path):
    rope = {"rope_theta": 100.0, "rope_type": rope_type, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope_type == "yarn":
        rope = {"rope_theta": 100.0, "rope_type": "yarn", "factor": 2.0}
    saved = publish("llama", tmp_path / "theirs", rope_parameters=rope, max_position_embeddings=8)
    for length in ({"max_position_embeddings": 8}, {}):
        rest = lambda config: {key: value for key, value in config.items() if "position" not in key}  # noqa: E731
        change_config(tmp_path / "theirs", lambda config: rest(config) | length | {"rope_parameters": rope})  # noqa: B023
        run = tmp_path / f"run{len(length)}"
        import_folder(tmp_path / "theirs", run)
        assert far_apart(*logits_of_both(load_theirs(tmp_path / "theirs", saved), tfm.load(run))) < 1e-5


def test_copies_of_a_matrix_that_differ_are_refused_by_name(tmp_path):
    publish("bart", tmp_path / "theirs")
    other = {"model.decoder.embed_tokens.weight": torch.zeros(37, 16)}
    change_weights(tmp_path / "theirs", lambda weights: weights | other)
    rule = r"model\.decoder\.embed_tokens\.weight differs from model\.shared\.weight(.|\n)*remove model\.decoder"
    with pytest.raises(RunError, match=rule):
        import_folder(tmp_path / "theirs", tmp_path / "run")


def test_stored_positions_that_differ_from_the_computed_ones_are_refused(tmp_path):
    saved = publish("marian", tmp_path / "theirs")
    sines = saved.model.encoder.embed_positions.weight.detach().clone()
    for name, values in {
        "equal": sines,
        "half": sines.half(),
        "other": sines.roll(1, 0),
        "narrow": sines[:, :-1],
        "scalar": sines[0, 0],
    }.items():
        shutil.copytree(tmp_path / "theirs", tmp_path / name)
        stored = {"model.decoder.embed_positions.weight": values.contiguous()}
        change_weights(tmp_path / name, lambda weights: weights | stored)  # noqa: B023
        if name in ("equal", "half"):
            import_folder(tmp_path / name, tmp_path / f"{name}-run")
            continue
        rule = r"model\.decoder\.embed_positions\.weight differs from the values that the model computes at tgt_pos"
        with pytest.raises(RunError, match=rule):
            import_folder(tmp_path / name, tmp_path / f"{name}-run")


def test_a_node_that_computes_no_values_to_store_is_refused(tmp_path):
    saved = publish("marian", tmp_path / "theirs")
    sines = saved.model.decoder.embed_positions.weight.detach().clone()
    change_weights(tmp_path / "theirs", lambda weights: weights | {"model.decoder.embed_positions.weight": sines})
    text = (files("tfm_blocks.exchange") / "families" / "marian.yaml").read_text("utf-8")
    (tmp_path / "other.yaml").write_text(text.replace("positions.weight: tgt_pos", "positions.weight: tgt_emb"))
    with pytest.raises(RunError, match="family other: computed: the model has no positions or rates at tgt_emb"):
        import_folder(tmp_path / "theirs", tmp_path / "run", read_own_family(tmp_path / "other.yaml"))


def test_a_base_model_without_its_output_matrix_is_refused_with_the_reason(tmp_path):
    saved = publish("llama", tmp_path / "theirs")
    saved.model.save_pretrained(tmp_path / "base")
    shutil.copy(tmp_path / "theirs" / "tokenizer.json", tmp_path / "base")
    with pytest.raises(RunError, match=r"lacks the tensor lm_head\.weight"):
        import_folder(tmp_path / "base", tmp_path / "run")
