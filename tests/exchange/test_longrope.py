"""LongRoPE: the short list of factors up to the trained length, or the long list at all lengths, as in transformers."""

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

import tfm_blocks as tfm
from tests.exchange.doors import SIZES
from tests.exchange.layouts import change_config
from tests.exchange.published import VOCAB, without_ends, write_tokenizer
from tests.exchange.test_import import expect_equal_texts, expect_restored, far_apart, own_ids, random_ids
from tests.oracles.references import scatter
from tfm_blocks.blocks.layers.state import CacheShape
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError, LimitError, RunError
from tfm_blocks.exchange.config import read_published, with_knobs
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.exchange.family import families
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.network.build import check_model
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.translation.save import save_network
from tfm_blocks.translation.settings import Search

TRAINED, LONGER = 24, 40
LISTS = {"short_factor": [1.0, 1.5, 1.25], "long_factor": [1.25, 3.5, 9.0]}
ROPE = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75, **LISTS}
LENGTHS = {"original_max_position_embeddings": TRAINED, "max_position_embeddings": 8 * TRAINED}


def published(folder, **changes):
    """Write a random Phi-3 with LongRoPE for three pairs of each head, and return it."""
    torch.manual_seed(1)
    sizes = {**SIZES, "hidden_size": 32, **LENGTHS, "rope_parameters": ROPE, **changes}
    theirs = Phi3ForCausalLM(Phi3Config(**sizes)).eval()
    scatter(theirs)
    theirs.save_pretrained(folder)
    without_ends(theirs, folder)
    write_tokenizer(folder)
    return theirs


@torch.no_grad()
def difference(theirs, ours, length):
    """Return the relative difference of the logits for sequences of that length."""
    ids_BN = random_ids(3, length)
    logits_BNV = ours.network(tgt=own_ids(ours, ids_BN))
    return far_apart(logits_BNV[..., own_ids(ours, torch.arange(VOCAB)[None])[0]], theirs(input_ids=ids_BN).logits)


def imported(folder, **options):
    import_folder(folder / "theirs", folder / "run", **options)
    return tfm.load(folder / "run")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"sliding_window": 262144}, marks=pytest.mark.grid),
        pytest.param({"sliding_window": 5}, marks=pytest.mark.grid),
        pytest.param({"rope_parameters": {**ROPE, "attention_factor": 1.3}}, marks=pytest.mark.grid),
        pytest.param({"rope_parameters": {**ROPE, "factor": 4.0}}, marks=pytest.mark.grid),
    ],
)
def test_the_logits_are_those_of_transformers_on_both_sides_of_the_trained_length(changes, tmp_path):
    theirs = published(tmp_path / "theirs", **changes)
    overrides = import_folder(tmp_path / "theirs", tmp_path / "run").overrides
    short = tfm.load(tmp_path / "run")
    composed = compose_model(overrides[0].removeprefix("model="), [*overrides[1:], f"vocab={short.tokenizer.size}"])
    assert check_model(composed.model, composed.sources).nodes == short.network.spec.nodes
    assert difference(theirs, short, TRAINED) < 1e-5
    expect_equal_texts(theirs, short, least=1)
    expect_restored(tmp_path)
    (tmp_path / "run").rename(tmp_path / "short")
    long = imported(tmp_path, long=True)
    assert difference(theirs, long, LONGER) < 1e-5
    assert difference(theirs, long, TRAINED) > 1e-3  # the lists differ


def test_the_run_of_the_long_list_is_exported_with_this_list_for_all_lengths(tmp_path):
    theirs = published(tmp_path / "theirs")
    long = imported(tmp_path, long=True)
    export_run(tmp_path / "run", tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert difference(back, long, TRAINED) < 1e-5 and difference(back, long, LONGER) < 1e-5
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("theirs", "back")]
    assert weights[0] == weights[1]
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "back")]
    configs[0]["rope_parameters"]["short_factor"] = theirs.config.rope_parameters["long_factor"]
    assert configs[0] == configs[1]


def test_longer_inputs_are_refused_by_the_network_in_one_pass_and_step_by_step(tmp_path, capsys):
    published(tmp_path / "theirs")
    main(["import", str(tmp_path / "theirs"), "-o", str(tmp_path / "run")])
    assert f"reads at most {TRAINED} tokens: the short factors of LongRoPE; --long" in capsys.readouterr().out
    ours = tfm.load(tmp_path / "run")
    assert ours.network.longest("tgt").tokens == TRAINED
    with pytest.raises(ValueError, match=rf"max_length = {TRAINED} positions, but the sequence has {TRAINED + 1}"):
        ours.network(tgt=own_ids(ours, random_ids(1, TRAINED + 1)))
    block = ours.network.get_submodule("decoder.0.self").block
    x_11D = torch.randn(1, 1, 32)
    state = block.start(room=CacheShape(1, TRAINED + 1, x_11D))
    state.position = TRAINED - 1
    block.step(x_11D, state)
    state.position = TRAINED
    with pytest.raises(ValueError, match=f"the sequence has {TRAINED + 1}"):
        block.step(x_11D, state)
    with pytest.raises(LimitError, match=f"has {TRAINED + 2} tokens, but the model has {TRAINED} positions"):
        list(ours.generate([" ".join(["w5"] * (TRAINED + 2))], 4, Search()))


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_the_keys_of_published_folders_mean_the_same(kind, tmp_path):
    theirs = published(tmp_path / "theirs")
    old = {"rope_theta": 100.0, "partial_rotary_factor": 0.75, "rope_scaling": {"type": kind, **LISTS}}
    phi_4 = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "sliding_window": 262144}
    change_config(
        tmp_path / "theirs", lambda config: {k: v for k, v in config.items() if k != "rope_parameters"} | old | phi_4
    )
    ours = imported(tmp_path)
    assert difference(theirs, ours, TRAINED) < 1e-5
    if kind == "longrope":  # transformers 5 does not load the other
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
        assert difference(again, ours, TRAINED) < 1e-5
        expect_restored(tmp_path)


