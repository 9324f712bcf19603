"""Samples side by side."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import sentences
from tests.run_folders import garbled, leave_run
from tfm_blocks.report.differences import Group
from tfm_blocks.report.samples import MOST_SAMPLES, common_test_set, mark, samples_of
from tfm_blocks.runs.record import read_records

REFERENCES = sentences(100, 7)


@given(st.text(max_size=40), st.text(max_size=40))
def test_marked_pieces_give_back_both_texts(output, reference):
    pieces = mark(output, reference)
    assert "".join(text for kind, text in pieces if kind != "missing") == output
    assert "".join(text for kind, text in pieces if kind != "added") == reference


def test_only_what_differs_is_marked():
    assert mark("2090-01-12", "2090-01-02") == [("same", "2090-01-"), ("missing", "02"), ("added", "12")]
    assert mark("a b", "a b") == [("same", "a b")]


@pytest.fixture
def models(tmp_path):
    """Write runs of two models with two seeds each; one run of the second model is wrong on every tenth of 100 lines."""
    outputs = [f"{one} wrong" if number % 10 == 3 else one for number, one in enumerate(REFERENCES)]
    for name in ("a-1", "a-2", "b-1"):
        leave_run(tmp_path / name, REFERENCES, REFERENCES)
    leave_run(tmp_path / "b-2", REFERENCES, outputs)
    runs = read_records([tmp_path / name for name in ("a-1", "a-2", "b-1", "b-2")])
    return {"a": Group("a", runs[:2]), "b": Group("b", runs[2:])}


def test_lines_on_which_runs_differ_are_shown_with_the_runs_of_each_output(models):
    samples = samples_of("task", models)
    assert [samples[name] for name in ("runs", "total", "alike")] == [4, 100, 90]
    assert [one["line"] - 1 for one in samples["lines"]] == list(range(3, 100, 10))
    right, wrong = samples["lines"][0]["outputs"]
    assert (right["runs"], right["names"], wrong["runs"], wrong["names"]) == (3, "a, b (1 of 2)", 1, "b (1 of 2)")
    assert {kind for kind, _ in right["pieces"]} == {"same"} and wrong["pieces"][-1][0] == "added"


def test_runs_that_agree_on_all_lines_have_lines_spread_over_the_test_set(models):
    samples = samples_of("task", {"a": models["a"]})
    assert samples["alike"] == samples["total"] == 100 and len(samples["lines"]) == MOST_SAMPLES
    assert samples["lines"][0]["line"] < 10 and samples["lines"][-1]["line"] > 90
    assert samples_of("task", {}) is None


def test_runs_of_another_test_set_or_without_translations_are_left_out(tmp_path):
    leave_run(tmp_path / "one", REFERENCES, garbled(REFERENCES, 0.2, 1))
    leave_run(tmp_path / "other", REFERENCES[:9], REFERENCES[:9])
    leave_run(tmp_path / "old", REFERENCES, REFERENCES, old=True)
    leave_run(tmp_path / "two", REFERENCES, REFERENCES)
    runs = common_test_set(read_records([tmp_path / name for name in ("one", "other", "old", "two")]))
    assert list(runs) == ["one", "two"]
