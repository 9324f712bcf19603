"""status.json has one reader and one writer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tfm_blocks.errors import RunError
from tfm_blocks.runs.metrics import Best
from tfm_blocks.runs.status import Status, read_status, read_status_or_empty, write_end, write_status

PACKAGE = Path(__file__).parents[2] / "tfm_blocks"
DONE = Status(
    "done",
    steps=9,
    seconds=2.5,
    scores={"test/loss": 1.5},
    scored_on="test",
    translation=({"name": "BLEU", "value": 3.0, "interval": 1.0},),
    test_set={"rows": 4, "sha256": "ab"},
    parameters=7,
    multiply_adds=8,
    lengths={"T": 2},
    best={"val/loss": Best(1.0, 6)},
)


@pytest.mark.parametrize(
    "status", [DONE, Status("running", resume="train"), Status("failed", "why", "train"), Status("averaged", of=("a",))]
)
def test_a_status_is_read_as_it_was_written(tmp_path: Path, status: Status) -> None:
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status


def test_a_finished_run_has_unknown_measurements_as_null_and_another_run_has_no_measurements(tmp_path: Path) -> None:
    write_status(tmp_path, DONE)
    record = json.loads((tmp_path / "status.json").read_text())
    assert record["tokens_seen"] is None and "reason" not in record
    write_status(tmp_path, Status("running", resume="train"))
    assert json.loads((tmp_path / "status.json").read_text()) == {"state": "running", "resume": "train"}


def test_values_of_another_type_count_as_missing(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": 3, "steps": -1, "scores": {"test/loss": "x"}, "best": {"a": 1}}')
    assert read_status(tmp_path) == Status(best={})


def test_a_damaged_status_names_its_file_and_is_empty_in_a_listing(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("[")
    with pytest.raises(RunError, match=r"status\.json: is damaged"):
        read_status(tmp_path)
    assert read_status_or_empty(tmp_path) == Status()


def test_an_end_is_written_over_the_old_status_if_no_new_file_can_be_made(tmp_path: Path) -> None:
    write_status(tmp_path, Status("running", resume="a long command " * 9))
    (tmp_path / "status.json.part").mkdir()  # as on a full disk, the new file cannot be written
    with pytest.raises(OSError):
        write_status(tmp_path, Status("failed"))
    write_end(tmp_path, Status("failed", "why"))
    assert read_status(tmp_path) == Status("failed", "why")


def test_no_other_module_reads_or_writes_the_file() -> None:
    using = {
        path.name for path in PACKAGE.rglob("*.py") if re.search(r"(json|empty)\(\w+[\w.]* / STATUS", path.read_text())
    }
    assert using == {"status.py", "python.py"}  # python.py returns the file as it is
