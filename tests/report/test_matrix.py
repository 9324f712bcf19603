"""The matrix of models and tasks: values recomputed by scipy, and the runs that it includes."""

import csv
import io
import itertools
import json
import math
from statistics import fmean

import numpy as np
import pytest
import scipy.stats

from tests.conftest import refused
from tests.report.test_compare import cached_output, compared, comparison, said
from tests.run_folders import change_json, leave_answers
from tfm_blocks.report.comparison import compare_runs
from tfm_blocks.report.differences import ModelGrid
from tfm_blocks.report.matrix_tables import verdict
from tfm_blocks.scoring.significance import over_tasks

SCORES = {  # scaled accuracies of six seeds
    ("attention", "parity"): (0.01, 0.03, -0.02, 0.0, -0.01, 0.02),
    ("attention", "mqar"): (0.91, 0.95, 0.93, 0.92, 0.94, 0.9),
    ("lstm", "parity"): (0.99, 1.0, 0.98, 0.97, 0.995, 0.96),
    ("lstm", "mqar"): (0.2, 0.25, 0.21, 0.22, 0.19, 0.24),
    ("rnn", "parity"): (0.95, 0.99, 0.93, 0.94, 0.97, 0.985),
    ("rnn", "mqar"): (0.1, 0.2, 0.3, 0.15, 0.25, 0.05),
}
D_FF = {"attention": 64, "lstm": 48, "rnn": 64}  # as match.by solves it: not a separate setting


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    for (mixer, task), fractions in SCORES.items():
        for seed, fraction in enumerate(fractions):
            options = {"pairs": 4} if task == "mqar" else {}
            name = f"{mixer}-{task}-{seed}"
            leave_answers(folder / name, task, mixer, seed, fraction, d_ff=D_FF[mixer], **options)
    return folder


def cells(*arguments):
    return {(one["mixer"], one["task"]): one for one in compared(*arguments, "--matrix")["matrix"]}


def percent(mixer, task):
    return [100 * fraction for fraction in SCORES[mixer, task]]


def test_a_cell_has_the_mean_and_students_interval_over_seeds(sweep):
    table = cells(sweep)
    assert table.keys() == SCORES.keys()
    for key, cell in table.items():
        low, high = scipy.stats.ttest_1samp(percent(*key), 0).confidence_interval(0.95)
        assert cell["mean"] == pytest.approx(fmean(percent(*key)))
        assert (cell["low"], cell["high"]) == pytest.approx((max(-100, low), min(100, high)))
        assert cell["seeds"] == 6 and cell["score"] == "scaled accuracy" and cell["schedule.peak"] == 0.003


def p_values(one, other, task):
    """Return the larger p-value of scipy's permutation test and Welch test, and the smallest p of six against six."""
    sides = percent(one, task), percent(other, task)
    exact = scipy.stats.permutation_test(sides, lambda x, y: abs(np.mean(y) - np.mean(x)), alternative="greater")
    return max(exact.pvalue, scipy.stats.ttest_ind(*sides, equal_var=False).pvalue), 2 / math.comb(12, 6)


def corrected(pairs):
    """Return Holm's p-values of tests on a task, whose family has a test over all tasks for each pair of models."""
    tests = {pair: p_values(*pair) for pair in pairs}
    for one, other in {pair[:2] for pair in pairs}:
        overall = over_tasks([(percent(one, task), percent(other, task)) for task in ("parity", "mqar")])
        tests[one, other, None] = overall.p, overall.least
    ordered = sorted(tests, key=tests.get)
    counts = [sum(tests[name][1] <= tests[first][0] for name in ordered[rank:]) for rank, first in enumerate(ordered)]
    steps = [min(1, count * tests[name][0]) for count, name in zip(counts, ordered, strict=True)]
    return dict(zip(ordered, itertools.accumulate(steps, max), strict=True))


