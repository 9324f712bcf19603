"""Tables at every width never cut a number or a run name."""

import contextlib
import csv
import io
import math
import re
import shutil
import subprocess
from collections import Counter
from functools import partial

import pytest
from rich.cells import cell_len

from tests.conftest import sentences
from tests.run_folders import garbled, leave_run
from tfm_blocks.cli import main
from tfm_blocks.report.comparison import compare_runs
from tfm_blocks.report.comparison_tables import tables_of
from tfm_blocks.report.screen import ColumnWidths, fit, print_table, split_columns, split_for_page
from tfm_blocks.report.table import COUNT, Column, Table, csv_text, latex, markdown, p_cell, texts
from tfm_blocks.sweep.job import Progress, SweepJob
from tfm_blocks.sweep.view import show_end

REFERENCES = sentences(30, 7)
BOX = "━┃┏┓┡┩┳╇│─└┘┴"
widths = pytest.mark.parametrize("width", [40, 60, 80, 120])


def printed(show, width, monkeypatch):
    """Return the lines at a width; None is a pipe without COLUMNS."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show()
    return out.getvalue().splitlines()


def test_a_p_value_is_never_0_and_each_line_of_a_note_is_a_paragraph():
    assert [p_cell(p).text for p in (0.00004, 0.00006, 0.0123)] == ["< 0.0001", "0.0001", "0.0123"]
    table = Table("t", texts("a"), [["b"]], note="one: 1\ntwo")
    assert markdown(table).endswith("| b |\n\none: 1\n\ntwo") and r"one: 1\par two\par" in latex(table)


def joined(cells):
    return "".join("".join(cell.split()) for cell in cells)


def tables(lines):
    """Return the columns of each printed table: its header lines and its body lines."""
    cells = []
    for line in lines:
        if line.startswith("┏"):
            cells.append(([], []))
        for part, border in enumerate("┃│"):
            if line.startswith(border):
                cells[-1][part].append([cell.strip() for cell in line.split(border)[1:-1]])
    return [list(zip(zip(*heads, strict=True), zip(*bodies, strict=True), strict=True)) for heads, bodies in cells]


def assert_whole(lines, expected):
    """Check that each column is complete: texts may be folded, numbers may not."""
    columns = [one for table in tables(lines) for one in table]
    for table in expected:
        for number, name in enumerate(table.headings):
            cells = [row[number] for row in table.cells]
            same = [
                body
                for head, body in columns
                if joined(head) == joined([name]) and joined(body) == joined(one.text for one in cells)
            ]
            assert same, (table.title, name)
            if any(cell.value is not None for cell in cells):
                words = Counter(word for cell in cells for word in cell.text.split())
                assert any(Counter(word for cell in body for word in cell.split()) == words for body in same), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Write runs of two models with two seeds each, with the longest names that a sweep makes."""
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
    assert_whole(lines, tables_of(compare_runs([runs], baseline)))
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
def test_the_end_of_a_sweep_keeps_every_number_and_name_within_the_width(width, monkeypatch, tmp_path):
    jobs = [f"model=prenorm_d_model={size}_seed=1" for size in (64, 128)]
    progress = Progress(step=1_234_567, best=2.3456)
    rows = [SweepJob(name, [], state="out of memory", progress=progress) for name in jobs]
    for name in jobs:
        (tmp_path / f"{name}.log").touch()
    lines = printed(lambda: show_end(rows, tmp_path), width, monkeypatch)
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
    assert len(tables(wide)) == len(tables_of(compare_runs([runs]))) and printed(show, 5000, monkeypatch) == wide
    monkeypatch.setenv("COLUMNS", "many")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show()
    assert out.getvalue().splitlines() == wide
    long = Table("", texts("text"), [["word " * 100]])
    assert any("word " * 99 in line for line in printed(lambda: print_table(long), None, monkeypatch))


def test_columns_that_distinguish_rows_are_repeated_in_every_part(monkeypatch):
    rows = [["a", f"score {number}", 10**9, 10**10] for number in (1, 2)]
    table = Table("", [*texts("model", "score"), Column("one", COUNT), Column("two", COUNT)], rows, keys=2)
    first, second = tables(printed(lambda: print_table(table), 40, monkeypatch))
    assert [head for head, _ in first] == [("model",), ("score",), ("one",)]
    assert [head for head, _ in second] == [("model",), ("score",), ("two",)]


def test_a_number_that_is_wider_than_the_console_is_printed_whole(monkeypatch):
    table = Table("", [Column("run"), Column("score", "{}")], [["one", int("1" * 60)]])
    assert any("1" * 60 in line for line in printed(lambda: print_table(table), 40, monkeypatch))


