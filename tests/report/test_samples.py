"""Samples side by side."""

from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import sentences
from tests.run_folders import garbled, leave_run
from tfm_blocks.report.samples import MOST_SAMPLES, choose_samples, common_test_set, mark
from tfm_blocks.runs.record import read_records
from tfm_blocks.runs.row_results import TranslatedLine

REFERENCES = sentences(100, 7)


@given(st.text(max_size=40), st.text(max_size=40))
def test_marked_pieces_give_back_both_texts(output, reference):
    pieces = mark(output, reference)
    assert "".join(one.text for one in pieces if one.kind != "missing") == output
    assert "".join(one.text for one in pieces if one.kind != "added") == reference


def test_only_what_differs_is_marked():
    marked = [(one.kind, one.text) for one in mark("2090-01-12", "2090-01-02")]
    assert marked == [("same", "2090-01-"), ("missing", "02"), ("added", "12")]
    assert {one.kind for one in mark("a b", "a b")} == {"same"}


def test_lines_on_which_runs_differ_come_first_and_are_spread_over_the_test_set():
    same = [TranslatedLine(str(number), "x", "x") for number in range(100)]
    other = [TranslatedLine(one.source, "y" if number % 10 == 3 else "x", "x") for number, one in enumerate(same)]
    chosen = [one.line - 1 for one in choose_samples({"a": same, "b": other})]
    assert len(chosen) == MOST_SAMPLES and set(range(3, 100, 10)) <= set(chosen) and chosen == sorted(chosen)
    assert min(set(chosen) - set(range(3, 100, 10))) < 10 and max(chosen) > 80
    assert choose_samples({}) == []


def test_runs_of_another_test_set_or_without_translations_are_left_out(tmp_path):
    leave_run(tmp_path / "one", REFERENCES, garbled(REFERENCES, 0.2, 1))
    leave_run(tmp_path / "other", REFERENCES[:9], REFERENCES[:9])
    leave_run(tmp_path / "old", REFERENCES, REFERENCES, old=True)
    leave_run(tmp_path / "two", REFERENCES, REFERENCES)
    found = common_test_set(read_records([tmp_path / name for name in ("one", "other", "old", "two")]))
    assert list(found) == ["one", "two"]
