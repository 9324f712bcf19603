"""The learning rate of each model, chosen by validation."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.conftest import refused, sentences
from tests.report.test_compare import comparison, said
from tests.run_folders import garbled, leave_answers, leave_run
from tfm_blocks.errors import ConfigError
from tfm_blocks.report.comparison import compare_runs
from tfm_blocks.report.comparison_tables import rates_table
from tfm_blocks.report.differences import Group, arrange, find_factors
from tfm_blocks.report.display import Display
from tfm_blocks.runs.saved_run import SavedRun

REFERENCES = sentences(20, 3)
LOSSES = {  # best validation losses of two seeds, by model and rate
    "base": {0.001: (1.0, 1.2), 0.004: (0.8, 0.9), 0.016: (0.7, 3.0)},
    "prenorm": {0.001: (1.0, 1.1), 0.004: (0.9, 1.0), 0.016: (0.5, 0.6)},
}


def leave(folder, model, rate, seed, loss, schedule=(), **options):
    name = f"{model}-{rate}-{seed}"
    changed = {"schedule": {"name": "linear", "peak": rate, **dict(schedule)}}
    outputs = garbled(REFERENCES, rate * 20, seed)
    run = leave_run(folder / name, REFERENCES, outputs, model=model, seed=seed, changed=changed)
    status = json.loads((run / "status.json").read_text())
    status |= {"best": {"val/loss": {"value": loss, "step": 60}}, **options}
    (run / "status.json").write_text(json.dumps(status))
    return run


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rates")
    for model, rates in LOSSES.items():
        for rate, losses in rates.items():
            for seed, loss in enumerate(losses, 1):
                leave(folder, model, rate, seed, loss)
    return folder


def test_each_model_is_compared_at_the_rate_with_its_lowest_mean_validation_loss(sweep):
    report = comparison(sweep, "--baseline", "base-0.001-1")
    assert {one["model"]: one["best"] for one in report["learning_rates"]} == {"base": 0.004, "prenorm": 0.016}
    assert report["baseline"] == "base, peak 0.004"
    assert {one["group"] for one in report["against"]} == {"prenorm, peak 0.016"}
    assert len(report["groups"]) == 6, "all runs stay in the first tables"


def test_the_table_shows_the_loss_of_every_rate_and_a_note_warns_of_the_edge(sweep):
    shown = said(sweep)
    table = shown.partition("learning rates by the best val/loss")[2].partition("over seeds")[0]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
    assert rows == [
        ["base", "schedule.peak", "", "0.001", "2", "1.1000 ± 0.1414"],
        ["base", "schedule.peak", "best", "0.004", "2", "0.8500 ± 0.0707"],
        ["base", "schedule.peak", "", "0.016", "2", "1.8500 ± 1.6263"],
        ["prenorm", "schedule.peak", "", "0.001", "2", "1.0500 ± 0.0707"],
        ["prenorm", "schedule.peak", "", "0.004", "2", "0.9500 ± 0.0707"],
        ["prenorm", "schedule.peak", "best, highest of the grid", "0.016", "2", "0.5500 ± 0.0707"],
    ]
    assert "prenorm: its best schedule.peak, 0.016, is the highest of the grid" in shown
    assert "base: its best" not in shown


def test_a_rate_at_which_a_seed_diverged_is_not_the_best(tmp_path):
    for rate, loss in ((0.001, 1.0), (0.004, 0.9), (0.016, 0.2)):
        leave(tmp_path, "base", rate, 1, loss)
    leave(tmp_path, "base", 0.016, 2, 0.2, state="diverged")
    (curve,) = comparison(tmp_path)["learning_rates"]
    assert curve["best"] == 0.004 and curve["edge"] == ""
    assert curve["values"][-1] == {"value": 0.016, "losses": [0.2], "diverged": 1}


def test_a_rate_without_a_result_is_no_end_of_the_grid(tmp_path):
    for rate, loss in ((0.001, 1.0), (0.004, 0.9)):
        leave(tmp_path, "base", rate, 1, loss)
    leave(tmp_path, "base", 0.016, 1, 0.2, state="killed")
    (curve,) = comparison(tmp_path)["learning_rates"]
    assert curve["best"] == 0.004 and curve["edge"] == "highest"


@pytest.mark.parametrize(
    ("states", "kept"),
    [
        ({0.001: ("diverged", "diverged", "done"), 0.004: ("done", "diverged", "done")}, 0.004),
        ({0.001: ("failed",), 0.004: ("failed",)}, 0.001),
    ],
)
def test_a_model_without_a_best_rate_has_one_row_at_the_rate_with_the_most_finished_runs(tmp_path, states, kept):
    for rate, own in states.items():
        for seed, state in enumerate(own):
            leave(tmp_path, "base", rate, seed, 1.0, state=state)
    report, table = comparison(tmp_path), rates_table(compare_runs([tmp_path]).curves)
    (curve,) = report["learning_rates"]
    assert curve["best"] is None and curve["edge"] == "" and "best" not in [row[2] for row in table.rows]
    (group,) = compare_runs([tmp_path]).best_rate_groups
    assert group.runs[0].settings["schedule.peak"] == kept and len(report["groups"]) == 2
    (note,) = (note for note in report["notes"] if "no learning rate is the best" in note)
    assert note.startswith("base: ") and not any("lowest mean" in note for note in report["notes"])


def test_a_model_without_a_best_rate_leaves_the_rows_and_tests_of_the_others(tmp_path):
    means = {
        "att": {"parity": 0.4, "mqar": 0.8},
        "lstm": {"parity": 0.7, "mqar": 0.3},
        "bad": {"parity": 0.2, "mqar": 0.1},
    }
    for mixer, task, rate, seed in itertools.product(means, ("parity", "mqar"), (0.01, 0.001), (1, 2)):
        better = 0.001 if (mixer, task) in (("att", "parity"), ("lstm", "mqar")) else 0.01
        state = "diverged" if (mixer, task, seed) == ("bad", "mqar", 1) else "done"
        own = {"rate": rate, "loss": 1 + (rate != better), "state": state}
        fraction = means[mixer][task] + seed / 100 + rate
        leave_answers(tmp_path / f"{mixer}-{task}-{rate}-{seed}", task, mixer, seed, fraction, **own)
    matrix = compare_runs([tmp_path], metric="scaled accuracy").matrix
    assert matrix.grid.labels == ["att", "bad", "lstm"] and len(matrix.cells) == 6
    assert matrix.tests == 5, "three on parity, one on mqar and one on all tasks"
    assert [cell.group.runs[0].settings["mixer"] for cell in matrix.cells.values() if not cell.complete] == ["bad"]


@pytest.mark.parametrize(("key", "values"), [("warmup", (100, 200)), ("decay", ("linear", "sqrt"))])
def test_numbers_that_vary_only_with_the_rate_are_chosen_with_it(tmp_path, key, values):
    losses = {"base": (0.5, 0.9), "prenorm": (0.8, 0.6)}
    for model, seed in itertools.product(losses, (1, 2)):
        for rate, value, loss in zip((0.001, 0.004), values, losses[model], strict=True):
            leave(tmp_path, model, rate, seed, loss, {key: value})
    comparison = compare_runs([tmp_path])
    tuned = key == "warmup"
    assert {(curve.label, curve.best.value) for curve in comparison.curves} == (
        {("base", 0.001), ("prenorm", 0.004)} if tuned else set()
    )
    assert len(comparison.best_rate_groups) == (2 if tuned else 4), "a name makes another model"


def test_rates_that_differ_after_the_sixth_digit_stay_apart(tmp_path):
    rates = (0.001, 0.0012345671, 0.0012345672)
    for rate in rates:
        leave(tmp_path, "base", rate, 1, 1.0 - rate)
    (curve,) = comparison(tmp_path)["learning_rates"]
    assert [rate["value"] for rate in curve["values"]] == list(rates) and curve["best"] == rates[2]


def test_groups_of_rates_that_differ_after_the_sixth_digit_have_their_own_places():
    groups = [
        Group("", [SavedRun(Path(str(rate)), name="", state="done", settings={"schedule.peak": rate})])
        for rate in (0.0012345671, 0.0012345672)
    ]
    grid = arrange(groups, find_factors([group.runs[0] for group in groups]))
    assert grid.labels == ["peak 0.0012345671", "peak 0.0012345672"]


def test_unequal_grids_and_seeds_that_chose_a_rate_are_noted(sweep, tmp_path):
    shutil.copytree(sweep, tmp_path, dirs_exist_ok=True)
    chose = "the scores include the seeds that chose the learning rates, which raises the scores of tuned models"
    assert f"{chose}; --held-out-seeds leaves these seeds out" in comparison(tmp_path)[
        "notes"
    ] and "tuned unequally" not in said(tmp_path)
    leave(tmp_path, "local", 0.004, 1, 1.0)
    (note,) = (note for note in comparison(tmp_path)["notes"] if "tuned unequally" in note)
    assert (
        "over 3 learning rates, local, peak 0.004 over 1; of equal models, the one with more rates scores higher"
        in note
    )
    leave(tmp_path, "local", 0.001, 1, 1.0)
    (note,) = (note for note in comparison(tmp_path)["notes"] if "tuned unequally" in note)
    assert "over 3 learning rates, local, peak 0.004 over 2;" in note or "local, peak 0.001 over 2;" in note


def test_seeds_that_chose_a_rate_can_be_left_out(sweep, tmp_path):
    shutil.copytree(sweep, tmp_path, dirs_exist_ok=True)
    error = refused("compare", tmp_path, "--held-out-seeds")
    assert "every seed of base at its best schedule.peak was used to choose the schedule.peak" in error
    assert "train further seeds at schedule.peak=0.004" in error
    for model, rate in (("base", 0.004), ("prenorm", 0.016)):
        for seed in (3, 4, 5):
            leave(tmp_path, model, rate, seed, 1.5)
    other = comparison(tmp_path, "--held-out-seeds", "--baseline", "base-0.004-1")
    assert other["baseline"] == "base, peak 0.004", "a run that is left out names its model"
    report = comparison(tmp_path, "--held-out-seeds", "--baseline", "base-0.004-3")
    assert "the scores do not include the seeds that chose the learning rates" in report["notes"]
    assert {one["model"]: one["best"] for one in report["learning_rates"]} == {"base": 0.004, "prenorm": 0.016}
    seeds = {group["group"]: [run["seed"] for run in group["runs"]] for group in report["groups"]}
    assert seeds["prenorm, peak 0.016"] == seeds["base, peak 0.004"] == [3, 4, 5]
    assert seeds["base, peak 0.001"] == [1, 2]
    assert min(test["seeds"] for test in report["against"]) == 0.1, "the least p-value of three seeds against three"
    for model, best in (("base", 0.004), ("prenorm", 0.016)):
        for folder in tmp_path.glob(f"{model}-*"):
            if not folder.name.startswith(f"{model}-{best}-"):
                shutil.rmtree(folder)
    assert "no model was trained at several learning rates" in refused("compare", tmp_path, "--held-out-seeds")


def test_a_model_that_is_not_shown_needs_no_further_seeds_unless_it_is_the_baseline(tmp_path):
    for mixer, rate, seed in itertools.product(("gru", "lstm", "rnn"), (0.001, 0.01), (1, 2)):
        if seed == 1 or (mixer != "gru" and rate == 0.01):
            name = f"{mixer}-{rate}-{seed}"
            leave_answers(tmp_path / name, "parity", mixer, seed, seed / 4, rate=rate, loss=1 - rate)
    only = Display(only=["lstm", "rnn"])
    comparison = compare_runs([tmp_path], held_out_seeds=True, display=only)
    assert [[run.settings["seed"] for run in group.runs] for group in comparison.best_rate_groups] == [[2], [2]]
    for options in ({}, {"display": only, "baseline": "gru-0.01-1"}):
        with pytest.raises(ConfigError, match="every seed of mixer gru at its best"):
            compare_runs([tmp_path], held_out_seeds=True, **options)


def test_jobs_that_tuning_pruned_have_no_row_and_equal_best_rates_are_no_part_of_a_name(tmp_path):
    for model, (rate, loss, seed) in itertools.product(LOSSES, ((0.001, 1.0, 1), (0.004, 0.5, 1), (0.004, 0.5, 2))):
        leave(tmp_path / "tuned", model, rate, seed, loss)
    jobs = [{"name": path.name, "state": "done"} for path in sorted((tmp_path / "tuned").iterdir())]
    jobs += [{"name": f"base-0.001-{seed}", "state": "pruned"} for seed in (2, 3)]
    (tmp_path / "tuned" / "sweep.json").write_text(json.dumps({"format": 1, "command": "…", "jobs": jobs}))
    report, shown = comparison(tmp_path / "tuned"), said(tmp_path / "tuned", "--markdown")
    assert "| base | 2 |" in shown and "| prenorm | 2 |" in shown and "0 of 1" not in shown
    assert "pruned before they began: 2 jobs of a sweep" in report["notes"]
    assert not any("pruned" in note and "not done" in note for note in report["notes"])


def test_runs_of_one_rate_have_no_table_of_rates(tmp_path):
    for seed in (1, 2):
        leave(tmp_path, "base", 0.004, seed, 1.0)
    assert comparison(tmp_path)["learning_rates"] == [] and "learning rates" not in said(tmp_path)


@pytest.mark.parametrize("schedule", [{"name": "linear"}, {"name": "linear", "peak": "fast"}, 3])
def test_a_run_without_a_rate_leaves_the_curve_of_the_others(tmp_path, schedule):
    for rate, loss in ((0.001, 1.0), (0.004, 0.9), (0.016, 0.8)):
        run = leave(tmp_path, "base", rate, 1, loss)
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"schedule": schedule}))
    (curve,) = comparison(tmp_path)["learning_rates"]
    assert (curve["best"], [rate["value"] for rate in curve["values"]]) == (0.004, [0.001, 0.004])