def test_the_widest_columns_shrink_first_and_none_below_its_narrowest():
    columns = [ColumnWidths(0, 5, 5, 10, 30), ColumnWidths(1, 8, 8, 8, 8), ColumnWidths(2, 4, 4, 12, 12)]
    assert split_columns(columns, 1, 40) == [columns]
    assert fit(columns, 40) == [11, 8, 11] and fit(columns, 60) == [30, 8, 12]
    assert fit(columns, 10) == [5, 8, 4]


HOSTILE = "[a_b & 50 % | $x {y} \\z ~^#<b>\x1b[2J\nline"
MIXED = Table(
    "scores & more",
    [Column("run"), Column("loss", "{:.2f}", "lower"), Column("BLEU", "{:.1f}", "higher")],
    [["a", 1.25, 10.0], [HOSTILE, 0.5, None], ["c", math.nan, 40.0]],
)


def test_markdown_aligns_numbers_marks_the_best_and_escapes_what_ends_a_cell():
    title, _, head, rules, first, second, third = markdown(MIXED).splitlines()
    assert (title, head, rules) == ("**scores & more**", "| run | loss | BLEU |", "| --- | ---: | ---: |")
    assert (first, third) == ("| a | 1.25 | 10.0 |", "| c |  | **40.0** |")
    assert len(re.findall(r"(?<!\\)\|", second)) == 4 and "<b>" not in second and "\\x1b" in second


def test_csv_has_unrounded_numbers_and_blanks():
    rows = list(csv.reader(io.StringIO(csv_text(MIXED))))
    assert rows[0] == ["run", "loss", "BLEU"] and rows[1] == ["a", "1.25", "10.0"] and rows[3] == ["c", "", "40.0"]
    assert rows[2] == [HOSTILE.replace("\x1b", "\\x1b"), "0.5", ""]


def test_latex_has_the_rules_of_booktabs_and_the_best_numbers_in_bold():
    lines = latex(MIXED).splitlines()
    assert lines[1:6] == [
        r"\centering",
        r"\caption{scores \& more}",
        r"\label{tab:scores-more}",
        r"\begin{tabular}{lrr}",
        r"\toprule",
    ]
    assert lines[6:9] == [r"run & loss & BLEU \\", r"\midrule", r"a & 1.25 & 10.0 \\"]
    assert lines[9].endswith(r" & \textbf{0.50} &  \\") and lines[10:12] == [r"c &  & \textbf{40.0} \\", r"\bottomrule"]


def test_a_latex_table_that_is_wider_than_a_page_is_split_and_repeats_its_keys():
    """A digit of cmr10 is 5 pt wide, a column has 12 pt of space, and the text of the article class is 345 pt wide."""
    columns = [*texts("model", "note"), *(Column(f"score {number}", "{:.1f}", "higher") for number in range(14))]
    rows = [
        [name, 20 * "word ", *(100.0 * row + number for number in range(14))] for row, name in enumerate(("a", "b"))
    ]
    parts = split_for_page(Table("scores", columns, rows, note="means"))
    assert len(parts) > 1 and [part.title for part in parts] == [
        f"scores ({number} of {len(parts)})" for number in range(1, len(parts) + 1)
    ]
    shown = [column.heading for part in parts for column in part.columns[1:]]
    assert shown == ["note", *(f"score {number}" for number in range(14))]
    assert {part.columns[0].heading for part in parts} == {"model"} and [part.note for part in parts[:-1]] == [""] * (
        len(parts) - 1
    )
    assert parts[-1].note == "means"
    for part in parts:
        widths = [max(map(len, (heading, *cells))) for heading, *cells in _texts_of_columns(part)]
        assert sum(12 + 5 * min(width, 0.5 * 345 / 5) for width in widths) <= 345
        assert latex(part).count(r"\textbf{") == sum(bool(column.better) for column in part.columns)
    assert r"\begin{tabular}{lp{0.5\linewidth}" in latex(parts[0])
    assert split_for_page(MIXED) == [MIXED]


def _texts_of_columns(table):
    return zip(table.headings, *([cell.text for cell in row] for row in table.cells), strict=True)


def test_no_letter_of_a_cell_is_a_command_of_latex():
    cell = latex(Table("", texts("run"), [[HOSTILE]])).splitlines()[6].removesuffix(r" \\")
    rest = re.sub(r"\\(text(backslash|asciitilde|asciicircum)\{\}|[&%$#_{}])|\$[<>|]\$|\{\[\}", "", cell)
    assert not set(rest) & set("&%$#_{}~^<>|\\["), rest


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex")
def test_latex_is_a_document(tmp_path):
    text = latex(MIXED)
    (tmp_path / "x.tex").write_text(
        f"\\documentclass{{article}}\\usepackage{{booktabs}}\\begin{{document}}{text}\\end{{document}}"
    )
    subprocess.run(["pdflatex", "-halt-on-error", "x.tex"], cwd=tmp_path, check=True, capture_output=True)
