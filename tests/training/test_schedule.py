from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.training.test_module import make, trainer
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.training.settings import InverseSqrtSettings, LinearSettings, NoamSettings


@pytest.mark.parametrize(
    ("step", "lr"), [(1, 1.746928107421711e-07), (4000, 6.987712429686843e-04), (16000, 3.4938562148434214e-04)]
)
def test_noam_has_the_values_of_the_paper_for_the_base_model(step: int, lr: float) -> None:
    base = NoamSettings(name="noam", d_model=512, warmup=4000, scale=1.0)
    assert base.rate(step) == pytest.approx(lr, rel=1e-12)


def test_inverse_sqrt_rises_to_its_peak_and_halves_at_four_times_the_warmup() -> None:
    schedule = InverseSqrtSettings(name="inverse_sqrt", peak=5e-3, warmup=2000)
    assert schedule.rate(1) == pytest.approx(2.5e-6)
    assert schedule.rate(2000) == 5e-3
    assert schedule.rate(8000) == pytest.approx(2.5e-3)


def test_linear_rises_to_its_peak_and_falls_to_its_last_step() -> None:
    schedule = LinearSettings(name="linear", peak=6.0, warmup=2, steps=4)
    assert [schedule.rate(step) for step in range(1, 7)] == pytest.approx([3.0, 6.0, 4.0, 2.0, 0.0, 0.0])


@pytest.mark.parametrize("steps", [1, 3])
def test_the_nth_step_of_the_optimizer_uses_the_rate_of_step_n(small: Callable[..., Composed], steps: int) -> None:
    module, data = make(small("trainer.log_every=1", "schedule.warmup=2", "schedule.peak=0.1"))
    fit = trainer(steps)
    fit.fit(module, datamodule=data)
    rates = [group["lr"] for group in fit.optimizers[0].param_groups]
    assert rates == [module.latest["train/lr"]] * 2 == [module.settings.schedule.rate(steps)] * 2
