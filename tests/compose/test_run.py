"""Composing one run."""

from typing import Any

import pytest

from tests.conftest import COMPOSER
from tfm_blocks.compose.command_line import compose_arguments, parse_request
from tfm_blocks.compose.run import (
    compose_job,
    compose_resumed,
    compose_run,
    read_resume_folder,
    run_name,
)
from tfm_blocks.compose.sweep import read_sweep
from tfm_blocks.errors import ConfigError
from tfm_blocks.sweep.settings import read_sweep_settings


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["heads=8", "++model.add_norm=pre"], "base-dates-heads8-add_normpre"),
        (["name=x", "data.dir=/a/b", "trainer.steps=3"], "base-dates-steps3"),
        (["model.args.x='a b=c'"], "base-dates-x_a_b_c_"),
        (["model=base", "optimizer=adamw"], "base-dates-adamw"),
    ],
)
def test_a_run_is_named_after_what_the_command_line_changes(overrides, name):
    assert run_name({"model": "base", "data": "dates", "optimizer": "adamw"}, overrides) == name


@pytest.mark.parametrize("name", ["2024_01_15", "1e3", "007", "true", "inf", "'2024'", "plain"])
def test_a_name_that_looks_like_a_number_is_kept_as_typed(name):
    typed = parse_request([f"name={name}", f"sweep.name={name}"])
    mapping = compose_run(compose_arguments(typed)).mapping
    assert [mapping["name"], mapping["sweep_name"]] == [name.strip("'")] * 2
    request = read_sweep(parse_request(["-m", f"sweep.name={name}"]))
    assert read_sweep_settings(request.settings).name == name.strip("'")


def test_other_keys_and_a_missing_name_keep_their_types():
    config = compose_arguments(["name=null", "seed=1000"])
    assert compose_run(config).mapping["name"] == "tiny-dates-seed1000" and config.seed == 1000


@pytest.mark.parametrize(
    ("overrides", "smoothing"),
    [(["data=dates"], 0.1), (["data=lm", "data.dir=x"], 0.0), (["data=lm", "data.dir=x", "label_smoothing=0.2"], 0.2),
     (["data=dates", "label_smoothing=0"], 0), (["experiment=large", "data.dir=x"], 0.1), (["experiment=probe/lite"], 0.0)],
)  # fmt: skip
def test_language_models_train_without_label_smoothing_unless_the_user_sets_it(overrides, smoothing):
    composed = compose_run(compose_arguments([*overrides, "model=decoder_only"]))
    assert (
        composed.mapping["label_smoothing"] == composed.with_values({"seed": 3}).mapping["label_smoothing"] == smoothing
    )


def test_long_names_are_cut_and_stay_different():
    one, two = (run_name({"model": "base", "data": "dates"}, ["model.args.x=" + "a" * 200 + end]) for end in "bc")
    assert len(one) == len(two) == 100 and one != two


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("resume=${x}", read_resume_folder),
        ("resume='runs/${x}'", read_resume_folder),
        ("trainer.steps=${x}", lambda config: compose_resumed(config, {"plugins": []}, "config.yaml", "")),
        ("plugins=[${x}]", lambda config: compose_resumed(config, {"plugins": []}, "config.yaml", "")),
    ],
)
def test_a_value_that_cannot_be_resolved_is_an_error_at_its_key(override, read):
    config = compose_arguments([override])
    with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}.*: .*'x' not found"):
        read(config)


@pytest.mark.parametrize(
    ("overrides", "optimizer", "schedule"),
    [
        (["optimizer=muon"], {"momentum": 0.95, "weight_decay": 0.1}, {"floor": 0.1, "warmup": 0.02}),
        (["schedule=noam"], {"betas": [0.9, 0.95], "eps": 1e-8}, {"scale": 0.1}),
        (["optimizer=adamw"], {"betas": [0.9, 0.95], "weight_decay": 0.1}, {"floor": 0.1}),
    ],
)
def test_another_optimizer_or_schedule_leaves_the_settings_of_an_experiment_that_it_lacks(
    overrides: list[str], optimizer: dict[str, Any], schedule: dict[str, Any]
) -> None:
    found = compose_job(["experiment=lm", "data.dir=x", "name=run", *overrides], COMPOSER).mapping
    assert found["optimizer"].items() >= optimizer.items() and found["schedule"].items() >= schedule.items()
    assert ("betas" in found["optimizer"], "peak" in found["schedule"]) == (
        overrides != ["optimizer=muon"],
        overrides != ["schedule=noam"],
    )


def test_a_typed_setting_that_the_optimizer_lacks_stays_an_error() -> None:
    overrides = ["experiment=lm", "data.dir=x", "name=run", "optimizer=muon", "+optimizer.betas=[0,1]"]
    composed = compose_job(overrides, COMPOSER)
    assert composed.mapping["optimizer"]["betas"] == [0, 1]
