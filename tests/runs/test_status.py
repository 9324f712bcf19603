"""status.json has one reader and one writer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfm_blocks.errors import RunError
from tfm_blocks.runs.metrics import Best
from tfm_blocks.runs.records import Score, ScoredSet, Status

DONE = Status(
    "done",
    steps=9,
    seconds=2.5,
    scores={"test/loss": 1.5},
    scored_on="test",
    translation=(Score("BLEU", 3.0, 1.0),),
    test_set=ScoredSet(4, "ab"),
    parameters=7,
    multiply_adds=8,
    lengths={"T": 2},
    best={"val/loss": Best(1.0, 6)},
)


@pytest.mark.parametrize(
    "status", [DONE, Status("running", resume="train"), Status("failed", "why", "train"), Status("averaged", of=("a",))]
)
def test_a_status_is_read_as_it_was_written(tmp_path: Path, status: Status) -> None:
    status.write(tmp_path)
    assert Status.read(tmp_path) == status


def test_a_finished_run_has_unknown_measurements_as_null_and_another_run_has_no_measurements(tmp_path: Path) -> None:
    DONE.write(tmp_path)
    record = json.loads((tmp_path / "status.json").read_text())
    assert record["tokens_seen"] is None and "reason" not in record
    Status("running", resume="train").write(tmp_path)
    assert json.loads((tmp_path / "status.json").read_text()) == {"state": "running", "resume": "train"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"state": 3}', "state must be a text, but is 3"),
        ('{"steps": -1}', r"steps must be a whole number from 0 to 2\^63 - 1, but is -1"),
        ('{"steps": true}', "steps must be a whole number"),
        ('{"seconds": 1e999}', "seconds must be a finite number, but is inf"),
        ('{"tokens_seen": 1' + "0" * 400 + "}", "tokens_seen must be a finite number"),
        ('{"scores": {"test/loss": "x"}}', "scores.test/loss must be a finite number, but is 'x'"),
        ('{"of": [1]}', "of.0 must be a text, but is 1"),
        ('{"best": {"val/loss": {"value": 1}}}', "best.val/loss.step is missing"),
        ('{"best": 1}', "best must be a mapping, but is 1"),
        ('{"test_set": []}', r"test_set must be a mapping, but is \[\]"),
        ('{"scores": ' + '{"a":' * 99 + "1" + "}" * 100, "it nests deeper than 64"),
        ("[", "is damaged"),
        ("[]", "it is not a JSON object"),
    ],
)  # fmt: skip
def test_a_damaged_status_names_its_file_and_key_and_is_empty_in_a_listing(
    tmp_path: Path, content: str, problem: str
) -> None:
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(RunError, match=rf"status\.json: is damaged: .*{problem}|status\.json: {problem}"):
        Status.read(tmp_path)
    assert Status.read_or_empty(tmp_path) == Status()


def test_null_and_unknown_keys_count_as_missing(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"steps": null, "seconds": NaN, "scores": {"a": null, "b": 1}, "new": 3}')
    assert Status.read(tmp_path) == Status(scores={"b": 1})


def test_an_end_is_written_over_the_old_status_if_no_new_file_can_be_made(tmp_path: Path) -> None:
    Status("running", resume="a long command " * 9).write(tmp_path)
    (tmp_path / "status.json.part").mkdir()  # as on a full disk, the new file cannot be written
    with pytest.raises(OSError):
        Status("failed").write(tmp_path)
    Status("failed", "why").write_end(tmp_path)
    assert Status.read(tmp_path) == Status("failed", "why")
