"""The parts of run.json."""

import json
from dataclasses import replace

import pytest

from tfm_blocks.errors import RunError
from tfm_blocks.runs.records import RunFile

FIRST = {"resumed": 0, "git_commit": None, "hardware": {"device": "cpu", "cores": 2}, "versions": {"torch": "2.13.0", "wandb": "0.31.0"}}  # fmt: skip
SECOND = {
    "resumed": 1,
    "git_commit": "0a1b",
    "hardware": {"device": "cpu", "cores": 2},
    "versions": {"torch": "2.14.0"},
}
THIRD = SECOND | {"resumed": 2, "hardware": {"device": "cuda", "cores": 16}}


def test_a_resume_keeps_the_facts_of_the_start_and_notes_those_that_have_changed(tmp_path):
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
def test_damaged_facts_are_refused_and_damaged_versions_are_unknown(tmp_path, damage):
    (tmp_path / "run.json").write_text(json.dumps({"facts": damage}))
    with pytest.raises(RunError, match=r"run\.json: is damaged: facts must be a mapping, but is"):
        RunFile.read(tmp_path)
    assert replace(RunFile(), facts={"versions": damage}).values_of("versions", "torch") == []


def test_a_folder_that_has_no_facts_gets_those_of_its_next_part():
    assert RunFile(vocab=300).with_facts(SECOND).facts == SECOND