def test_the_best_model_of_a_task_is_tested_in_the_family_of_all_pairs(sweep):
    pairs = [(*pair, task) for task in ("parity", "mqar") for pair in itertools.combinations(D_FF, 2)]
    expected = corrected(pairs)
    table = cells(sweep)
    for task, best in (("parity", "lstm"), ("mqar", "attention")):
        assert table[best, task]["against"] is None and table[best, task]["p_corrected"] is None
        for mixer in D_FF.keys() - {best}:
            (p,) = (p for pair, p in expected.items() if {*pair} == {best, mixer, task})
            assert table[mixer, task]["p_corrected"] == pytest.approx(p) and table[mixer, task]["against"] == best


@pytest.mark.grid
def test_a_baseline_is_tested_against_every_other_model(sweep):
    pairs = [("rnn", mixer, task) for task in ("parity", "mqar") for mixer in ("attention", "lstm")]
    report = compared(sweep, "--matrix", "--baseline", "rnn-mqar-0")
    overall = {one["mixer"]: one["p_corrected"] for one in report["all_tasks"]}
    table = cells(sweep, "--baseline", "rnn-mqar-0")
    assert overall["rnn"] is None and overall["attention"] < 0.01 < overall["lstm"]
    for (_, mixer, task), p in corrected(pairs).items():
        assert (overall[mixer] if task is None else table[mixer, task]["p_corrected"]) == pytest.approx(p, rel=0.01)
    assert "differs from rnn" in cached_output(sweep, "--matrix", "--baseline", "rnn-mqar-0")


@pytest.mark.grid
def test_three_seeds_cannot_mark_a_single_task_but_all_tasks_together(sweep):
    """No permutation of three against three has a p below 0.1. Over two tasks, 400 permutations exist."""
    runs = [sweep / f"{mixer}-{task}-{seed}" for mixer, task in SCORES for seed in range(3)]
    shown, report = said(*runs, "--matrix", "--markdown"), comparison(*runs, "--matrix")
    assert all(one["p_corrected"] is None or one["p_corrected"] >= 0.1 for one in report["matrix"])
    assert "a * on a single task needs 5 seeds" in shown
    assert "of 3 seeds or fewer, the intervals are too narrow" in shown
    means = {one["mixer"]: (one["mean"], one["against"], one["p_corrected"]) for one in report["all_tasks"]}
    assert means["lstm"] == (pytest.approx(60.5), None, None)
    for mixer in ("attention", "rnn"):
        mean, against, p = means[mixer]
        assert mean == pytest.approx(fmean(fmean(percent(mixer, task)[:3]) for task in ("parity", "mqar")))
        assert against == "lstm" and p >= 4 / 400
    assert means["attention"][2] == pytest.approx(3 * 4 / 400) and "| 46.8* |" in shown


@pytest.mark.grid
def test_a_model_with_a_seed_that_diverged_is_marked_and_neither_best_nor_tested(sweep, tmp_path):
    runs = [sweep / f"{mixer}-parity-{seed}" for mixer in D_FF for seed in range(6)]
    for task, seed in itertools.product(("parity", "mqar"), range(6)):
        state = "diverged" if seed == 5 and task == "parity" else "done"
        options = {"pairs": 4} if task == "mqar" else {}
        leave_answers(tmp_path / f"gru-{task}-{seed}", task, "gru", seed, 1 - seed / 1000, state=state, **options)
    shown, table = cached_output(sweep, tmp_path, "--matrix", "--markdown"), cells(sweep, tmp_path)
    assert "| gru | **99.8 ± 0.2** | 99.8 ± 0.2 (5 of 6 seeds) |  |" in shown and "| **98.2 ± 1.6** |" in shown
    assert table["gru", "parity"]["p_corrected"] is None and table["gru", "parity"]["seeds_without_score"] == 1
    assert table["rnn", "parity"]["against"] == "lstm" and table["rnn", "mqar"]["against"] == "gru"
    assert "**98.25 ± 1.54**" in said(*runs, *tmp_path.glob("*parity*"), "--markdown"), "the best of one task"
    best, *_, untested = verdict(compare_runs([*runs, *tmp_path.glob("*parity*")], metric="scaled accuracy").matrix)
    assert best.startswith("lstm has the best") and untested.startswith("1 difference could not be tested")


