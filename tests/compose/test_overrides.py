"""Overrides as typed on the command line."""

import pytest

from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.overrides import override_text, parse_overrides
from tfm_blocks.errors import ConfigError


@pytest.mark.parametrize(
    "value",
    [
        {"block": "rmsnorm", "eps": 1e-05, "bias": None, "at": {-1: {"gain": True}}},
        [1, "a: b", {"names": ["x, 'y'"]}],
        {},
        False,
        "text",
    ],
)
def test_an_override_of_a_value_is_read_as_the_value(value):
    (override,) = parse_overrides([override_text("norm", value)])
    assert override.value() == value


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        ("model.args.d_ff=2*(d_model+1)", "++model.args.d_ff='2*(d_model+1)'"),
        ("data.dir=/my texts (new)", "data.dir='/my texts (new)'"),
        ("data.dir=/Übung", "data.dir='/Übung'"),
    ],
)
def test_a_value_beyond_hydras_grammar_is_text(text, readable):
    assert parse_request(["data=text", text]).texts == ["data=text", readable]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("d_ff=int(interval(64,8))", "must have a lower bound below its upper bound"),
        ("dropout=interval(0.1,0.1)", "must have a lower bound below its upper bound"),
        ("dropout=interval(0,inf)", "must have a lower bound below its upper bound"),
        ("heads=int(interval(1.2,1.9))", "must have a lower bound below its upper bound"),
        ("dropout=tag(log,interval(0,0.3))", "has a log scale, which needs numbers above 0"),
        ("dropout=tag(log,interval(-1,0.3))", "has a log scale, which needs numbers above 0"),
        ("dropout=tag(normal,interval(0,1))", "has an unknown tag: the only one is log, on an interval"),
        ("vocab=tag(log,range(1,1000))", "has an unknown tag: the only one is log, on an interval"),
        ("heads=tag(log,choice(1,2))", "has an unknown tag: the only one is log, on an interval"),
        ("heads=range(8,1)", "is an empty range"),
        ("heads=range(1,8,0)", "is an empty range"),
    ],
)
def test_nan_and_infinity_are_refused_with_the_override_and_a_fix(text, rule):
    with pytest.raises(ConfigError) as caught:
        parse_request(["-m", "model=tiny", text])
    (problem,) = caught.value.problems
    assert (problem.address, problem.rule) == (text.partition("=")[0], f"{rule}: {text}")
    assert problem.help.startswith("write ")


@pytest.mark.parametrize(
    "text", ["range(1,7)", "range(7,1,-2)", "sort(range(1,7),reverse=true)", "shuffle(range(1,7))"]
)
def test_ranges_of_either_direction_have_numbers(text):
    parse_request(["-m", "model=tiny", f"heads={text}"])
