"""Properties of every task: random draws, reproducible examples, valid presets, lengths that fit, and documentation."""

import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.conftest import expect_problem
from tests.probes.digests import digest
from tfm_blocks.errors import ConfigError
from tfm_blocks.probes.catalogue import TASKS
from tfm_blocks.probes.recall import Mqar
from tfm_blocks.probes.strings import ReverseString
from tfm_blocks.probes.task import (
    BLOCK,
    Example,
    at_blanks,
    at_positions,
    check_length,
    distinct,
    fitting_lengths,
    generated,
    integers,
    order,
    random_stream,
)


def test_integers_are_uniform_between_their_bounds():
    drawn = integers(random_stream(1, "integers"), 3, 10, (70_000,))
    assert chisquare(np.bincount(drawn, minlength=10)[3:]).pvalue > 0.001 and drawn.min() == 3 and drawn.max() == 9


@pytest.mark.parametrize("each", [1, 2, 4])
def test_every_arrangement_of_different_integers_is_equally_likely(each):
    rows = Counter(map(tuple, distinct(random_stream(1, "distinct"), 5, 9, 24_000, each).tolist()))
    assert set(rows) == set(permutations(range(5, 9), each))
    assert chisquare(list(rows.values())).pvalue > 0.001


def test_rows_are_permuted_independently_and_uniformly():
    rows = Counter(map(tuple, order(random_stream(1, "order"), (12_000, 3)).tolist()))
    assert set(rows) == set(permutations(range(3))) and chisquare(list(rows.values())).pvalue > 0.001


def test_each_seed_and_name_has_another_stream():
    names = [
        (1, "train", 8, 0),
        (1, "train", 8, 1),
        (1, "train", 80),
        (1, "train", 8),
        (1, "val", 8, 0),
        (2, "train", 8, 0),
    ]
    assert len({random_stream(*name).random() for name in names}) == len(names)


def test_a_label_is_due_where_it_is_not_minus_one():
    questions, labels = np.array([[5, 6, 7], [8, 9, 4]]), np.array([[-1, 0, 3], [2, -1, -1]])
    assert at_positions(questions, labels) == [Example((5, 6, 7), (0, 3), (1, 2)), Example((8, 9, 4), (2,), (0,))]


def test_blanks_follow_the_string_and_may_be_more_than_the_answer():
    assert at_blanks(np.array([[1, 2]]), np.array([[3, 4, -1]]), blank=9) == [Example((1, 2, 9, 9, 9), (3, 4), (2, 3))]


def test_a_generated_answer_has_no_positions():
    assert generated(np.array([[1, 2]]), np.array([[-1, 4]])) == [Example((1, 2), (4,), None)]


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
    with expect_problem("data.test_lengths", rule, help):
        check_length(TASKS[name](), "data.test_lengths", length)


@pytest.mark.parametrize(
    ("name", "settings", "rule"),
    [
        ("in_context_recall", {"vocab": 3}, "data.vocab: must be at least 4, but is 3"),
        ("noisy_recall", {"vocab": 19}, "data.vocab: must be at least 20, but is 19"),
        ("noisy_recall", {"noise_tokens": 0}, "data.noise_tokens: must be at least 1"),
        ("noisy_recall", {"noise": 1.0}, "data.noise: must be at least 0 and below 1, but is 1.0"),
        ("fuzzy_recall", {"vocab": 6}, "data.vocab: must be at least 7, for motifs of 3 different tokens, but is 6"),
        ("fuzzy_recall", {"motif": 0}, "data.motif: must be at least 1, but is 0"),
        ("mqar", {"vocab": 9}, "data.vocab: must be even and at least 10, for 4 different keys, but is 9"),
        ("mqar", {"vocab": 8}, "at least 10"),
        ("mqar", {"vocab": 33}, "must be even"),
        ("mqar", {"pairs": 0}, "data.pairs: must be at least 1, but is 0"),
        ("mqar", {"filler": "noise"}, "data.filler: must be blank or random, but is noise"),
        ("memorisation", {"vocab": 3}, "data.vocab: must be at least 4"),
        ("memorisation", {"map": -1}, "data.map: must be at least 0"),
        ("selective_copying", {"vocab": 3}, "data.vocab: must be at least 4, but is 3"),
        ("selective_copying", {"tokens": 0}, "data.tokens: must be at least 1, but is 0"),
        ("compression", {"vocab": 2}, "data.vocab: must be at least 3, but is 2"),
        ("bucket_sort", {"symbols": 1}, "data.symbols: must be at least 2, but is 1"),
        ("cycle_navigation", {"modulus": 1}, "data.modulus: must be at least 2, but is 1"),
        ("word_problem", {"group": "Z60"}, "data.group: must be one of S3, A5, S5, but is Z60"),
        ("arithmetic_brackets", {"modulus": 1}, "data.modulus: must be at least 2, but is 1"),
        (
            "arithmetic_brackets",
            {"operators": "+/"},
            "data.operators: must be one or more of +-*, each at most once, but is '+/'",
        ),
        ("arithmetic_brackets", {"operators": ""}, "data.operators"),
        ("arithmetic_brackets", {"operators": "++"}, "each at most once"),
    ],
)
def test_settings_that_do_not_fit_a_task_are_refused(name, settings, rule):
    with pytest.raises(ConfigError, match=re.escape(rule)):
        TASKS[name](**settings)


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


CONF = Path(__file__).parents[2] / "conf/data"


@pytest.mark.parametrize("name", TASKS)
def test_the_file_of_a_task_has_its_question_its_source_and_the_meanings_of_its_settings(name):
    text = " ".join((CONF / f"{name}.yaml").read_text("utf-8").replace("\n#", "").removeprefix("#").split())
    lines = inspect.getdoc(TASKS[name]).splitlines()
    assert text.startswith(f"{lines[0]} Source: {TASKS[name].source}.")
    for setting in fields(TASKS[name]):
        meaning = next(line.removeprefix(f"{setting.name}: ") for line in lines if line.startswith(f"{setting.name}: "))
        assert f"{setting.name}: null # {meaning.rstrip('.')}" in text