def test_the_table_marks_what_differs_and_the_best_is_bold(sweep):
    shown = cached_output(sweep, "--matrix", "--markdown")
    assert (
        "| mixer | mqar | parity | all tasks |" in shown
        and "| attention | **92.5 ± 2.0** | 0.5 ± 2.0*† | 46.5* |" in shown
    )
    assert "| 96.1 ± 2.6 |" in shown, "not significantly worse than the best"
    assert "corrected for 9 tests of pairs of models" in shown and "6 seeds in each cell" in shown
    assert r"attention & \textbf{92.5 $\pm$ 2.0} & 0.5 $\pm$ 2.0*$\dagger$ & 46.5* \\" in said(
        sweep, "--matrix", "--latex"
    )


@pytest.mark.grid
def test_a_comparison_of_models_on_tasks_shows_the_matrix_among_its_tables(sweep):
    shown = cached_output(sweep, "--markdown")
    assert "| attention | **92.5 ± 2.0** | 0.5 ± 2.0*† | 46.5* |" in shown and "another test set" not in shown
    one_task = [path for path in sweep.iterdir() if "parity" in path.name]
    assert "mean over seeds" not in said(*one_task)


def test_csv_has_an_unrounded_row_for_each_cell(sweep):
    rows = list(csv.DictReader(io.StringIO(cached_output(sweep, "--matrix", "--csv"))))
    assert len(rows) == 6 and float(rows[0]["mean"]) == compared(sweep, "--matrix")["matrix"][0]["mean"]


def test_csv_has_a_blank_for_a_rate_that_a_model_does_not_set(tmp_path):
    for mixer, task in itertools.product(("attention", "lstm"), ("parity", "mqar")):
        leave_answers(tmp_path / f"{mixer}-{task}", task, mixer, 1, 0.5)
    for task in ("parity", "mqar"):
        config = tmp_path / f"lstm-{task}" / "config.yaml"
        config.write_text(config.read_text().replace("peak", "scale"))
    rows = csv.DictReader(io.StringIO(cached_output(tmp_path, "--matrix", "--csv")))
    rates = {(row["mixer"], row["schedule.peak"], row["schedule.scale"]) for row in rows}
    assert rates == {("attention", "0.003", ""), ("lstm", "", "0.003")}


@pytest.mark.parametrize(("metric", "factor"), [("accuracy@64", 100), ("exact", 50)])
def test_another_score_can_be_named(tmp_path, metric, factor):
    for mixer, task in itertools.product(("attention", "lstm"), ("parity", "mqar")):
        leave_answers(tmp_path / f"{mixer}-{task}", task, mixer, 1, 0.5, lengths={64: 0.75})
    expected = 75 if metric == "accuracy@64" else 50
    assert {one["mean"] for one in cells(tmp_path, "--metric", metric).values()} == {expected}


def test_models_without_a_perplexity_have_a_matrix_of_their_token_accuracy(tmp_path):
    for mixer, task in itertools.product(("attention", "lstm"), ("parity", "mqar")):
        leave_answers(run := tmp_path / f"{mixer}-{task}", task, mixer, 1, 0.5)
        status, config = json.loads((run / "status.json").read_text()), (run / "config.yaml").read_text()
        scores = {"test/loss": 0.5, "test/token_accuracy": 0.9}
        (run / "status.json").write_text(json.dumps(status | {"scores": scores}))
        (run / "config.yaml").write_text(config + "objective: {name: replaced_token}\n")
    matrix = compare_runs([tmp_path]).matrix
    assert matrix and matrix.score.name == "token accuracy" and len(matrix.cells) == 4


