"""`tfm report`: one self-contained page about several runs, which needs no server and no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bokeh.core.json_encoder import serialize_json
from bokeh.resources import Resources
from markupsafe import Markup

from tfm_blocks.errors import RunError, TfmError
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Spec
from tfm_blocks.report.assets import asset, content_policy, page_template
from tfm_blocks.report.attention_images import pictures_of
from tfm_blocks.report.comparison import Comparison
from tfm_blocks.report.comparison_tables import tables_of
from tfm_blocks.report.curves import AXES, MOST_POINTS, RunLine, charts_of, line_style
from tfm_blocks.report.differences import Group
from tfm_blocks.report.length_chart import length_charts
from tfm_blocks.report.model_page import ViewedModel, render_view
from tfm_blocks.report.rate_chart import rate_charts
from tfm_blocks.report.samples import choose_samples, common_test_set
from tfm_blocks.report.selection import choose_drawn, left_out
from tfm_blocks.report.show import nodes_table
from tfm_blocks.report.table import Table
from tfm_blocks.runs.files import read_bytes
from tfm_blocks.runs.folder import CONFIG, METRICS
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.runs.model import read_spec
from tfm_blocks.runs.record import RunRecord

LONGEST_CONFIG = 20_000  # characters


def render_report(
    comparison: Comparison, title: str, *, sentence: str | None = None, plugins: Sequence[str] = ()
) -> str:
    """Return the HTML page. Text of runs is escaped; only the page's own scripts may run, and nothing is fetched.

    `sentence` replaces the sentence of the test set whose attention is shown.
    """
    groups = choose_drawn(comparison.groups)
    runs = [run for group in groups for run in group.runs]
    lines = _lines(groups)
    charts = [*charts_of(lines), *length_charts(groups)]
    over_rates = rate_charts(comparison.curves)
    lines_of_runs = common_test_set(runs)
    scripts = {"bokeh": Resources(mode="inline", components=["bokeh"]).js_raw[0], "own": asset("page.js")}
    models = _models(groups, plugins)
    return page_template("page.html").render(
        title=title,
        policy=content_policy([*scripts.values(), asset("view.js")]),  # pages of models inherit the policy of this page
        scripts={name: Markup(text) for name, text in scripts.items()},
        style=Markup(asset("page.css")),
        comparison=comparison,
        left_out=left_out(comparison.groups, groups),
        tables=tables_of(comparison),
        lines=lines,
        axes=list(AXES),
        charts=charts,
        rate_charts=over_rates,
        most_points=MOST_POINTS,
        chart_data=_data([chart.item for chart in (*charts, *over_rates)]),
        samples=choose_samples(lines_of_runs),
        pictures=pictures_of(groups, lines_of_runs, sentence, plugins),
        models=models,
        model_pages=_data([model.page for model in models]),
        configs=[(group.label, _config(group.runs[0])) for group in groups],
    )


def _lines(groups: Sequence[Group]) -> list[RunLine]:
    found = []
    for number, group in enumerate(groups):
        for place, run in enumerate(group.runs):
            colour, dash = line_style(number, place, len(groups))
            found.append(RunLine(run.name, colour, dash, read_rows(run.folder / METRICS)))
    return found


@dataclass(frozen=True)
class _Model:
    """A model of the report: the names of its groups, its nodes, and its page; or the error that prevents them."""

    name: str
    table: Table | None = None
    page: str = ""
    error: str = ""


def _models(groups: Sequence[Group], plugins: Sequence[str]) -> list[_Model]:
    """Return each model once, with the names of all groups that have it."""
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
    return [_model("; ".join(names[key]), spec) for key, spec in specs.items()]


def _model(name: str, spec: Spec | str) -> _Model:
    if isinstance(spec, str):
        return _Model(name, error=spec)
    return _Model(name, nodes_table(spec), render_view([ViewedModel(name, spec, Sources())]))


def _config(run: RunRecord) -> str:
    try:
        return read_bytes(run.folder / CONFIG).decode("utf-8", "replace")[:LONGEST_CONFIG]
    except RunError:
        return ""


def _data(value: object) -> Markup:
    """Return JSON in which no text can end a script element."""
    return Markup(serialize_json(value).replace("<", "\\u003c"))
