"""`tfm report`: one self-contained page about several runs, which needs no server and no network."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from tfm_blocks.errors import RunError, TfmError
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Spec
from tfm_blocks.report.assets import asset, content_policy, page_template
from tfm_blocks.report.attention import pictures_of
from tfm_blocks.report.charts import AXES, MOST_POINTS, forests_of, line_charts
from tfm_blocks.report.comparison import Comparison, matrix_of
from tfm_blocks.report.comparison_tables import tables_of
from tfm_blocks.report.confusion import confusions_of
from tfm_blocks.report.differences import Groups, ModelGrid
from tfm_blocks.report.drawing import chart_svg, figure_svg, legend_svg
from tfm_blocks.report.matrix import Matrix
from tfm_blocks.report.matrix_tables import aggregates_table, legend, matrix_table, verdict
from tfm_blocks.report.model_page import ViewedModel, render_view
from tfm_blocks.report.samples import MOST_SAMPLES, choose_drawn, choose_models, common_test_set, left_out, samples_of
from tfm_blocks.report.show import nodes_table
from tfm_blocks.runs.files import read_bytes
from tfm_blocks.runs.folder import CONFIG
from tfm_blocks.runs.model import read_spec
from tfm_blocks.runs.saved_run import SavedRun

if TYPE_CHECKING:
    from tfm_blocks.report.scaling import Ladder  # needs SciPy

MOST_ROWS = 40  # of an open table
FEWEST_SAMPLES = 3  # lines of each of many tasks
LONGEST_CONFIG = 20_000  # characters


def render_report(
    comparison: Comparison,
    title: str,
    *,
    ladder: Ladder | None = None,
    sentence: str | None = None,
    plugins: Sequence[str] = (),
) -> str:
    """Return the HTML page. Text of runs is escaped; only the page's own scripts may run, and nothing is fetched.

    `ladder` is the scaling law of the runs, shown first. `sentence` replaces the sentence of the test set whose
    attention is shown.
    """
    script = asset("page.js")
    groups = choose_drawn(comparison.best_rate_groups)
    matrix = matrix_of(comparison)
    over_all_tasks = [aggregates_table(matrix)] if matrix and matrix.has_aggregates else []
    models = _models(groups, plugins)
    pages = json.dumps([model["page"] for model in models])
    return page_template("page.html").render(
        title=title,
        policy=content_policy([script, asset("view.js")]),  # pages of models inherit the policy of this page
        script=Markup(script),
        style=Markup(asset("page.css")),
        comparison=comparison,
        most_rows=MOST_ROWS,
        tables=[*tables_of(replace(comparison, matrix=None)), *over_all_tasks],
        **_scaling(ladder),
        **_answer(matrix, comparison.grid),
        **_charts(comparison, matrix),
        **_samples(comparison.grid, sentence, plugins),
        models=models,
        model_pages=b64encode(gzip.compress(pages.encode(), mtime=0)).decode(),
        configs=[(group.label, _config(group.runs[0])) for group in groups],
    )


def _models(groups: Groups, plugins: Sequence[str]) -> list[dict[str, Any]]:
    """Return each model once: the names of its groups, its nodes and its page, or the error of its file."""
    names: dict[str, list[str]] = {}
    specs: dict[str, Spec | str] = {}
    for group in groups:
        try:
            spec: Spec | str = read_spec(group.runs[0].folder, plugins)
        except TfmError as error:
            spec = error.problems[0].rule
        key = group.label if isinstance(spec, str) else repr(spec.mapping)
        specs[key] = spec
        names.setdefault(key, []).append(group.label)
    models: list[dict[str, Any]] = []
    for key, spec in specs.items():
        name = "; ".join(names[key])
        if isinstance(spec, str):
            models.append({"name": name, "table": None, "page": "", "error": spec})
        else:
            page = render_view([ViewedModel(name, spec, Sources())])
            models.append({"name": name, "table": nodes_table(spec), "page": page})
    return models


def _scaling(ladder: Ladder | None) -> dict[str, Any]:
    """Return the figure, the tables and the notes of a scaling law."""
    if ladder is None:
        return {"scaling": []}
    from tfm_blocks.report.scaling_tables import draw_scaling, tables_of_ladder

    drawing = figure_svg(lambda: draw_scaling(ladder), "scaling", "the loss over compute, with the law of each model")
    return {"scaling": tables_of_ladder(ladder), "scaling_drawing": drawing, "scaling_notes": ladder.notes}


def _answer(matrix: Matrix | None, grid: ModelGrid) -> dict[str, Any]:
    """Return the sentences, the heat map and the forest plots."""
    if matrix is None:
        return {"sentences": []}
    return {
        "sentences": list(verdict(matrix)),
        "score": matrix.score.heading,
        "legend": legend(matrix),
        "forests": forests_of(matrix),
        "heat_map": matrix_table(matrix) if grid.crossed else None,
        "shades": {(row, len(grid.keys) + column): shade for (row, column), shade in matrix.shades().items()},
    }


def _charts(comparison: Comparison, matrix: Matrix | None) -> dict[str, Any]:
    """Return the line charts of the models that are drawn, and their colours."""
    tasks = comparison.grid.by_task()
    labels = choose_models(tasks)
    drawn = {task: {label: groups[label] for label in labels if label in groups} for task, groups in tasks.items()}
    all_labels = comparison.grid.labels
    charts = [
        (chart, {axis: chart_svg(chart, axis, all_labels, f"{number} {axis}") for axis in chart.axes})
        for number, chart in enumerate(line_charts(comparison, drawn, matrix))
    ]
    return {
        "charts": charts,
        "axes": list(AXES) if any(chart.axes == list(AXES) for chart, _ in charts) else [],
        "lines": {label: (number, legend_svg(number)) for number, label in enumerate(all_labels) if label in labels},
        "left_out": f"{len(labels)} of {len(all_labels)} models are drawn." if len(labels) < len(all_labels) else "",
        "most_points": MOST_POINTS,
    }


def _samples(grid: ModelGrid, sentence: str | None, plugins: Sequence[str]) -> dict[str, Any]:
    """Return sample lines of each task, and attention pictures of the models of the first task."""
    drawn, omitted = {}, []
    for task, groups in grid.by_task().items():
        chosen = {group.label: group for group in choose_drawn(list(groups.values()))}
        drawn[task] = {label: chosen[group.label] for label, group in groups.items() if group.label in chosen}
        omitted.append(left_out(list(groups.values()), list(drawn[task].values())))
    most = max(FEWEST_SAMPLES, MOST_SAMPLES // max(1, len(drawn)))
    samples = [one for task, groups in drawn.items() if (one := samples_of(task, groups, most))]
    first = list(next(iter(drawn.values()), {}).values())
    lines = common_test_set([run for group in first for run in group.runs])
    return {
        "samples": samples,
        "confusions": confusions_of([group for groups in drawn.values() for group in groups.values()]),
        "unsampled": " ".join(dict.fromkeys(filter(None, omitted))),
        "pictures": pictures_of(first, lines, sentence, plugins),
    }


def _config(run: SavedRun) -> str:
    try:
        return read_bytes(run.folder / CONFIG).decode("utf-8", "replace")[:LONGEST_CONFIG]
    except RunError:
        return ""