@pytest.mark.parametrize(("score", "heading"), [("accuracy", "accuracy, %"), ("spearman", "Spearman")])
def test_the_default_score_of_labels_is_their_own(tmp_path, score, heading):
    for mixer, task in itertools.product(("attention", "lstm"), ("parity", "mqar")):
        leave_answers(run := tmp_path / f"{mixer}-{task}", task, mixer, 1, 0.5)
        scores = {"test/loss": 0.5, "test/perplexity": 1.5, f"test/{score}": 0.75, "test/f1": 0.5, "test/mcc": 0.25}
        change_json(run / "status.json", {"scores": scores})
    assert {one["score"] for one in cells(tmp_path).values()} == {score}
    assert f"{heading}: mean over seeds" in cached_output(tmp_path, "--matrix")
    for headings in (["F1", "MCC", heading.partition(",")[0]],):
        tables = cached_output(tmp_path, "--latex")
        assert all(f"& {name} " in tables for name in headings) and "f1" not in tables and "mcc" not in tables


@pytest.mark.parametrize("metric", ["acuracy", "BLEU", "accuracy@7", "loss@64"])
def test_a_score_that_no_run_has_is_refused(sweep, metric):
    assert "--metric: no " in refused("compare", sweep, "--metric", metric)


def test_a_matrix_needs_several_models_and_tasks(sweep):
    assert "several models on several tasks" in refused("compare", sweep / "rnn-mqar-0", "--matrix")


def test_settings_in_which_tasks_of_one_name_differ_are_columns(tmp_path):
    for mixer, pairs in itertools.product(("attention", "lstm"), (4, 8)):
        leave_answers(tmp_path / f"{mixer}-{pairs}", "mqar", mixer, 1, 0.5, pairs=pairs)
    assert {task for _, task in cells(tmp_path)} == {"mqar, pairs 4", "mqar, pairs 8"}


@pytest.mark.parametrize("text", [{"text of test": "t", "text of val": ""}, {"text of test": "", "text of val": "v"}])
def test_runs_of_less_training_text_that_all_diverged_are_no_task_of_their_own(tmp_path, text):
    for mixer, train in itertools.product(("attention", "lstm"), (1000, 500)):
        state = "diverged" if train == 500 else "done"
        leave_answers(run := tmp_path / f"{mixer}-{train}", "parity", mixer, 1, 0.5, state=state, train=train)
        change_json(run / "run.json", {"text": {"vocabulary": "parity", **text}})
    grid = compare_runs([tmp_path]).grid
    assert grid.tasks == ["parity"] and len(grid.models) == 4


def test_models_that_differ_in_two_settings_have_two_columns_of_names(tmp_path):
    for mixer, near, task in itertools.product(("attention", "lstm"), ("none", "conv"), ("parity", "mqar")):
        run = leave_answers(tmp_path / f"{mixer}-{near}-{task}", task, mixer, 1, 0.5)
        (run / "config.yaml").write_text((run / "config.yaml").read_text() + f"near: {near}\n")
    assert "| mixer | near | mqar | parity | all tasks |" in said(tmp_path, "--matrix", "--markdown")


@pytest.mark.grid
def test_a_run_without_a_score_has_its_state_in_its_cell(sweep, tmp_path):
    leave_answers(tmp_path / "late", "parity", "gru", 1, 0.5, state="diverged")
    assert "| gru |  | diverged |" in cached_output(sweep, tmp_path / "late", "--matrix", "--markdown")


