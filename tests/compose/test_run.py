"""One run."""

import pytest

from tfm_blocks.compose.run import run_name


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
