"""The content of status.json and run.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tfm_blocks.errors import RunError
from tfm_blocks.runs.metrics import Best
from tfm_blocks.runs.records import RunFile, Score, ScoredSet, Status

FIRST = {"resumed": 0, "git_commit": None, "hardware": {"device": "cpu", "cores": 2}, "versions": {"torch": "2.13.0", "wandb": "0.31.0"}}  # fmt: skip
SECOND = {
    "resumed": 1,
    "git_commit": "0a1b",
    "hardware": {"device": "cpu", "cores": 2},
    "versions": {"torch": "2.14.0"},
}
THIRD = SECOND | {"resumed": 2, "hardware": {"device": "cuda", "cores": 16}}
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


def test_a_resume_keeps_the_facts_of_the_start_and_notes_those_that_have_changed(tmp_path: Path) -> None:
    start = RunFile(vocab=300).with_facts(FIRST)
    assert start == RunFile(vocab=300, facts=FIRST)
    start = start.with_facts(SECOND).with_facts(THIRD)
    assert start.facts == FIRST and start.vocab == 300
    assert start.changes == (
        {"resumed": 1, "git_commit": "0a1b", "versions": {"torch": "2.14.0", "wandb": None}},
        {"resumed": 2, "hardware": {"device": "cuda", "cores": 16}},
    )
    assert start.newest_facts == THIRD | {"versions": {"torch": "2.14.0", "wandb": None}}
    assert start.values_of("versions", "torch") == ["2.13.0", "2.14.0"]
    assert start.with_facts(THIRD).changes[2:] == ({},), "what is gone is noted once"
    start.write(tmp_path)
    assert RunFile.read(tmp_path) == start


@pytest.mark.parametrize("damage", [3, [], "x"])
def test_damaged_facts_are_refused_and_damaged_versions_are_unknown(tmp_path: Path, damage: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"facts": damage}))
    with pytest.raises(RunError, match=r"run\.json: is damaged: facts must be a mapping, but is"):
        RunFile.read(tmp_path)
    assert replace(RunFile(), facts={"versions": damage}).values_of("versions", "torch") == []


def test_a_folder_that_has_no_facts_gets_those_of_its_next_part() -> None:
    assert RunFile(vocab=300).with_facts(SECOND).facts == SECOND