def test_the_rate_is_chosen_on_the_seeds_that_all_rates_share_and_then_all_seeds_count(tmp_path):
    """Over all seeds, 0.003 has the lower mean loss because of its second and third seed."""
    losses = {0.001: {1: 0.5}, 0.003: {1: 0.6, 2: 0.1, 3: 0.1}, 0.01: {1: 0.4, 2: 0.9, 3: 0.8}}
    for mixer, task in itertools.product(("attention", "lstm"), ("parity", "mqar")):
        for rate, by_seed in losses.items():
            for seed, loss in by_seed.items():
                name = f"{mixer}-{task}-{rate}-{seed}"
                leave_answers(tmp_path / name, task, mixer, seed, seed / 10, rate=rate, loss=loss)
    assert {(one["schedule.peak"], one["seeds"]) for one in cells(tmp_path).values()} == {(0.01, 3)}
    report = comparison(tmp_path)
    (curve, *_) = report["learning_rates"]
    assert [value["losses"] for value in curve["values"]] == [[0.5], [0.6], [0.4]]
    assert any("on the seeds that all its values share" in note for note in report["notes"])


def test_a_model_is_named_by_what_varies_among_models_with_the_same_first_setting():
    keys = ("mixer", "attention_position", "beta_max")
    models = [("attention", "rotary", "1"), ("attention", "null", "1"), ("delta", "null", "1"), ("delta", "null", "2")]
    grid = ModelGrid(keys, [*models, ("lstm", "null", "1")], (), {})
    assert grid.labels == ["attention, rotary", "attention", "delta, beta_max 1", "delta, beta_max 2", "lstm"]


def test_models_of_the_same_name_have_all_their_settings():
    grid = ModelGrid(("mixer", "near"), [("attention", "null"), ("attention", "none")], (), {})
    assert grid.labels == ["attention, near null", "attention, near none"]


def test_a_model_on_several_tasks_has_no_note_that_its_tasks_differ(sweep):
    runs = [sweep / f"lstm-{task}-{seed}" for task in ("parity", "mqar") for seed in range(3)]
    assert not [note for note in comparison(*runs)["notes"] if note.startswith("not comparable")]


@pytest.mark.grid
def test_an_interval_stays_within_the_possible_scores_and_three_seeds_show_their_range(tmp_path):
    scores = {"lstm": (1.0, 1.0, 0.0, 1.0, 1.0), "rnn": (0.98, 0.02, 0.99), "attention": (0.5, 0.6, 0.4, 0.55, 0.45)}
    for (mixer, fractions), task in itertools.product(scores.items(), ("parity", "mqar")):
        for seed, fraction in enumerate(fractions):
            leave_answers(tmp_path / f"{mixer}-{task}-{seed}", task, mixer, seed, fraction)
    table, shown = cells(tmp_path), said(tmp_path, "--matrix", "--markdown")
    low, high = scipy.stats.ttest_1samp([100.0, 100, 0, 100, 100], 0).confidence_interval(0.95)
    assert low > 0 and high > 100, "Student's interval leaves the range"
    assert (table["lstm", "mqar"]["low"], table["lstm", "mqar"]["high"]) == (pytest.approx(low), 100)
    assert f"80.0 [{low:.1f}, 100.0]" in shown and "| 66.3 (2.0–99.0) |" in shown and "50.0 ± 9.8" in shown
    assert table["rnn", "mqar"]["low"] is None and table["rnn", "mqar"]["values"] == pytest.approx([98, 2, 99])
    solved = said(tmp_path, "--matrix", "--markdown", "--metric", "solved")
    assert "| rnn | 2 of 3 | 2 of 3 |" in solved and "4 of 5" in solved and "at least 90 %" in solved
    wilson = scipy.stats.binomtest(4, 5).proportion_ci(method="wilson")
    cell = cells(tmp_path, "--metric", "solved")["lstm", "mqar"]
    assert (cell["mean"], cell["low"], cell["high"]) == pytest.approx((80, 100 * wilson.low, 100 * wilson.high))


@pytest.mark.grid
def test_an_interval_whose_end_is_rounded_beyond_the_mean_is_drawn(tmp_path):
    """sacreBLEU scores perfect texts 100.00000000000004."""
    for (mixer, fraction), task in itertools.product((("lstm", 1 + 4e-16), ("rnn", 0.5)), ("parity", "mqar")):
        for seed in range(10):
            leave_answers(tmp_path / "runs" / f"{mixer}-{task}-{seed}", task, mixer, seed, fraction)
    for metric in ("scaled_accuracy", "solved"):
        table = cells(tmp_path / "runs", "--metric", metric, "--figures", tmp_path / metric)
        assert all(cell["low"] <= cell["mean"] <= cell["high"] for cell in table.values())
        assert (tmp_path / metric / "means.svg").is_file()


