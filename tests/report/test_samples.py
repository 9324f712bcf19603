"""The choice of runs, and samples side by side."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import sentences
from tests.run_folders import garbled, leave_run
from tfm_blocks.cli import main
from tfm_blocks.report.differences import Group
from tfm_blocks.report.samples import (
    MOST_MODELS,
    MOST_RUNS,
    MOST_SAMPLES,
    choose_drawn,
    choose_models,
    common_test_set,
    left_out,
    mark,
    samples_of,
)
from tfm_blocks.runs.listing import find_runs
from tfm_blocks.runs.metrics import Best
from tfm_blocks.runs.records import RunFile
from tfm_blocks.runs.saved_run import SavedRun


def group(label, losses, model=""):
    start = RunFile(choices={"model": model or label})
    runs = [
        SavedRun(Path(label), name=f"{label}-{seed}", state="done", start=start, best={"val/loss": Best(loss, 1)})
        for seed, loss in enumerate(losses)
    ]
    return Group(label, runs)


def names(groups):
    return [run.name for one in groups for run in one.runs]


def test_up_to_twenty_runs_are_all_drawn():
    groups = [group("a", range(15)), group("b", range(5))]
    assert names(choose_drawn(groups)) == names(groups) and left_out(groups, choose_drawn(groups)) == ""


def test_a_model_of_many_good_seeds_does_not_hide_the_others():
    groups = [group("bad", [9.0, 8.0]), group("good", [seed / 100 for seed in range(95)]), group("fair", [5.0] * 3)]
    drawn = choose_drawn(groups)
    assert {one.label: len(one.runs) for one in drawn} == {"bad": 2, "good": 15, "fair": 3}
    assert drawn[1].runs[0].name == "good-0" and drawn[1].runs[-1].name == "good-94", "the best and the worst seed"
    assert len(names(drawn)) == len(set(names(drawn))) == MOST_RUNS
    assert "15 of the 95 runs of good" in left_out(groups, drawn) and left_out(groups, drawn).startswith(
        "20 of 100 runs"
    )


def test_of_many_variants_each_model_has_its_best():
    groups = [group(f"a {number}", [number], "a") for number in range(30)] + [
        group("b", [99.0]),
        group("c", [98.0, 99.0]),
    ]
    drawn = choose_drawn(groups)
    assert [one.label for one in drawn] == [*(f"a {number}" for number in range(18)), "b", "c"]
    assert "none of 12 other models" in left_out(groups, drawn)


def test_of_many_models_those_of_low_validation_loss_have_curves():
    groups = {f"m{number}": group(f"m{number}", [100 - number], "same") for number in range(30)}
    assert choose_models({"task": groups}) == [f"m{number}" for number in range(30 - MOST_MODELS, 30)]
    few = {label: groups[label] for label in ("m3", "m1")}
    assert choose_models({"one": few, "other": few}) == ["m3", "m1"]


def test_runs_without_a_validation_are_drawn_too():
    runs = [SavedRun(Path("x"), name=f"x-{number}", state="failed") for number in range(30)]
    assert len(names(choose_drawn([Group("x", runs)]))) == MOST_RUNS


@pytest.mark.grid
def test_the_page_counts_omitted_runs(tmp_path):
    references = sentences(3, 7)
    for number in range(24):
        heads, seed = divmod(number, 12)
        leave_run(tmp_path / f"heads{heads}-{seed}", references, references, seed=seed, changed={"heads": heads})
    main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "20 of 24 runs are sampled, the tables have all: 10 of the 12 runs of heads 0; 10 of the 12" in page


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
    runs = find_runs([tmp_path / name for name in ("a-1", "a-2", "b-1", "b-2")])
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


def test_runs_of_the_same_name_are_sampled_apart(tmp_path):
    """Jobs of two sweeps have the same names."""
    for label, outputs in {"lstm": REFERENCES, "attn": ["wrong"] * len(REFERENCES)}.items():
        leave_run(tmp_path / label / "seed-1", REFERENCES, outputs)
    groups = {label: Group(label, find_runs([tmp_path / label / "seed-1"])) for label in ("lstm", "attn")}
    samples = samples_of("task", groups)
    assert (samples["runs"], samples["alike"]) == (2, 0)
    assert {one["names"] for one in samples["lines"][0]["outputs"]} == {"lstm", "attn"}


def test_runs_of_another_test_set_or_without_translations_are_left_out(tmp_path):
    leave_run(tmp_path / "one", REFERENCES, garbled(REFERENCES, 0.2, 1))
    leave_run(tmp_path / "other", REFERENCES[:9], REFERENCES[:9])
    leave_run(tmp_path / "old", REFERENCES, REFERENCES, old=True)
    leave_run(tmp_path / "two", REFERENCES, REFERENCES)
    runs = common_test_set(find_runs([tmp_path / name for name in ("one", "other", "old", "two")]))
    assert list(runs) == [tmp_path / "one", tmp_path / "two"]
