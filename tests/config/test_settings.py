"""Mappings become typed settings, or a list of all problems."""

from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from tfm_blocks.config.settings import Count, Fraction, RuleError, Settings, read_settings
from tfm_blocks.errors import ConfigError


class Inner(Settings):
    file: str


class Apple(Settings):
    name: Literal["apple"]
    weight: float | Literal["heavy"]


class Pear(Settings):
    name: Literal["pear"]
    stalk: bool
    inner: Inner | None = None


def not_a(text):
    if text == "a":
        raise RuleError("may not be 'a'", "write 'b'")
    return text


NotA = Annotated[str, AfterValidator(not_a)]


class Part(Settings):
    steps: Count
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"
    betas: Annotated[list[Fraction], Field(min_length=1, max_length=2)]
    inner: Inner
    names: dict[NotA, list[NotA]]
    limit: int | None = None
    width: int | list[int] = 1
    every: int = 1

    @field_validator("every")
    @classmethod
    def within(cls, every: int, info: ValidationInfo) -> int:
        if every > info.data.get("steps", every):
            raise RuleError(f"must be at most {info.data['steps']}, but is {every}", "lower it")
        return every


class Whole(Settings):
    part: Part
    fruit: Annotated[Apple | Pear, Field(discriminator="name")]


GOOD = {"steps": 3, "betas": [0.9, 0], "inner": {"file": "x"}, "names": {"en": ["y"]}}
APPLE = {"name": "apple", "weight": 1}


def problems(part, fruit=APPLE):
    with pytest.raises(ConfigError) as caught:
        read_settings(Whole, {"part": part, "fruit": fruit})
    return caught.value.problems


def test_values_are_converted_to_the_annotated_types():
    settings = read_settings(Whole, {"part": {**GOOD, "rate": 1, "limit": None}, "fruit": APPLE})
    assert settings.part == Part(steps=3, rate=1.0, betas=[0.9, 0.0], inner=Inner(file="x"), names={"en": ["y"]})
    assert type(settings.part.rate) is type(settings.fruit.weight) is float
    assert isinstance(settings.fruit, Apple)


def test_all_problems_are_reported_together_with_addresses():
    part = {"steps": True, "stps": 3, "betas": ["x"], "inner": {}, "kind": "c", "names": 4, "limit": 2.5, "rate": "1"}
    reported = problems(part, {"name": "pear", "stalk": 1, "inner": {"file": "x", "fle": "y"}})
    assert {problem.address: problem.rule for problem in reported} == {
        "part.stps": "no such setting",
        "part.steps": "must be an int, but is True",
        "part.rate": "must be a float, but is '1'",
        "part.kind": "must be one of a, b, but is 'c'",
        "part.betas": "must be a float, but is 'x'",
        "part.inner.file": "is missing",
        "part.names": "must be a mapping, but is 4",
        "part.limit": "must be an int or null, but is 2.5",
        "fruit.stalk": "must be a bool, but is 1",
        "fruit.inner.fle": "no such setting",
    }
    helps = {problem.address: problem.help for problem in reported}
    assert all(helps.values())
    assert (
        helps["part.stps"].startswith("did you mean steps?")
        and helps["fruit.inner.fle"] == "did you mean file? one of: file"
    )


def test_a_value_of_no_type_of_a_union_is_reported_for_each_type():
    rules = ["must be an int, but is 'x'", "must be a list, but is 'x'"]
    assert [(one.address, one.rule) for one in problems({**GOOD, "width": "x"})] == [
        ("part.width", rule) for rule in rules
    ]


def test_a_rule_between_valid_settings_is_reported_with_other_problems():
    (rate, every) = problems({**GOOD, "rate": "x", "every": 4})
    assert (rate.address, every.address) == ("part.rate", "part.every")
    assert (every.rule, every.help) == ("must be at most 3, but is 4", "lower it")
    (steps,) = problems({**GOOD, "steps": 0, "every": 4})
    assert (steps.address, steps.rule, steps.help) == (
        "part.steps",
        "must be at least 1, but is 0",
        "write part.steps=1 or more",
    )


@pytest.mark.parametrize(
    ("fruit", "rule", "help"),
    [
        ({"name": "peer"}, "must be one of apple, pear, but is 'peer'", "did you mean pear? one of: apple, pear"),
        ({"weight": 1.0}, "is missing", "one of: apple, pear"),
    ],
)
def test_an_unknown_kind_is_an_error_that_lists_the_known_kinds(fruit, rule, help):
    (problem,) = problems(GOOD, fruit)
    assert (problem.address, problem.rule, problem.help) == ("fruit.name", rule, help)


@pytest.mark.parametrize(
    ("change", "address", "rule"),
    [
        ({"rate": float("nan")}, "part.rate", "must be a finite number, but is nan"),
        ({"rate": float("inf")}, "part.rate", "must be a finite number, but is inf"),
        ({"steps": 4.0}, "part.steps", "must be an int, but is 4.0"),
        ({"betas": [1]}, "part.betas", "must be below 1, but is 1"),
        ({"betas": []}, "part.betas", "must hold at least 1, but holds 0: []"),
        ({"betas": [0, 0, 0]}, "part.betas", "must hold at most 2, but holds 3: [0, 0, 0]"),
        ({"betas": (0, 0)}, "part.betas", "must be a list, but is (0, 0)"),
        ({"inner": None}, "part.inner", "must be a mapping, but is None"),
        ({"names": {"en": ["y", "a"]}}, "part.names.en", "may not be 'a'"),
        ({"names": {"a": ["y"]}}, "part.names.a", "may not be 'a'"),
        ({"names": {3: ["y"]}}, "part.names", "must be a str, but is 3"),
        ({"kind": None}, "part.kind", "is missing"),
        ({3: 4}, "part.3", "no such setting"),
        ({"kind": "c" * 100}, "part.kind", f"must be one of a, b, but is '{'c' * 78}…"),
    ],
)
def test_a_wrong_value_is_reported_with_rule_and_value(change, address, rule):
    (problem,) = problems({**GOOD, **change})
    assert (problem.address, problem.rule) == (address, rule)
    assert problem.help


def test_a_common_other_name_of_a_key_is_answered_with_its_name_here():
    (problem,) = problems({**GOOD, "learning_rate": 1e-3})
    assert "schedule.peak" in problem.help and "schedule.scale" in problem.help


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        read_settings(Inner, {"file": "x"}).file = "y"
