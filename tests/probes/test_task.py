"""Properties of every task: reproducible examples, valid presets, and lengths that fit."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest
from scipy.stats import chisquare

from tests.probes.digests import digest
from tfm_blocks.errors import ConfigError
from tfm_blocks.probes.catalogue import TASKS
from tfm_blocks.probes.mqar import Mqar
from tfm_blocks.probes.strings import ReverseString
from tfm_blocks.probes.task import BLOCK, check_length, fitting_lengths

SIZES = [(name, size) for name in TASKS for size in TASKS[name].presets]
DIGESTS = {
    "mqar": "10a93ca8e527",
    "in_context_recall": "f8e6778290d3",
    "fuzzy_recall": "5140a5a00648",
    "noisy_recall": "436715f84220",
    "selective_copying": "e37cb8339efe",
    "compression": "bff510319a07",
    "memorisation": "572265a4030d",
    "parity": "a524ead61317",
    "even_pairs": "d25416516a33",
    "cycle_navigation": "17ff7cfff10c",
    "arithmetic": "789b955305e5",
    "arithmetic_brackets": "ebacbd5f959b",
    "word_problem": "130b21e80908",
    "reverse_string": "7681d3109763",
    "odds_first": "6557232b56f9",
    "bucket_sort": "dd3896bea087",
    "missing_duplicate": "f58b1c29ffe4",
    "stack_manipulation": "7bdc14fef24b",
    "scan": "89cb495c7f03",
    "copy": "9e69c76218d6",
    "reverse": "0634de78b9df",
    "sort": "1c573091ca31",
    "addition": "0598f4d347f6",
}


def lite(name):
    preset = TASKS[name].presets["lite"]
    task = TASKS[name](**preset.settings)
    return task, fitting_lengths(task, *preset.train_lengths) if preset.train_lengths else ()


def test_a_process_with_another_hash_seed_generates_the_same_examples():
    program = "import json, tests.probes.digests as d; print(json.dumps({name: d.digest(name) for name in d.TASKS}))"
    environment = {**os.environ, "PYTHONHASHSEED": "17", "PYTHONPATH": os.pathsep.join(sys.path)}
    text = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True).stdout
    assert json.loads(text) == {name: digest(name) for name in TASKS}


def test_examples_stay_the_same_on_every_machine_and_version():
    assert {name: digest(name) for name in TASKS} == DIGESTS, "results and caches rely on them"


@pytest.mark.parametrize("name", TASKS)
def test_another_seed_and_another_split_have_other_examples(name):
    assert len({digest(name), digest(name, seed=2), digest(name, split="val"), digest(name, split="test")}) == 4


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_a_preset_is_valid_and_its_lengths_fit(name, size):
    preset = TASKS[name].presets[size]
    task = TASKS[name](**preset.settings)
    lengths = fitting_lengths(task, *preset.train_lengths) if preset.train_lengths else ()
    for length in preset.test_lengths:
        check_length(task, "data.test_lengths", length)
    assert bool(lengths) == bool(preset.test_lengths)
    for one in task.examples(3, "val", lengths, 50):
        assert {*one.question, *one.answer} <= set(range(len(task.alphabet))) and one.answer
        if one.positions is not None:
            assert len(one.positions) == len(one.answer) and one.positions[-1] < len(one.question)
            assert all(left < right for left, right in pairwise((-1, *one.positions)))


@pytest.mark.parametrize("name", TASKS)
def test_names_of_tokens_are_different_and_contain_no_space(name):
    for preset in TASKS[name].presets.values():
        alphabet = TASKS[name](**preset.settings).alphabet
        assert len(set(alphabet)) == len(alphabet) and not any(
            set(word) & set(" \t\n") or not word for word in alphabet
        )


@pytest.mark.parametrize("name", TASKS)
def test_chance_matches_a_uniform_guess_among_the_symbols_of_answers(name):
    task, lengths = lite(name)
    symbols = {token for one in task.examples(1, "train", lengths[-1:], 2000) for token in one.answer}
    assert task.chance == 1 / len(symbols)


@pytest.mark.parametrize("name", TASKS)
def test_a_question_shows_its_answers_only_if_the_task_declares_it(name):
    task, lengths = lite(name)
    shown = [
        one.question[place + 1 : place + 2] == (token,)
        for one in task.examples(1, "train", lengths, 200)
        for place, token in zip(one.positions or (), one.answer, strict=False)
        if place + 1 < len(one.question)
    ]
    assert all(shown) if task.shows_answers else sum(shown) <= len(shown) / 2


def test_the_first_examples_do_not_depend_on_their_number():
    task = Mqar(vocab=64)
    few, many = (list(task.examples(1, "train", [32, 34], count)) for count in (10, BLOCK + 10))
    assert few == many[:10] and len(many) == BLOCK + 10 and len(set(many)) == len(many)


def test_splits_share_no_question_where_there_are_many():
    task = Mqar()
    train, val, test = (
        {one.question for one in task.examples(1, split, [64], 3000)} for split in ("train", "val", "test")
    )
    assert not train & val and not train & test and not val & test


def test_lengths_are_uniform():
    drawn = [len(one.answer) for one in ReverseString().examples(1, "train", range(1, 11), 5000)]
    assert chisquare([drawn.count(length) for length in range(1, 11)]).pvalue > 0.001


@pytest.mark.parametrize(
    ("name", "length", "rule", "help"),
    [
        ("parity", 0, "must be at least 1, but is 0", "fits is 1"),
        ("arithmetic", 40, "must be odd, since digits and operators alternate, but is 40", "fits is 39"),
        ("mqar", 12, "must be even and at least 16, to hold 4 pairs and 4 queries, but is 12", "fits is 16"),
        ("selective_copying", 16, "must be at least 33, to hold 16 tokens twice, but is 16", "fits is 33"),
        ("fuzzy_recall", 11, "must be at least 12", "fits is 12"),
        ("missing_duplicate", 7, "must be even and at least 2", "fits is 6"),
        ("in_context_recall", 2, "must be even and at least 4", "fits is 4"),
        ("memorisation", 5, "must be even and at least 2", "fits is 4"),
        ("compression", 1, "must be at least 2", "fits is 2"),
        ("arithmetic", 10**9, "must be at most 10,000, but is 1000000000", "fits is 9999"),
    ],
)
def test_a_length_that_does_not_fit_is_refused_with_one_that_does(name, length, rule, help):
    with pytest.raises(ConfigError) as error:
        check_length(TASKS[name](), "data.test_lengths", length)
    (problem,) = error.value.problems
    assert problem.address == "data.test_lengths" and rule in problem.rule and help in problem.help


def test_settings_that_no_memory_holds_are_refused():
    with pytest.raises(ConfigError, match=r"data.vocab: must be at most 1,000,000, but is 1000000000"):
        Mqar(vocab=10**9)
    with pytest.raises(ConfigError, match=r"data.train_lengths: must be at most 10,000, but is 1000000000"):
        fitting_lengths(TASKS["parity"](), 1, 10**9)


def test_a_range_in_which_no_length_fits_is_refused_with_one_that_does():
    with pytest.raises(
        ConfigError, match="no length from 64 to 64 fits the task: it must be even and at least 400"
    ) as error:
        fitting_lengths(Mqar(pairs=100), 64, 64)
    assert error.value.problems[0].help == "the nearest length that fits is 400"
    with pytest.raises(ConfigError, match="no length from -1000000000 to 0 fits the task"):
        fitting_lengths(TASKS["parity"](), -(10**9), 0)


def test_a_task_that_no_length_fits_is_refused():
    with pytest.raises(ConfigError) as error:
        check_length(Mqar(pairs=3000), "data.test_lengths", 64)
    assert error.value.problems[0].help == "change the settings of the task"
