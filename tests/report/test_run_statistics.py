"""Line statistics of runs are computed once, wherever they are stored."""

import time

import numpy as np
import pytest

from tests.conftest import sentences
from tests.run_folders import garbled, leave_run
from tfm_blocks.report.baseline_tests import run_statistics
from tfm_blocks.runs.row_results import TranslatedLine, read_translations, write_losses, write_translations
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.scoring.corpus import line_statistics

REFERENCES = [" ".join(pair) for pair in zip(sentences(200, 7), sentences(200, 8), strict=True)]
OUTPUTS = garbled(REFERENCES, 0.5, 1)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("TFM_BLOCKS_CACHE", str(tmp_path / "cache"))
    return leave_run(tmp_path / "run", REFERENCES, OUTPUTS)


def statistics(folder, tokenizer="13a"):
    notes = []
    return run_statistics(SavedRun(folder), tokenizer, notes), notes


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys() and all(np.array_equal(actual[name], expected[name]) for name in actual)


def test_the_second_time_takes_a_fraction_of_the_first(run):
    seconds, results = [], []
    for _ in range(2):
        start_time = time.process_time()
        results.append(statistics(run)[0])
        seconds.append(time.process_time() - start_time)
    assert seconds[1] < seconds[0] / 4
    for one in results:
        assert_equal(one, line_statistics(OUTPUTS, REFERENCES, "13a"))


def test_other_translations_and_other_tokenizers_have_other_statistics(run):
    first = statistics(run)[0]
    assert_equal(statistics(run, "char")[0], line_statistics(OUTPUTS, REFERENCES, "char"))
    write_translations(
        run, [TranslatedLine(one.source, one.reference, one.reference) for one in read_translations(run)]
    )
    assert_equal(statistics(run)[0], line_statistics(REFERENCES, REFERENCES, "13a"))
    assert not np.array_equal(statistics(run)[0]["BLEU"], first["BLEU"])


def test_the_run_folder_is_only_read_and_an_unusable_cache_is_done_without(run, tmp_path):
    files = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    (tmp_path / "cache").write_text("a file")
    assert_equal(statistics(run)[0], line_statistics(OUTPUTS, REFERENCES, "13a"))
    assert {path: path.stat().st_mtime_ns for path in run.iterdir()} == files and (tmp_path / "cache").is_file()


def test_damaged_cached_files_are_replaced(run, tmp_path):
    statistics(run)
    for path in (tmp_path / "cache").rglob("statistics.npz"):
        path.write_bytes(b"x")
    assert_equal(statistics(run)[0], line_statistics(OUTPUTS, REFERENCES, "13a"))


def test_losses_stand_beside_the_translations(run):
    losses_N6 = np.array([[3.0, 2.0, 4.0, 0.0, 1.0, 4.0]] * len(REFERENCES))
    write_losses(run, losses_N6)
    values, notes = statistics(run)
    assert np.array_equal(values["loss"], losses_N6[:, [0, 2]]) and notes == []
    assert np.array_equal(values["perplexity"], losses_N6[:, [1, 2]]) and "BLEU" in values
