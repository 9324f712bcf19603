"""Generated examples as corpora."""

import importlib
import sys

import pytest

from tests.data.test_probe_settings import probe
from tfm_blocks.data.corpus import POSITIONS
from tfm_blocks.data.prepare import prepare
from tfm_blocks.data.tokenizer import SPECIAL
from tfm_blocks.probes.catalogue import TASKS

SMALL = {"train": 30, "val": 5, "test": 4}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TFM_BLOCKS_CACHE", str(tmp_path))


def made(conf, name, **changes):
    lines = []
    return prepare(probe(conf, name, **{**SMALL, **changes}), 300, lines.append), lines


@pytest.mark.parametrize("name", ["mqar", "reverse"])
def test_a_corpus_has_the_examples_of_its_task(conf, name):
    prepared, _ = made(conf, name)
    settings = probe(conf, name, **SMALL)
    expected = list(settings.probe.examples(settings.seed, "train", settings.lengths["train"], 30))
    assert len(prepared.train) == 30 and prepared.train.columns == ("src", "tgt")
    assert prepared.train.positional == (name == "mqar")
    for row, example in enumerate(expected):
        assert prepared.train.ids("src", row).tolist() == [len(SPECIAL) + token for token in example.question]
        assert prepared.train.ids("tgt", row).tolist() == [len(SPECIAL) + token for token in example.answer]
        names = settings.probe.alphabet
        assert prepared.train.text["src"][row] == " ".join(names[token] for token in example.question)
        if example.positions is not None:
            assert prepared.train.ids(POSITIONS, row).tolist() == list(example.positions)


def test_every_test_length_has_its_examples_and_is_the_group_of_its_rows(conf):
    prepared, lines = made(conf, "parity", test_lengths=[8, 20])
    assert list(prepared.test.groups) == 4 * ["8"] + 4 * ["20"]
    assert prepared.test.lengths_N("src").tolist() == 4 * [9] + 4 * [21]  # a blank follows the bits
    assert "data: parity, lite: 8 test examples of length 8, 20" in lines
    assert "data: vocabulary of 7 tokens" in lines
    assert not prepared.val.groups


def test_a_task_without_lengths_has_all_its_test_examples(conf):
    prepared, _ = made(conf, "scan", test=50_000)
    assert len(prepared.test) == 4182 and not prepared.test.groups and not prepared.test.positional


def test_another_seed_gives_other_examples_and_the_same_seed_the_same(conf, tmp_path, monkeypatch):
    first, again, other = made(conf, "parity")[0], made(conf, "parity")[0], made(conf, "parity", seed=2)[0]
    monkeypatch.setenv("TFM_BLOCKS_CACHE", str(tmp_path / "other"))
    elsewhere, _ = made(conf, "parity")
    texts = [list(one.train.text["src"][:]) for one in (first, again, elsewhere, other)]
    assert texts[0] == texts[1] == texts[2] != texts[3]


PLUGGED = """
from tfm_blocks.probes.strings import BitTask, Parity
from plugged_tasks.answers import answers

class Plugged(BitTask):
    presets = Parity.presets

    def answers(self, strings):
        return answers(strings)[:, None]
"""


@pytest.mark.parametrize("packaged", [False, True])
def test_an_edited_generator_of_a_plug_in_makes_new_examples(conf, tmp_path, monkeypatch, packaged):
    """The edit is in the module of the task, or in another module of its package."""
    folder = tmp_path / "plugged_tasks" if packaged else tmp_path
    folder.mkdir(exist_ok=True)
    module = "plugged_tasks.tasks" if packaged else "plugged_task"
    edited = folder / ("answers.py" if packaged else "plugged_task.py")
    if packaged:
        (folder / "__init__.py").write_text("")
        (folder / "tasks.py").write_text(PLUGGED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def answers(rule):
        text = f"def answers(bits):\n    return {rule}\n"
        edited.write_text(text if packaged else text + PLUGGED.replace("from plugged_tasks.answers import answers", ""))
        for name in [name for name in sys.modules if name.startswith("plugged_task")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        monkeypatch.setitem(TASKS, "parity", importlib.import_module(module).Plugged)
        prepared, _ = made(conf, "parity")
        return [text.split()[0] for text in prepared.train.text["tgt"][:]]

    first, edit = answers("bits[:, 0]"), answers("1 - bits[:, 0]")
    assert [{"0": "1", "1": "0"}[answer] for answer in first] == edit and set(first) == {"0", "1"}
    assert answers("bits[:, 0]") == first
