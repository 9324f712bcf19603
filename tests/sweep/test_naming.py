"""Names of jobs."""

import re

from hypothesis import given
from hypothesis import strategies as st

from tfm_blocks.sweep.command import job_names, sweep_name


def test_names_list_only_differences():
    swept = ["model", "heads", "schedule.scale"]
    assert sweep_name(swept) == "model_heads_scale"
    assert job_names(swept, [["seed=1", "model=base", "heads=2", "schedule.scale=1e+38"]]) == [
        "model-base_heads-2_scale-1e38"
    ]


def test_keys_with_equal_ends_are_written_in_full():
    assert job_names(["data.train", "x.train"], [["data.train=1", "x.train=2"]]) == ["data.train-1_x.train-2"]


def test_a_sweep_of_one_job_has_a_name():
    assert sweep_name([]) == "sweep" and job_names([], [[]]) == ["run"]


@given(st.lists(st.text(max_size=120), min_size=1, max_size=6))
def test_names_are_distinct_and_valid_folder_names(values):
    names = job_names(["a.key"], [[f"a.key={value}"] for value in values])
    assert len(set(names)) == len(values)
    assert all(re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII) for name in names)
