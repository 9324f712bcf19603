from __future__ import annotations

from collections.abc import Callable

import pytest

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError
from tfm_blocks.training.settings import InverseSqrtSettings, LinearSettings, NoamSettings, read_run


def test_the_default_config_reads_and_noam_takes_the_models_width(small: Callable[..., Composed]) -> None:
    settings = read_run(small("schedule=noam", "schedule.warmup=4000", "schedule.scale=1.0").mapping)
    assert settings.schedule == NoamSettings(name="noam", d_model=16, warmup=4000, scale=1.0)
    assert settings.optimizer.betas == [0.9, 0.98]


def test_linear_ends_with_the_run_and_cannot_warm_up_for_longer(small: Callable[..., Composed]) -> None:
    asked = ("schedule=linear", "schedule.peak=1e-3", "schedule.warmup=2")
    settings = read_run(small(*asked, "trainer.steps=5").mapping)
    assert settings.schedule == LinearSettings(name="linear", peak=0.001, warmup=2, steps=5)
    with pytest.raises(ConfigError, match="at most the 1 steps of the schedule, but is 2"):
        read_run(small(*asked, "trainer.steps=1").mapping)


def test_numbers_with_an_exponent_are_numbers(small: Callable[..., Composed]) -> None:
    settings = read_run(small("schedule.peak=2e-3").mapping)
    assert settings.schedule == InverseSqrtSettings(name="inverse_sqrt", peak=0.002, warmup=2)
    assert settings.optimizer.eps == 1e-9


@pytest.mark.parametrize(
    ("override", "address"),
    [
        ("optimizer.betas=[0.9,1.0]", "optimizer.betas"),
        ("schedule.warmup=0", "schedule.warmup"),
        ("trainer.steps=0", "trainer.steps"),
        ("trainer.devices=two", "trainer.devices"),
        ("trainer.average=3", "trainer.average"),
        ("trainer.test_beam=0", "trainer.test_beam"),
        ("trainer.test_alpha=-1", "trainer.test_alpha"),
        ("trainer.precision=fp8", "trainer.precision"),
        ("label_smoothing=1.5", "label_smoothing"),
        ("schedule.name=cosine", "schedule.name"),
        ("+schedule.warm=3", "schedule.warm"),
        ("+trainer.stepz=3", "trainer.stepz"),
    ],
)
def test_what_cannot_be_is_refused_at_its_address(small: Callable[..., Composed], override: str, address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(small(override).mapping)
    assert [problem.address for problem in caught.value.problems] == [address]
