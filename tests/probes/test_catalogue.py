"""The files of conf/data/ agree with the docstrings of the tasks."""

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from tfm_blocks.probes.catalogue import TASKS

CONF = Path(__file__).parents[2] / "conf/data"


@pytest.mark.parametrize("name", TASKS)
def test_the_file_of_a_task_has_its_question_its_source_and_the_meanings_of_its_settings(name):
    text = " ".join((CONF / f"{name}.yaml").read_text("utf-8").replace("\n#", "").removeprefix("#").split())
    lines = inspect.getdoc(TASKS[name]).splitlines()
    assert text.startswith(f"{lines[0]} Source: {TASKS[name].source}.")
    for setting in fields(TASKS[name]):
        meaning = next(line.removeprefix(f"{setting.name}: ") for line in lines if line.startswith(f"{setting.name}: "))
        assert f"{setting.name}: null # {meaning.rstrip('.')}" in text
