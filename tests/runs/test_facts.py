"""What run.json keeps of the facts of a run, part by part."""

import pytest

from tfm_blocks.runs.facts import changes_of, first_facts, newest_facts, versions_of, with_facts

FIRST = {"resumed": 0, "git_commit": None, "hardware": {"device": "cpu", "cores": 2}, "versions": {"torch": "2.13.0", "wandb": "0.31.0"}}  # fmt: skip
SECOND = {
    "resumed": 1,
    "git_commit": "0a1b",
    "hardware": {"device": "cpu", "cores": 2},
    "versions": {"torch": "2.14.0"},
}
THIRD = SECOND | {"resumed": 2, "hardware": {"device": "cuda", "cores": 16}}


def test_a_resume_keeps_the_facts_of_the_start_and_notes_those_that_have_changed():
    record = with_facts({"vocab": 300}, FIRST)
    assert record == {"vocab": 300, "facts": FIRST}
    record = with_facts(with_facts(record, SECOND), THIRD)
    assert record["facts"] == FIRST and record["vocab"] == 300
    assert record["changes"] == [
        {"resumed": 1, "git_commit": "0a1b", "versions": {"torch": "2.14.0", "wandb": None}},
        {"resumed": 2, "hardware": {"device": "cuda", "cores": 16}},
    ]
    newest = newest_facts(record["facts"], record["changes"])
    assert newest == THIRD | {"versions": {"torch": "2.14.0", "wandb": None}}
    assert versions_of("torch", record["facts"], record["changes"]) == ["2.13.0", "2.14.0"]
    assert with_facts(record, THIRD)["changes"][2:] == [{}], "what is gone is noted once"


@pytest.mark.parametrize("damage", [3, [], "x", None])
def test_a_folder_that_has_none_gets_those_of_its_next_part(damage):
    record = {"facts": damage, "changes": damage}
    assert first_facts(record) == {} and changes_of(record) == []
    assert with_facts(record, SECOND)["facts"] == SECOND
    assert versions_of("torch", {"versions": damage}, [{"versions": damage}]) == []