def test_a_new_run_is_exported_with_its_list_for_all_lengths(tmp_path):
    published(tmp_path / "theirs")
    ours = imported(tmp_path)
    save_network(ours.network, tmp_path / "new", ours.tokenizer, SavedRun(tmp_path / "run").config)
    assert export_run(tmp_path / "new", tmp_path / "back")[0] == "Phi3ForCausalLM"
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (
        written["rope_parameters"]["short_factor"] == written["rope_parameters"]["long_factor"] == LISTS["short_factor"]
    )
    assert written["original_max_position_embeddings"] == TRAINED
    assert difference(AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval(), ours, TRAINED) < 1e-5


def config_of(**changes):
    return (
        json.loads(Phi3Config(**{**SIZES, "hidden_size": 32, **LENGTHS, "rope_parameters": ROPE}).to_json_string())
        | changes
    )


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"eps": 1e-3}, ROPE),
        ({"base": 50.0}, {**ROPE, "rope_theta": 50.0, "long_factor": LISTS["short_factor"]}),
        ({"max_length": None}, {**ROPE, "long_factor": LISTS["short_factor"]}),
        *(
            ({"factors": numbers}, {**ROPE, **{key: [1.0, 1.5, 2.0] for key in LISTS}})
            for numbers in ("1 3/2 2", [1, 1.5, 2])
        ),
        ({"rope": "rotary", "factor": 1.0}, {"rope_type": "default", "rope_theta": 100.0}),
    ],
)
def test_a_further_trained_model_keeps_both_lists_unless_its_positions_change(knobs, expected):
    config = config_of()
    stated = read_published(families()["phi3"], config, {}, 10**6, "config.json")
    changed = with_knobs(config, stated, replace(stated, knobs={**stated.sizes, **knobs}))
    theirs = Phi3Config.from_dict(changed)
    assert theirs.rope_parameters.items() >= expected.items()


@pytest.mark.parametrize("value", ["x", [1], 5])
def test_a_key_with_the_name_of_a_knob_is_unknown_and_not_the_knob(value):
    with pytest.raises(RunError) as error:
        read_published(families()["phi3"], config_of(d_head=value), {}, 10**6, "config.json")
    (problem,) = error.value.problems
    assert problem.address == "config.json: d_head" and problem.rule.startswith("has no counterpart")


def test_equal_lists_have_no_bound():
    config = config_of(rope_parameters={**ROPE, "long_factor": [1, 1.5, 1.25], "original_max_position_embeddings": 9})
    assert read_published(families()["phi3"], config, {}, 10**6, "config.json").knobs["max_length"] is None


SHORT = r"rope_parameters\.short_factor: must "


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"short_factor": [1.0, 2.0]}, SHORT + "be a list of 3 numbers, one for each pair, but has 2"),
        ({"short_factor": [1.0] * 100_000}, SHORT + "be a list of 3 numbers, one for each pair, but has 100000"),
        ({"short_factor": "1 2 3"}, SHORT + "be a list of 3 numbers, one for each pair, but is '1 2 3'"),
        ({"short_factor": 1.0}, SHORT + "be a list of 3 numbers"),
        ({"short_factor": []}, SHORT + "be a list of 3 numbers"),
        ({"short_factor": None}, SHORT + "be a list of 3 numbers"),
        *(
            ({"short_factor": [1.0, value, 1.0]}, SHORT + "have numbers from 1e-06 to 1000000.0, but number 2 is")
            for value in ("1", None, True, [1.0], 0, -1.5, 1e300, 10**400, 1e-300, float("inf"), {"__float__": "NaN"})
        ),
        ({"long_factor": [1.0]}, r"rope_parameters\.long_factor: must be a list of 3 numbers"),
        ({"long_factor": [0.0, 1.0, 1.0]}, r"rope_parameters\.long_factor: must have numbers from"),
        ({"rope_type": "yarn"}, r"rope_parameters\.rope_type: must be 'default' or 'longrope' or 'su', but is 'yarn'"),
        ({"factor": "8"}, r"rope_parameters\.factor: must be a number, but is '8'"),
        ({"short_mscale": 1.1}, r"rope_parameters\.short_mscale: has no counterpart"),
    ],
)
def test_hostile_lists_are_refused_by_key_with_a_fix(changes, rule):
    with pytest.raises((RunError, ConfigError)) as error:
        published = read_published(
            families()["phi3"], config_of(rope_parameters={**ROPE, **changes}), {}, 10**6, "config.json"
        )
        published.compose()
    text = str(error.value)
    assert re.search(rf"config\.json: {rule}", text) and "help: " in text, text
    assert len(text) < 2000


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"max_position_embeddings": "x"}, "factor: is missing, and max_position_embeddings, which would replace it"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings: must be a whole number from 1"),
    ],
)
def test_hostile_lengths_are_refused_by_key(changes, rule):
    with pytest.raises(RunError, match=rf"config\.json: (rope_parameters\.)?{rule}"):
        read_published(families()["phi3"], config_of(**changes), {}, 10**6, "config.json")


def test_the_long_list_of_another_model_is_refused(tmp_path):
    published(tmp_path / "theirs", rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    with pytest.raises(ConfigError, match="--long: needs a model with LongRoPE"):
        imported(tmp_path, long=True)
