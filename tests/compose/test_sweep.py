"""Values that move together in a sweep."""

import pytest

from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.overrides import parse_overrides
from tfm_blocks.compose.sweep import combinations, join_parts, list_parts, read_sweep
from tfm_blocks.errors import ConfigError
from tfm_blocks.sweep.command import job_names
from tfm_blocks.sweep.settings import read_sweep_settings


def settings(*overrides):
    return read_sweep_settings(read_sweep(parse_request(["-m", *overrides])).settings)


def jobs(*overrides):
    request = read_sweep(parse_request(["-m", *overrides]))
    return combinations(join_parts(request.parts, settings(*overrides).together))


@pytest.mark.grid
def test_keys_that_move_together_are_paired_and_crossed_with_the_others():
    overrides = jobs("model=tiny,prenorm", "seed=1,2", "d_model=64,128", "heads=4", "sweep.together=[model,d_model]")
    assert overrides == [
        [f"model={model}", f"d_model={width}", f"seed={seed}", "heads=4"]
        for model, width in (("tiny", 64), ("prenorm", 128))
        for seed in (1, 2)
    ]


def test_several_groups_move_independently():
    overrides = jobs(
        "heads=2,4", "d_model=64,128", "seed=1,2", "data.seed=3,4", "sweep.together=[[heads,d_model],[seed,data.seed]]"
    )
    assert [tuple(text.partition("=")[2] for text in job) for job in overrides] == [
        ("2", "64", "1", "3"), ("2", "64", "2", "4"), ("4", "128", "1", "3"), ("4", "128", "2", "4")
    ]  # fmt: skip


def test_a_quotient_and_a_whole_quotient_are_two_values():
    assert [job[0] for job in jobs("d_ff=d_model//2,d_model/2")] == ["d_ff=d_model//2", "d_ff=d_model/2"]


@pytest.mark.grid
def test_the_names_of_paired_jobs_are_distinct():
    overrides = ["model=tiny,prenorm", "seed=1,2", "d_model=64,128", "sweep.together=[model,d_model]"]
    names = job_names(read_sweep(parse_request(["-m", *overrides])).swept, jobs(*overrides))
    assert names[0] == "model-tiny_seed-1_d_model-64" and len(set(names)) == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model=tiny,prenorm", "d_model=64,96,128", "sweep.together=[model,d_model]"],
            "sweep.together: keys that move together need equally many values, but model has 2, d_model has 3",
        ),
        (["heads=2,4", "sweep.together=[heads,d_model]"], "names d_model, which has no list of values"),
        (["heads=2,4", "d_ff=8,9", "sweep.together=[[heads,d_ff],[heads,d_ff]]"], "names heads twice"),
        (["heads=2,4,2"], "heads: lists one value twice: 2 and 2"),
        (["data=multi30k", "data.dir=c2/x,./c2/x"], "data.dir: lists one value twice: c2/x and ./c2/x"),
        (["heads=2,4", "sweep.together=[heads]"], "sweep.together: must hold at least 2, but holds 1"),
        (["heads=2,4", "sweep.together=heads"], "sweep.together: must be a list, but is 'heads'"),
        (["sweep=optuna", "heads=2,4", "d_ff=8,9", "sweep.together=[heads,d_ff]"], "optuna chooses each value alone"),
    ],
)
def test_a_group_that_cannot_move_together_is_refused_with_the_rule(overrides, message):
    with pytest.raises(ConfigError) as raised:
        jobs(*overrides)
    assert message in str(raised.value)


def test_parts_that_are_in_no_group_stay():
    parts = list_parts(parse_overrides(["heads=2,4", "seed=1,2"]), [CONF])
    assert join_parts(parts, []) == parts


@pytest.mark.parametrize("key", ["sweep.name", "sweep.parallel", "match.like"])
def test_a_setting_of_a_sweep_that_cannot_be_resolved_is_an_error_at_its_key(key):
    with pytest.raises(ConfigError, match=f"{key}: .*'x' not found"):
        read_sweep(parse_request(["-m", "seed=1,2", f"{key}=${{x}}"]))


@pytest.mark.grid
def test_quotes_do_not_change_the_choices_of_a_group():
    assert jobs("model='tiny',\"prenorm\"") == jobs("model=tiny,prenorm")
