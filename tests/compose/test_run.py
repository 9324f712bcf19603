"""Composing one run."""

import pytest

from tfm_blocks.compose.command_line import prepare_arguments
from tfm_blocks.compose.run import compose_arguments, compose_resumed, read_resume_folder, run_name, should_verify
from tfm_blocks.errors import ConfigError


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


def test_long_names_are_cut_and_stay_different():
    one, two = (run_name({"model": "base", "data": "dates"}, ["model.args.x=" + "a" * 200 + end]) for end in "bc")
    assert len(one) == len(two) == 100 and one != two


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("resume=${x}", read_resume_folder),
        ("resume='runs/${x}'", read_resume_folder),
        ("verify=${x}", should_verify),
        ("trainer.steps=${x}", lambda config: compose_resumed(config, {"plugins": []}, "config.yaml", "")),
        ("plugins=[${x}]", lambda config: compose_resumed(config, {"plugins": []}, "config.yaml", "")),
    ],
)
def test_a_value_that_cannot_be_resolved_is_an_error_at_its_key(override, read):
    config = compose_arguments(prepare_arguments([override]))
    with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}.*: .*'x' not found"):
        read(config)
