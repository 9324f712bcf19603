"""Reading the progress of a running run."""

import math

from tfm_blocks.sweep.job import Progress

HEADER = "step,train/tokens_per_second,val/loss,val/bleu\n"


def test_new_rows_are_read_and_an_incomplete_row_waits(tmp_path):
    path = tmp_path / "metrics.csv"
    progress = Progress("val/bleu")
    progress.read_new_rows(path)
    assert progress.step == 0 and math.isnan(progress.best)
    path.write_text(HEADER + "2,100,,\n4,,3.5,7\n6,20")
    progress.read_new_rows(path)
    assert (progress.step, progress.pace, progress.best, progress.scores) == (4, 100, 3.5, {4: 7})
    with path.open("a") as file:
        file.write("0,,\n8,,3.75,8\n")
    progress.read_new_rows(path)
    assert (progress.step, progress.pace, progress.best, progress.scores) == (8, 200, 3.5, {4: 7, 8: 8})
    assert progress.seconds_left(8) == 0


def test_metrics_that_a_resume_truncates_are_read_from_the_start(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(HEADER + "2,100,4,1\n4,100,3,2\n")
    progress = Progress()
    progress.read_new_rows(path)
    path.write_text(HEADER + "2,100,4,1\n")
    progress.read_new_rows(path)
    assert progress.step == 2


def test_a_file_that_shrinks_and_grows_between_two_reads_is_read_from_the_start(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(HEADER + "2,100,4,1\n4,100,3,2\n")
    progress = Progress("val/bleu")
    progress.read_new_rows(path)
    path.write_text(HEADER + "2,100,4,1\n3,1000,3.25,7\n40,1000,2.5,9\n")
    progress.read_new_rows(path)
    assert (progress.step, progress.best, progress.scores[3], progress.scores[40]) == (40, 2.5, 7, 9)


def test_damaged_rows_are_skipped(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(HEADER + "\n2,100,4,1\nx,100,3,2\n,,1,\n1e300,1,1,1\n4,y,nan,3\n")
    progress = Progress("val/bleu")
    progress.read_new_rows(path)
    assert (progress.step, progress.best, progress.scores) == (4, 4, {2: 1, 4: 3})
