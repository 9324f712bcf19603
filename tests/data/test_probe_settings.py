"""Settings of probe tasks: presets, overrides, and errors before any example is generated."""

from dataclasses import fields

import pytest
import yaml

from tests.conftest import expect_problem
from tests.data.conftest import read_data
from tfm_blocks.data.probe_settings import ProbeSettings
from tfm_blocks.data.settings import columns_of
from tfm_blocks.probes.catalogue import TASKS
from tfm_blocks.probes.recall import Mqar


def mapping(conf, name, **changes):
    return {
        **yaml.safe_load((conf / "_probe.yaml").read_text()),
        **{
            key: value
            for key, value in yaml.safe_load((conf / f"{name}.yaml").read_text()).items()
            if key != "defaults"
        },
        **changes,
    }


def probe(conf, name, **changes):
    settings = read_data(mapping(conf, name, **changes))
    assert isinstance(settings, ProbeSettings)
    return settings


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("size", ["lite", "paper"])
def test_the_file_of_a_task_lists_its_settings_and_has_the_sizes_of_its_presets(conf, name, size):
    written = set(yaml.safe_load((conf / f"{name}.yaml").read_text())) - {"defaults", "task"}
    assert written == {field.name for field in fields(TASKS[name])}
    settings, preset = probe(conf, name, size=size), TASKS[name].presets[size]
    assert settings.counts == {"train": preset.train, "val": preset.val, "test": preset.test}
    assert settings.lengths["test"] == tuple(preset.test_lengths)
    assert settings.vocab == 4 + len(settings.probe.alphabet)
    assert columns_of(settings) == ("src", "tgt")


def test_a_key_takes_precedence_over_the_preset(conf):
    settings = probe(conf, "mqar", pairs=8, test_lengths=[64, 128], first=500)
    assert settings.probe == Mqar(vocab=Mqar.presets["lite"].settings["vocab"], pairs=8)
    assert settings.lengths == {"train": (64,), "val": (64,), "test": (64, 128)}
    assert settings.counts == {"train": 500, "val": 500, "test": 500}


@pytest.mark.parametrize(
    ("name", "changes", "address", "rule"),
    [
        ("mqar", {"pairs": 0}, "data.pairs", "at least 1"),
        ("mqar", {"pairs": "four"}, "data.pairs", "must be an int, but is 'four'"),
        ("mqar", {"filler": "zero"}, "data.filler", "blank"),
        ("mqar", {"vocab": 6}, "data.vocab", "at least"),
        ("mqar", {"pears": 4}, "data.pears", "no such setting"),
        ("mqar", {"test_lengths": [64, 9]}, "data.test_lengths", "but is 9"),
        ("mqar", {"train_lengths": [1, 5]}, "data.train_lengths", "no length from 1 to 5"),
        ("parity", {"train_lengths": [40, 3]}, "data.train_lengths", "the shortest and the longest"),
        ("parity", {"task": "party"}, "data.task", "no task is called 'party'"),
        ("parity", {"size": "huge"}, "data.size", "one of lite, paper"),
        ("scan", {"cutoff": 50, "split": "length"}, "data.cutoff", "40"),
        ("scan", {"val": 301}, "data.val", "must be at most data.held_out=300, but is 301"),
        ("scan", {"held_out": 100}, "data.val", "must be at most data.held_out=100, but is 300"),
        ("scan", {"test_lengths": [5]}, "data.test_lengths", "has no lengths"),
        ("scan", {"train_lengths": [3, 40]}, "data.train_lengths", "has no lengths"),
    ],
)
def test_a_setting_that_does_not_fit_the_task_is_refused_with_its_key(conf, name, changes, address, rule):
    with expect_problem(address, rule):
        probe(conf, name, **changes)