def test_scores_over_all_tasks_have_the_aggregates_of_rliable(sweep):
    shown = cached_output(sweep, "--matrix", "--markdown")
    head, table = shown.split("scaled accuracy, % over all 2 tasks")
    assert "better than lstm" in table and "better than lstm" not in head
    assert "too narrow" not in shown
    rows = {row.split(" | ")[0].strip("| "): row for row in table.splitlines() if row.startswith("| ")}
    for mixer in D_FF:
        values = [*percent(mixer, "parity"), *percent(mixer, "mqar")]
        assert f"{scipy.stats.trim_mean(values, 0.25):.1f} [" in rows[mixer]
    better = fmean(
        scipy.stats.mannwhitneyu(percent("rnn", task), percent("lstm", task)).statistic / 36
        for task in ("parity", "mqar")
    )
    assert f"| {better:.2f} [" in rows["rnn"] and rows["lstm"].endswith("|  |")


@pytest.mark.grid
def test_models_and_tasks_have_display_names_an_order_and_a_subset(sweep, tmp_path):
    names = tmp_path / "names.yaml"
    names.write_text("lstm: LSTM\nparity: Parity\n")
    shown = cached_output(sweep, "--matrix", "--markdown", "--names", names, "--order", "[rnn, parity, rnn]")
    assert "| model | Parity | mqar | all tasks |" in shown
    assert [row.split(" | ")[0] for row in shown.splitlines() if row.startswith("| ")][2:5] == [
        "| rnn",
        "| attention",
        "| LSTM",
    ]
    ordered = said(sweep, "--markdown", "--order", "[mqar, rnn, parity]").partition("over seeds")[2]
    names = [row.split(" | ")[0] for row in ordered.splitlines() if row.startswith("| d_ff")][:6]
    assert [name.split("task ")[1] for name in names] == [
        f"{task}, mixer {mixer}" for mixer in ("rnn", "attention", "lstm") for task in ("mqar", "parity")
    ]
    only = said(
        sweep, "--markdown", "--only", "[lstm, attention]", "--names", "{lstm: LSTM}", "--baseline", "rnn-mqar-0"
    )
    assert "| rnn" not in only.split("over seeds")[1].split("what else differs")[0]
    assert "| LSTM, parity |" in only and "the matrix has no baseline" in only
    hidden = compared(sweep, "--only", "[lstm, attention]", "--baseline", "rnn-mqar-0")
    tested = {test["group"] for test in hidden["against"]}
    assert len(tested) == 4 and not any("not scored on" in note for note in hidden["notes"])
    one_task = compared(sweep, "--only", "[parity]", "--baseline", "rnn-mqar-0")
    assert {"task parity", "mixer rnn"} <= set(one_task["baseline"].split(", "))
    assert not any(rule in note for note in one_task["notes"] for rule in ("not scored on", "not comparable"))
    two = said(sweep, "--matrix", "--markdown", "--only", "[rnn, lstm, parity, mqar]", "--baseline", "rnn-mqar-0")
    assert "has no baseline" not in two
    for wrong, message in (
        (["--names", "{gru: GRU}"], "--names: 'gru' is the name of no model and no task"),
        (["--order", "{lstm: 1}"], "--order: must be a list of names"),
        (["--only", "[lstm"], "--only: is not YAML"),
        (["--order", "[2024-13-45]"], "--order: is not YAML: month must be in 1..12"),
        (["--names", "{lstm: rnn}"], "--names: gives two models or tasks the name 'rnn'"),
    ):
        assert message in refused("compare", sweep, *wrong)
