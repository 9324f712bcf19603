"""Composing one run."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.version import VersionBase
from omegaconf import OmegaConf

from tests.conftest import COMPOSER
from tfm_blocks.compose.command_line import compose_arguments, parse_request
from tfm_blocks.compose.composition import Composer
from tfm_blocks.compose.folders import CONF, config_folders
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
        ("plugins=[${x}]", lambda config: compose_resumed(config, {"plugins": []}, "config.yaml", "")),
    ],
)
def test_a_value_that_cannot_be_resolved_is_an_error_at_its_key(override, read):
    config = compose_arguments([override])
    with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}.*: .*'x' not found"):
        read(config)


def test_the_generator_of_a_shipped_model_keeps_its_name_and_its_errors() -> None:
    typed = ["model=electra", "objective=replaced_token", "data=lm", "data.dir=x"]
    composed = compose_run(compose_arguments([*typed, "objective.generator={model: electra_wide}"]))
    assert composed.mapping["objective"]["generator"]["model"] == "electra_wide"
    with pytest.raises(ConfigError, match=r"objective\.generator\.model: .*nope"):
        compose_run(compose_arguments([*typed, "objective.generator={model: ${nope}}"]))


def test_a_resume_takes_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "70")
    recorded = {"plugins": [], "trainer": {"steps": 60}}
    config = compose_arguments(["resume=runs/a", "trainer.steps=${oc.env:STEPS}"])
    assert compose_resumed(config, recorded, "config.yaml", "").mapping["trainer"]["steps"] == "70"


@pytest.mark.parametrize(
    ("overrides", "optimizer", "schedule"),
    [
        (["optimizer=muon"], {"momentum": 0.95, "weight_decay": 0.1}, {"floor": 0.1, "warmup": 0.02}),
        (["schedule=noam"], {"betas": [0.9, 0.95], "eps": 1e-8}, {"scale": 0.1}),
        (["optimizer=adamw"], {"betas": [0.9, 0.95], "weight_decay": 0.1}, {"floor": 0.1}),
        (["debug=overfit"], {"betas": [0.9, 0.95]}, {"name": "inverse_sqrt", "peak": 2e-3, "warmup": 20}),
    ],
)
def test_another_optimizer_or_schedule_leaves_the_settings_of_an_experiment_that_it_lacks(
    overrides: list[str], optimizer: dict[str, Any], schedule: dict[str, Any]
) -> None:
    found = compose_job(["experiment=lm", "data.dir=x", "name=run", *overrides], COMPOSER).mapping
    assert found["optimizer"].items() >= optimizer.items() and found["schedule"].items() >= schedule.items()
    assert ("betas" in found["optimizer"]) == (overrides != ["optimizer=muon"])
    assert ("peak" in found["schedule"]) == (overrides != ["schedule=noam"])
    assert ("floor" in found["schedule"]) == (overrides not in (["schedule=noam"], ["debug=overfit"]))


def test_a_child_of_an_experiment_chooses_another_schedule_and_its_own_mistakes_stay_errors(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    child = "# @package _global_\ndefaults: [lm, override /schedule: constant]\nschedule: {warmpu: 3}\n"
    (tmp_path / "experiment" / "child.yaml").write_text(child)
    composer = Composer(config_folders(tmp_path))
    found = compose_job(["experiment=child", "data.dir=x", "name=run"], composer).mapping["schedule"]
    assert (found["warmup"], found["warmpu"]) == (0.02, 3) and "floor" not in found


def test_an_option_in_a_subfolder_keeps_its_settings(tmp_path: Path) -> None:
    (tmp_path / "optimizer" / "sub").mkdir(parents=True)
    (tmp_path / "optimizer" / "sub" / "mine.yaml").write_text((CONF / "optimizer" / "muon.yaml").read_text())
    composer = Composer(config_folders(tmp_path))
    for experiment in ([], ["experiment=lm", "data.dir=x"]):
        mine, muon = (
            compose_job([*experiment, "name=run", f"optimizer={name}"], composer).mapping["optimizer"]
            for name in ("sub/mine", "muon")
        )
        assert mine == muon and "betas" not in mine


@pytest.mark.parametrize(
    "override",
    ["data.mix.web.weight=2", "data.mix={new: {dir: x}}", "data.patterns.nl=[d MMMM y]", "objective.weights.neg=2.0",
     "objective.denoisers={mine: {density: 0.2}}", "objective.generator.layers=3", "objective.hidden.decoder=decoder",
     "losses.blocks.decoder=0.1"],
)  # fmt: skip
def test_a_key_chosen_by_the_user_needs_no_plus(override: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    mix = "# @package _global_\ndefaults: [{override /data: text}]\ndata: {mix: {own: {}, web: {dir: web}}}\n"
    (tmp_path / "experiment" / "mixed.yaml").write_text(mix)
    groups = {"data.mix": ["experiment=mixed"], "data.patterns": ["data=dates"], "objective.weights": ["objective=label"],
              "objective.denoisers": ["objective=ul2"], "objective.generator": ["objective=replaced_token"],
              "objective.hidden": ["objective=distil"], "losses.blocks": []}  # fmt: skip
    key, _, value = override.partition("=")
    group = groups[".".join(key.split(".")[:2])]
    config = compose_arguments([*group, override, "--config-dir", str(tmp_path)])
    value, chosen = yaml.safe_load(value), OmegaConf.select(config, key)
    assert chosen.items() >= value.items() if isinstance(value, dict) else chosen == value


def test_a_typed_setting_that_the_optimizer_lacks_stays_an_error() -> None:
    overrides = ["experiment=lm", "data.dir=x", "name=run", "optimizer=muon", "+optimizer.betas=[0,1]"]
    composed = compose_job(overrides, COMPOSER)
    assert composed.mapping["optimizer"]["betas"] == [0, 1]


def test_a_callers_own_hydra_does_not_change(tmp_path):
    """Its files are read as Hydra reads them, also while it is initialised."""
    (tmp_path / "own.yaml").write_text("flag: on\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        compose_arguments(["layers=1"])
        assert compose("own").flag is True
        assert str(VersionBase.instance().getbase()) == "1.3"


@pytest.mark.grid
def test_a_generator_is_a_model_of_the_config_dir(tmp_path):
    path = tmp_path / "model" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("defaults: [electra, _self_]\n")
    for name, model in (("mine", str(path)), ("electra", "electra")):
        words = ["--config-dir", str(tmp_path), "objective=replaced_token", f"objective.generator={{model: {name}}}"]
        assert compose_run(compose_arguments(words)).mapping["objective"]["generator"]["model"] == model
