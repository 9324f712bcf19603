"""Tables at every width: no number and no name of a run is cut."""

import contextlib
import io
from collections import Counter
from functools import partial

import pytest
from rich.cells import cell_len

from tests.conftest import sentences
from tests.run_folders import garbled, leave_run
from tfm_blocks.cli import main
from tfm_blocks.report.comparison import compare_runs
from tfm_blocks.report.comparison_tables import sheets_of
from tfm_blocks.report.screen import screen
from tfm_blocks.report.table import Cell, Column, Sheet, fit, print_sheet, split_columns
from tfm_blocks.sweep.view import SweepRow, show_end

REFERENCES = sentences(30, 7)
BOX = "━┃┏┓┡┩┳╇│─└┘┴"
widths = pytest.mark.parametrize("width", [40, 60, 80, 120])


def printed(show, width, monkeypatch):
    """The lines at a width; None is a pipe without COLUMNS."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show()
    return out.getvalue().splitlines()


def joined(cells):
    return "".join("".join(cell.split()) for cell in cells)


def tables(lines):
    """The columns of each printed table: its header, and its lines below that."""
    found = []
    for line in lines:
        if line.startswith("┏"):
            found.append(([], []))
        for part, border in enumerate("┃│"):
            if line.startswith(border):
                found[-1][part].append([cell.strip() for cell in line.split(border)[1:-1]])
    return [list(zip(zip(*heads, strict=True), zip(*bodies, strict=True), strict=True)) for heads, bodies in found]


def assert_whole(lines, sheets):
    """Each column of the sheets is printed whole: texts may be folded, and no number."""
    columns = [one for table in tables(lines) for one in table]
    for sheet in sheets:
        for number, name in enumerate(sheet.columns):
            cells = [row[number] for row in sheet.rows]
            same = [
                body
                for head, body in columns
                if joined(head) == joined([name]) and joined(body) == joined(one.text for one in cells)
            ]
            assert same, (sheet.title, name)
            if any(cell.value is not None for cell in cells):
                words = Counter(word for cell in cells for word in cell.text.split())
                assert any(Counter(word for cell in body for word in cell.split()) == words for body in same), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two models of two seeds, whose names are as long as a sweep makes them."""
    folder = tmp_path_factory.mktemp("runs")
    for number, model in enumerate(("base", "prenorm")):
        for seed in (1, 2):
            name = f"model-{model}_optimizer.weight_decay-0.0{number + 1}_schedule-inverse_sqrt_seed-{seed}"
            outputs = garbled(REFERENCES, 0.2 + 0.1 * number, 10 * number + seed)
            leave_run(
                folder / name, REFERENCES, outputs, model=model, seed=seed, changed={"optimizer.eps": 10.0**-number}
            )
    return folder


@widths
def test_a_comparison_keeps_every_number_and_name_within_the_width(runs, width, monkeypatch):
    baseline = next(runs.iterdir()).name
    lines = printed(lambda: main(["compare", str(runs), "--baseline", baseline]), width, monkeypatch)
    assert_whole(lines, sheets_of(compare_runs([runs], baseline)))
    assert max(map(cell_len, lines)) <= width


@widths
def test_the_list_of_runs_keeps_every_number_and_name_within_the_width(runs, width, monkeypatch):
    lines = printed(lambda: main(["runs", "--in", str(runs)]), width, monkeypatch)
    assert max(map(cell_len, lines)) <= width and not any("…" in line for line in lines)
    (names, *_), *_ = tables(lines)
    assert sorted(joined(names[1]).split(str(runs))[1:]) == sorted(f"/{run.name}" for run in runs.iterdir())
    words = [word for table in tables(lines) for _, body in table for cell in body for word in cell.split()]
    assert words.count("60") == 4 and all(words.count(f"{step}") == 4 for step in ("done",))


@widths
def test_the_end_of_a_sweep_keeps_every_number_and_name_within_the_width(width, monkeypatch):
    jobs = [f"model=prenorm_d_model={size}_seed=1" for size in (64, 128)]
    rows = [SweepRow(name, "out of memory", log=f"{name}.log", step=1_234_567, best=2.3456) for name in jobs]
    lines = printed(lambda: show_end(rows, "runs/sweep"), width, monkeypatch)
    table_lines = [line for line in lines if line[0] in BOX]
    assert max(map(cell_len, table_lines)) <= width
    columns = {joined(head): body for table in tables(table_lines) for head, body in table}
    assert joined(columns["job"]) == "".join(jobs) and columns["steps"].count("1,234,567") == 2
    assert columns["bestval/loss"].count("2.3456") == 2


@widths
def test_a_model_keeps_every_number_within_the_width(width, monkeypatch):
    lines = printed(partial(main, ["show", "tiny"]), width, monkeypatch)
    wide = printed(partial(main, ["show", "tiny"]), None, monkeypatch)
    narrow, whole = (
        {(joined(head), joined(body)) for table in tables(each) for head, body in table} for each in (lines, wide)
    )
    assert narrow == whole
    assert max(cell_len(line) for line in lines) <= width
    assert all(any(word in line.split() for line in lines) for word in ("1,280,000", "2,359,296", "66,304"))


def test_a_pipe_is_as_wide_as_it_needs_and_respects_columns(runs, monkeypatch):
    show = partial(main, ["compare", str(runs)])
    wide = printed(show, None, monkeypatch)
    assert len(tables(wide)) == len(sheets_of(compare_runs([runs]))) and printed(show, 5000, monkeypatch) == wide
    monkeypatch.setenv("COLUMNS", "many")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show()
    assert out.getvalue().splitlines() == wide
    long = Sheet("", ["text"], [[Cell("word " * 100)]], 1)
    assert any("word " * 99 in line for line in printed(lambda: print_sheet(screen(), long), None, monkeypatch))


def test_columns_that_tell_the_rows_apart_stand_in_every_part(monkeypatch):
    rows = [[Cell("a"), Cell(f"score {number}"), *(Cell(f"{n:,}", n) for n in (10**9, 10**10))] for number in (1, 2)]
    sheet = Sheet("", ["model", "score", "one", "two"], rows, 2, keys=2)
    first, second = tables(printed(lambda: print_sheet(screen(), sheet), 40, monkeypatch))
    assert [head for head, _ in first] == [("model",), ("score",), ("one",)]
    assert [head for head, _ in second] == [("model",), ("score",), ("two",)]


def test_a_number_that_is_wider_than_the_console_is_printed_whole(monkeypatch):
    sheet = Sheet("", ["run", "score"], [[Cell("one"), Cell("1" * 60, 1)]], 1)
    assert any("1" * 60 in line for line in printed(lambda: print_sheet(screen(), sheet), 40, monkeypatch))


def test_the_widest_columns_shrink_first_and_none_below_its_narrowest():
    columns = [Column(0, 5, 5, 10, 30), Column(1, 8, 8, 8, 8), Column(2, 4, 4, 12, 12)]
    assert split_columns(columns, 1, 40) == [columns]
    assert fit(columns, 40) == [11, 8, 11] and fit(columns, 60) == [30, 8, 12]
    assert fit(columns, 10) == [5, 8, 4]
