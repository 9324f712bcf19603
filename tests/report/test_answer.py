"""The sentences at the top of a report, the forest plot and the shades of the heat map."""

from pathlib import Path

import pytest

from tfm_blocks.metric_schema import find_score
from tfm_blocks.report.charts import forests_of
from tfm_blocks.report.differences import Group, ModelGrid
from tfm_blocks.report.matrix import score_matrix
from tfm_blocks.report.matrix_tables import NEEDS, legend, matrix_table, verdict
from tfm_blocks.report.table import markdown
from tfm_blocks.runs.records import Measured
from tfm_blocks.runs.saved_run import SavedRun


def matrix_of(scores, metric="accuracy", baseline=None, test_sets=None):
    """Return a matrix of these scores; `test_sets` names a test set for each model, by default for each task."""
    models, tasks = list(dict.fromkeys(model for row in scores.values() for model in row)), list(scores)
    groups = {}
    for column, (task, row) in enumerate(scores.items()):
        for model, values in row.items():
            name = find_score(metric).name
            runs = [
                SavedRun(Path(f"{model}{seed}"), name=model, state="done", settings={"seed": seed}, test_set=(test_sets or {}).get(model, task), scored_on="test", scores={name: Measured(value, 0, 0)})
                for seed, value in enumerate(values)
            ]  # fmt: skip
            groups[models.index(model), column] = Group(model, runs)
    grid = ModelGrid(["model"], [(model,) for model in models], tasks, groups)
    return score_matrix(grid, metric, groups[models.index(baseline), 0] if baseline else None)


def test_the_best_model_of_one_task_is_named_with_what_differs_from_it():
    one, other = verdict(matrix_of({"x": {"a": [10, 11, 12] * 2, "b": [50, 51, 52] * 2, "c": [49, 52, 50] * 2}}))
    assert one == "b has the best accuracy, %: 51.0 ± 0.9, 6 seeds."
    assert other == (
        "the best model differs significantly from a (p < 0.05, corrected for 3 tests). "
        "No significant difference from c was found (p < 0.05, corrected for 3 tests)."
    )


def test_each_task_has_its_best_model_and_ties_are_named():
    scores = {"x": {"a": [1, 2], "b": [5, 6]}, "y": {"a": [3, 3], "b": [1, 1]}, "z": {"a": [7, 8], "b": [7, 8]}}
    scores = {task: {model: 3 * values for model, values in row.items()} for task, row in scores.items()}
    best, tie, *_, tests = verdict(matrix_of(scores))
    assert best == "Best accuracy of 3 tasks: b on 1 (x); a on 1 (y)."
    assert tie == "On z, a, b share the best accuracy."
    assert tests.startswith("Of 3 differences from the best model, 2 are significant (p < 0.05")
    assert "does not mean that the models are equal" in tests


def test_less_is_better_of_a_perplexity():
    matrix = matrix_of({"x": {"a": [4.0], "b": [2.0]}}, "perplexity")
    assert next(verdict(matrix)).startswith("b has the best perplexity") and matrix.shades() == {(0, 0): 0, (1, 0): 1}


def test_nothing_is_said_about_significance_without_a_test():
    _, untested = verdict(matrix_of({"x": {"a": [1], "b": [2]}}))
    assert untested == f"No difference was tested: a test needs {NEEDS}." and NEEDS.startswith("at least two seeds")
    alone = matrix_of({"x": {"a": [1, 2]}})
    assert list(verdict(alone)) == ["a has the accuracy, %: 1.5 (1.0–2.0), 2 seeds."]
    assert legend(alone) == "2 seeds in each cell"
    assert legend(matrix_of({"x": {"a": [1, 2], "b": [2]}})).startswith("1 to 2 seeds in each cell, too few for tests")


def test_scores_of_different_test_sets_are_not_ranked_and_those_of_unknown_ones_not_tested():
    scores = {"a": [40, 41, 42, 43, 44], "b": [9, 9, 8, 7, 9]}
    other = matrix_of({"x": scores}, test_sets={"a": "one", "b": "two"})
    (rule,) = verdict(other)
    assert rule == "The scores cannot be ranked, because they were not computed in the same way on the same test set."
    assert legend(other) == "5 seeds in each cell" and "**" not in "".join(
        markdown(matrix_table(other)).split("\n")[1:]
    )
    two = matrix_of({"x": scores, "y": scores}, test_sets={"a": "one", "b": "two"})
    assert next(verdict(two)).startswith("On x, the scores cannot be ranked") and not two.overall
    unknown = matrix_of({"x": scores}, test_sets={"a": "", "b": ""})
    assert list(verdict(unknown))[1].startswith("No difference was tested") and not unknown.tests


