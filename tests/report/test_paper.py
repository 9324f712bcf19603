"""Figures for papers: files, bytes, fonts, and lines distinguishable without colour."""

import itertools
import json
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.conftest import refused
from tests.run_folders import leave_answers
from tfm_blocks.cli import main
from tfm_blocks.report.charts import LineChart, line_over, line_through
from tfm_blocks.report.comparison import compare_runs
from tfm_blocks.report.drawing import WIDTH, draw_lines, drawing_style, line_style
from tfm_blocks.report.paper import draw_heat_map, draw_means, save_figures

FIGURES = {
    "means", "matrix", "profiles", "val-loss", "test-accuracy-over-length", "best-val-loss-over-schedule-peak",
    "scaled-accuracy-over-schedule-peak",
}  # fmt: skip


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper")
    for mixer, task, rate, seed in itertools.product(("attention", "lstm"), ("parity", "mqar"), (0.001, 0.01), (1, 2)):
        score = 0.9 if (mixer, task) == ("lstm", "parity") else 0.1 * seed
        name = f"{mixer}-{task}-{rate}-{seed}"
        leave_answers(
            folder / name, task, mixer, seed, score, rate=rate, loss=1 - 10 * rate, lengths={8: 0.5, 16: score}
        )
    return folder


@pytest.fixture(scope="module")
def figures(sweep, tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures") / "new"
    main(["compare", str(sweep), "--matrix", "--figures", str(folder)])
    return folder


@pytest.mark.grid
def test_every_figure_is_a_pdf_and_an_svg(figures):
    assert {path.name for path in figures.iterdir()} == {
        f"{name}{suffix}" for name in FIGURES for suffix in (".pdf", ".svg")
    }
    assert all(path.read_bytes().startswith(b"%PDF") for path in figures.glob("*.pdf"))
    assert all(f'width="{72 * WIDTH:g}pt"' in path.read_text() for path in figures.glob("*.svg"))


def test_pdfs_embed_truetype_fonts_and_svgs_need_none(figures):
    assert all(
        b"/FontFile2" in path.read_bytes() and b"/Type3" not in path.read_bytes() for path in figures.glob("*.pdf")
    )
    assert not any("<text" in path.read_text() for path in figures.glob("*.svg"))


@pytest.mark.grid
def test_the_same_runs_give_the_same_bytes(sweep, figures, tmp_path):
    again = save_figures(compare_runs([sweep]), tmp_path)
    assert len(again) == 2 * len(FIGURES)
    assert [path.name for path in again if path.read_bytes() != (figures / path.name).read_bytes()] == []


def test_a_heat_map_has_the_mean_and_the_mark_of_each_cell(sweep):
    matrix = compare_runs([sweep]).matrix
    with drawing_style():
        (axes,) = draw_heat_map(matrix).axes
    shown = [(text.get_position()[0], round(text.get_position()[1]), text.get_text()) for text in axes.texts]
    assert shown == [
        (column, row, text)
        for (row, column), cell in matrix.cells.items()
        for text in (f"{cell.mean:.1f}{'*' * cell.differs}", f"({min(cell.values):.1f}–{max(cell.values):.1f})")
    ]
    assert axes.get_xlabel() == "scaled accuracy, %; 2 seeds, lowest to highest"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["attention", "lstm"]


def test_models_differ_without_colour():
    without_colour = [tuple(line_style(number)[key] for key in ("linestyle", "marker")) for number in range(8)]
    every = [tuple(line_style(number)[key] for key in ("color", "linestyle", "marker")) for number in range(56)]
    assert len(set(without_colour)) == 8 and len(set(every)) == 56


def test_a_band_spans_the_seeds_and_interpolates_between_their_points():
    first = {"steps": np.array([0.0, 10, 20]), "tokens": np.array([0.0, 1, 2]), "y": np.array([4.0, 2, 1])}
    second = {"steps": np.array([0.0, 20]), "tokens": np.array([0.0, 4]), "y": np.array([8.0, 4])}
    short = {"steps": np.array([0.0]), "tokens": np.array([np.nan]), "y": np.array([6.0])}
    line = line_through("a", [first, second, short])
    assert list(line.x["steps"]) == [0, 10, 20] and list(line.x["tokens"]) == [0, 1.5, 3]
    assert (list(line.low), list(line.mean), list(line.high)) == ([4, 2, 1], [6, 4, 2.5], [8, 6, 4])


@pytest.mark.grid
def test_a_file_in_the_place_of_the_folder_is_refused(sweep, tmp_path):
    (tmp_path / "file").write_text("")
    assert "--figures: must be a folder" in refused("compare", sweep, "--matrix", "--figures", tmp_path / "file")


def test_a_legend_of_long_names_lies_within_the_figure():
    labels = [f"gated_delta_rule, positions between layers {number}" for number in range(5)]
    lines = [line_over("step", label, {0: [0.0], 1: [1.0]}) for label in labels]
    for tasks in (1, 6):
        with drawing_style():
            drawn = draw_lines([LineChart("loss", str(task), lines, ["step"], "nats") for task in range(tasks)])
            drawn.draw_without_rendering()
        box, (legend,) = drawn.bbox, drawn.legends
        assert box.x0 <= legend.get_window_extent().x0 and legend.get_window_extent().x1 <= box.x1


@pytest.mark.grid
def test_any_name_of_a_model_is_drawn(tmp_path):
    for number, mixer in enumerate(("_mine", "\x1b[2J\ud800", "$x_", "lstm")):
        leave_answers(tmp_path / "runs" / str(number), "parity", mixer, 1, 0.5)
    for path in save_figures(compare_runs([tmp_path / "runs"]), tmp_path / "figures"):
        if path.suffix == ".svg":
            ElementTree.parse(path)


def test_means_show_their_seeds_on_the_whole_axis_and_no_test_that_cannot_tell(sweep):
    matrix = compare_runs([sweep]).matrix
    with drawing_style():
        drawn = draw_means(matrix)
    for panel in drawn.axes:
        low, high = panel.get_xlim()
        assert low <= 0 and high >= 100
        seeds = [
            list(line.get_xdata()) for line in panel.lines if line.get_marker() == "|" and len(line.get_xdata()) > 1
        ]
        assert sorted(map(sorted, seeds)) in [[[10, 20], [90, 90]], [[10, 20], [10, 20]]]
        assert {0, 100} <= {line.get_xdata()[0] for line in panel.lines if line.get_linestyle() == ":"}
    assert drawn._supxlabel.get_text().endswith("no test of a single task: this needs 5 seeds")


def test_cells_without_all_seeds_or_without_a_test_are_marked(tmp_path):
    for mixer, task, seed in itertools.product(("attention", "lstm", "rnn"), ("parity", "mqar"), range(6)):
        score = {"attention": 0.9, "lstm": 0.5, "rnn": 0.2}[mixer] + seed / 100
        state = "diverged" if mixer == "lstm" and seed > 3 else "done"
        if mixer != "rnn" or seed < 2:
            leave_answers(tmp_path / f"{mixer}-{task}-{seed}", task, mixer, seed, score, state=state)
    matrix = compare_runs([tmp_path]).matrix
    with drawing_style():
        (heat_map,), means = draw_heat_map(matrix).axes, draw_means(matrix)
    assert [text.get_text().split()[-1] for text in heat_map.texts[1::2]] == ["n=6"] * 2 + ["n=4/6"] * 2 + ["n=2"] * 2
    assert heat_map.get_xlabel().endswith("2 to 6 seeds, 95 % intervals, or lowest to highest of up to 3")
    markers = [line.get_marker() for line in means.axes[0].lines if line.get_marker() in ("o", "x")]
    assert markers == ["o", "x", "o"] and means.get_supxlabel().endswith("; ×: not tested")


def test_an_axis_of_scores_that_differ_by_noise_is_not_narrow(tmp_path):
    for mixer, seed in itertools.product(("attention", "lstm"), (1, 2)):
        run = leave_answers(tmp_path / f"{mixer}-{seed}", "parity", mixer, seed, 0.5)
        status = json.loads((run / "status.json").read_text())
        status["scores"]["test/perplexity"] = 40 + seed / 100
        (run / "status.json").write_text(json.dumps(status))
    with drawing_style():
        (panel,) = draw_means(compare_runs([tmp_path], metric="perplexity").matrix).axes
    low, high = panel.get_xlim()
    assert high - low >= 4
