"""`tfm probes`: the table of tasks, and the page of one."""

import re
from dataclasses import fields

import pytest

from tests.conftest import refused
from tfm_blocks.cli import main
from tfm_blocks.probes.catalogue import TASKS


def shown(capsys, *names):
    main(["probes", *names])
    return capsys.readouterr().out


def test_the_table_has_a_row_for_each_task(capsys):
    rows = re.findall(r"^│ (\w+) +│ \S.* │ \S.* │$", shown(capsys), re.MULTILINE)
    assert rows == list(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_every_setting_of_a_task_is_explained(name, capsys):
    rows = re.findall(r"^│ (\w+) +│ \S+ +│ \S+ +│ \S.* │$", shown(capsys, name), re.MULTILINE)
    assert rows == [field.name for field in fields(TASKS[name])]


def test_each_token_of_an_answer_stands_below_its_position(capsys):
    *_, question, answer = shown(capsys, "mqar").split("\n\n")[-2].split("\n")
    words = question.split()
    values = dict(zip(words[:8:2], words[1:8:2], strict=True))
    due = {match.start(): match[0] for match in re.finditer(r"v\d+", answer)}
    keys = {match.start(): match[0] for match in re.finditer(r"k\d+", question)}
    assert len(due) == 4
    assert due == {place: values[keys[place]] for place in due}


def test_a_generated_answer_follows_the_question(capsys):
    assert re.search(r"^(\d+(?: \d+)*) → \1$", shown(capsys, "copy"), re.MULTILINE)


def test_several_tasks_are_shown_one_after_another(capsys):
    text = shown(capsys, "parity", "scan")
    assert text.index("parity   Delétang") < text.index("scan   Lake")


def test_an_unknown_task_is_refused_with_the_nearest():
    assert "did you mean parity?" in refused("probes", "party")
