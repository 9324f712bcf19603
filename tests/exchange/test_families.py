"""Families that are only doors: equal logits, equal greedy output, the same bytes back, and errors by key."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tfm_blocks as tfm
from tests.exchange.doors import DOORS, door, sizes_of
from tests.exchange.test_import import far_apart, files_of, logits_of_both, logits_of_encoders
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.vocabulary import OwnVocabulary
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.exchange.config import read_published
from tfm_blocks.exchange.exporting import export_run, find_published
from tfm_blocks.exchange.family import families, is_shipped
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.exchange.weights import names_pattern
from tfm_blocks.network.build import check_model
from tfm_blocks.translation.settings import Search

TOKENS = 20
each_family = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("mistral", "gpt_neox") else [pytest.mark.grid]) for name in DOORS]
)


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


@each_family
def test_a_missing_key_has_the_default_of_its_class(name):
    """The keys that the class of transformers would set, and a config without them, give the same model or errors."""
    family, config = families()[name], getattr(transformers, families()[name].architecture).config_class
    whole, outcomes = json.loads(config().to_json_string(use_diff=False)), []
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
        *outer, inner = key.split(".")
        place = changed
        for part in outer:
            place = place.setdefault(part, {}) if isinstance(place.get(part), dict | None) else {}
        place[inner] = other(value)
        with pytest.raises(RunError) as error:
            read_published(family, changed, {}, 10**6, "config.json")
        text = str(error.value)
        assert f"config.json: {key}: " in text and "help: " in text, text


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