def test_a_baseline_is_named_as_the_reference():
    *_, tests = verdict(matrix_of({"x": {"a": [1, 2, 1, 2], "b": [9, 9, 8, 8]}}, baseline="a"))
    assert tests == "a differs significantly from b (p < 0.05, corrected for 1 test)."


def test_a_forest_spans_all_models_or_all_possible_percents_and_no_noise():
    (forest,) = forests_of(matrix_of({"x": {"a": [2, 12], "b": [7]}}, "perplexity"))
    wide, single = forest["rows"]
    assert (wide["low"], wide["high"], wide["mean"]) == pytest.approx((0, 100, 50))
    assert single["low"] == single["mean"] == single["high"] == pytest.approx(50) and single["text"] == "7.00"
    (forest,) = forests_of(matrix_of({"x": {"a": [2, 12], "b": [7]}}))
    assert [(row["low"], row["high"]) for row in forest["rows"]] == [pytest.approx((2, 12)), pytest.approx((7, 7))]
    assert (forest["start"], forest["end"]) == ("0.0", "100.0")
    (forest,) = forests_of(matrix_of({"x": {"a": [99.6, 99.8], "b": [100.0]}}, "BLEU"))
    assert (forest["start"], forest["end"]) == ("90.0", "100.0"), "an axis of a part of the scores magnifies noise"


def test_shades_of_percents_span_all_possible_percents():
    assert matrix_of({"x": {"a": [-20], "b": [25]}}).shades() == {(0, 0): 0, (1, 0): 0.25}


def test_a_model_at_chance_is_never_the_best():
    at_chance = {"a": [2, 0, 4], "b": [0, 1, -1], "c": [9, 6]}
    assert list(verdict(matrix_of({"x": at_chance}, "scaled accuracy"))) == [
        "No model scores above chance with a score for each seed."
    ]
    (cause,) = verdict(matrix_of({"x": {"a": [2, None], "b": [None, 1]}}, "BLEU"))
    assert cause == "No model has a score for each seed."
    matrix = matrix_of({"x": at_chance, "y": {"a": [2, 0, 4], "b": [0, 1, 98], "c": [3, 3]}}, "scaled accuracy")
    best, *others = verdict(matrix)
    assert best == "Best scaled accuracy of 2 tasks: b on 1 (y)."
    assert others[0] == "On x, no model scores above chance with a score for each seed."
    assert [cell.text for cell in matrix.cells.values()] == [
        "2.0 (0.0–4.0)†", "0.0 (-1.0–1.0)†", "7.5 (6.0–9.0)†", "2.0 (0.0–4.0)†", "33.0 (0.0–98.0)", "3.0 (3.0–3.0)"
    ]  # fmt: skip
    assert [cell.at_chance for cell in matrix_of({"x": at_chance}, "accuracy").cells.values()] == [False] * 3


def test_too_few_seeds_are_named_with_the_number_that_a_difference_needs():
    _, tests = verdict(matrix_of({"x": {"a": [1, 2, 1], "b": [99, 98, 97]}}))
    assert (
        tests
        == "No single difference can be significant (p < 0.05, corrected for 1 test): that needs 4 seeds of each model."
    )


def test_only_tests_that_can_be_significant_count_for_the_seeds_that_a_difference_needs():
    few = matrix_of({"x": {"a": [90, 91, 92, 93, 94], "b": [10, 11, 12, 13, 14]} | {name: [50, 51] for name in "cdef"}})
    solved = {task: {"a": [100] * 5, "b": [100] * 5} for task in "stuvwxyz"}
    ceiling = matrix_of(solved | {"last": {"a": [90, 91, 92, 93, 94], "b": [10, 11, 12, 13, 14]}})
    for matrix in (few, ceiling):
        assert sum(cell.differs for cell in matrix.cells.values()) == 1 and matrix.seeds_needed == 0
        assert "needs" not in legend(matrix) and ", 1 is significant" in list(verdict(matrix))[-1]
    assert matrix_of(solved | {"last": {"a": [1, 2, 1], "b": [99, 98, 97]}}).seeds_needed == 4, "of one test"
    assert matrix_of({task: {"a": [1, 2, 3, 4, 5], "b": [2, 3]} for task in "xy"}).seeds_needed == 5, "of both models"


def test_models_that_differ_over_all_tasks_are_named():
    scores = {task: {"a": [1, 2, 3], "b": [11, 12, 14]} for task in "xyz"}
    _, overall, _ = verdict(matrix_of(scores))
    assert overall == "Over all tasks together, b differs significantly from a (p < 0.05, corrected)."
