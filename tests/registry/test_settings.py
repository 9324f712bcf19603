"""Mappings become typed settings, or a list of all that is wrong."""

from dataclasses import dataclass
from typing import Literal

import pytest

from tfm_blocks.errors import ConfigError
from tfm_blocks.registry.settings import read_settings


@dataclass(frozen=True, kw_only=True)
class Inner:
    file: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    steps: int
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"
    betas: list[float]
    inner: Inner
    names: dict[str, list[str]]
    limit: int | None = None


GOOD = {"steps": 3, "betas": [0.9, 1], "inner": {"file": "x"}, "names": {"en": ["y"]}}


def test_values_become_what_the_annotations_say():
    settings = read_settings(Settings, {**GOOD, "rate": 1, "limit": None}, "trainer")
    assert settings == Settings(steps=3, rate=1.0, betas=[0.9, 1.0], inner=Inner(file="x"), names={"en": ["y"]})
    assert type(settings.rate) is float


def test_all_that_is_wrong_is_told_together_with_addresses():
    with pytest.raises(ConfigError) as caught:
        read_settings(
            Settings, {"steps": True, "stps": 3, "betas": ["x"], "inner": {}, "kind": "c", "names": 4}, "trainer"
        )
    told = {problem.address: problem.rule for problem in caught.value.problems}
    assert told == {
        "trainer.stps": "no such setting",
        "trainer.steps": "must be an int, but is True",
        "trainer.kind": "must be one of a, b, but is 'c'",
        "trainer.betas": "must be a float, but is 'x'",
        "trainer.inner.file": "is missing",
        "trainer.names": "must be a mapping, but is 4",
    }
    assert next(p for p in caught.value.problems if p.address == "trainer.stps").help.startswith("did you mean steps?")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value):
    with pytest.raises(ConfigError, match="finite"):
        read_settings(Settings, {**GOOD, "rate": value}, "trainer")
