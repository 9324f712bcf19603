"""The dates corpus: right, unambiguous, and held out by day."""

from datetime import date, timedelta
from pathlib import Path

import pytest
import yaml

from tfm_blocks.data.dates import date_splits, write_date
from tfm_blocks.errors import ConfigError

SHIPPED = yaml.safe_load((Path(__file__).parents[2] / "conf/data/dates.yaml").read_text())["patterns"]
FORMS = [(language, pattern) for language, patterns in SHIPPED.items() for pattern in patterns]


@pytest.mark.parametrize(
    ("language", "pattern", "written"),
    [
        ("en", "MMM d, y", "Mar 3, 1987"),
        ("de", "EEEE, d. MMMM y", "Dienstag, 3. März 1987"),
        ("de", "d. MMMM y | upper", "3. MÄRZ 1987"),
        ("fr", "'le' d MMMM y", "le 3 mars 1987"),
        ("es", "EEEE, d 'de' MMMM 'de' y", "martes, 3 de marzo de 1987"),
        ("it", "E d MMM y | lower", "mar 3 mar 1987"),
    ],
)
def test_a_form_writes_the_date_as_people_do(language, pattern, written):
    assert write_date(date(1987, 3, 3), language, pattern) == written


def test_every_shipped_form_has_one_reading():
    days = [date(year, 1, 1) + timedelta(offset) for year in (1987, 2012) for offset in range(365)]
    read = {}
    for form in FORMS:
        for day in days:
            assert read.setdefault(write_date(day, *form), day) == day, form


def test_five_languages_have_many_forms_each():
    assert set(SHIPPED) == {"en", "de", "fr", "es", "it"}
    assert all(len(set(patterns)) == len(patterns) >= 10 for patterns in SHIPPED.values())


def test_held_out_days_occur_in_no_other_split_in_any_form(dates):
    splits = date_splits(dates(seed=3, first_year=2000, last_year=2009, train=8000))
    train, val, test = ({iso for _, iso in splits[name].rows()} for name in ("train", "val", "test"))
    assert not train & val and not train & test and not val & test
    assert (len(val), len(test)) == (50, 50)


def test_training_days_come_once_before_any_comes_again(dates):
    pairs = list(date_splits(dates(seed=3, train=5000))["train"].rows())
    assert len({iso for _, iso in pairs}) == len(pairs) == 5000


def test_targets_are_the_iso_dates_of_what_is_written(dates):
    pairs = list(date_splits(dates(first_year=1990, last_year=1992))["train"].rows())
    for written, iso in pairs[:300]:
        year, _, day = iso.split("-")
        assert written in {write_date(date.fromisoformat(iso), *form) for form in FORMS}
        assert year in written and str(int(day)) in written


def test_held_out_pairs_are_even_over_the_languages(dates):
    for name in ("val", "test"):
        groups = date_splits(dates())[name].groups
        assert {language: groups.count(language) for language in SHIPPED} == dict.fromkeys(SHIPPED, 10)


def test_without_a_test_set_its_days_are_for_training(dates):
    splits = date_splits(dates(first_year=2000, last_year=2000, val=66, test=None, train=300))
    days = {name: {iso for _, iso in splits[name].rows()} for name in splits}
    assert set(days) == {"train", "val"} and not days["train"] & days["val"]
    assert len(days["train"]) == 300, "of the 366 days of the year"


def test_a_seed_gives_the_same_corpus_and_another_seed_another(dates):
    one, same, other = (date_splits(dates(seed=seed)) for seed in (1, 1, 2))
    for name in one:
        assert list(one[name].rows()) == list(same[name].rows()) != list(other[name].rows())
        assert one[name].fingerprint == same[name].fingerprint != other[name].fingerprint


@pytest.mark.parametrize(
    "changes", [{"last_year": 2009}, {"train": 60}, {"val": 9}, {"patterns": {"en": ["d MMM y"]}}], ids=str
)
def test_a_setting_that_changes_the_text_changes_the_fingerprint(dates, changes):
    before, after = (date_splits(dates(**changed))["train"] for changed in ({}, changes))
    assert list(before.rows()) != list(after.rows()) and before.fingerprint != after.fingerprint


@pytest.mark.parametrize(
    ("language", "pattern", "rule"),
    [
        ("en", "dd/MM/y", "month by name"),
        ("en", "d MMM yy", "year of four digits"),
        ("en", "MMM y", "one day"),
        ("en", "d d MMM y", "one day"),
        ("en", "d MMM y HH", "has HH"),
        ("en", "dy MMM", "a separator between"),
        ("ja", "dMMM y", "a separator between"),
        ("en", "d '1' MMM y", "must not contain literal digits"),
        ("en", "d MMM y | bold", "upper or lower"),
        ("xx", "d MMM y", "no language 'xx'"),
        ("../en", "d MMM y", "no language"),
    ],
)
def test_a_form_with_two_readings_or_none_is_refused_with_its_address(dates, language, pattern, rule):
    with pytest.raises(ConfigError, match=rule) as error:
        dates(patterns={language: [pattern]})
    (problem,) = error.value.problems
    assert problem.address.startswith(f"data.patterns.{language}") and problem.help


@pytest.mark.parametrize(
    "changes",
    [
        {"patterns": {}},
        {"patterns": {"en": []}},
        {"first_year": 900},
        {"first_year": 2100},
        {"seed": -1},
        {"train": 0},
        {"val": 80_000},
    ],
)
def test_numbers_that_give_no_corpus_are_refused(dates, changes):
    with pytest.raises(ConfigError):
        dates(**changes)
