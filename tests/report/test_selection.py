"""The runs that a page draws if there are many."""

from pathlib import Path

from tests.conftest import sentences
from tests.run_folders import leave_run
from tfm_blocks.cli import main
from tfm_blocks.report.differences import Group
from tfm_blocks.report.samples import MOST_MODELS, MOST_RUNS, choose_drawn, choose_models, left_out
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


def test_the_page_counts_omitted_runs(tmp_path):
    references = sentences(3, 7)
    for number in range(24):
        heads, seed = divmod(number, 12)
        leave_run(tmp_path / f"heads{heads}-{seed}", references, references, seed=seed, changed={"heads": heads})
    main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "20 of 24 runs are sampled, the tables have all: 10 of the 12 runs of heads 0; 10 of the 12" in page
