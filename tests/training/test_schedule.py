from __future__ import annotations

import math

import pytest
import torch

from tfm_blocks.training.schedule import build_schedule, inverse_sqrt, linear, noam
from tfm_blocks.training.settings import InverseSqrtSettings, NoamSettings


@pytest.mark.parametrize(
    ("step", "lr"), [(1, 1.746928107421711e-07), (4000, 6.987712429686843e-04), (16000, 3.4938562148434214e-04)]
)
def test_noam_has_the_values_of_the_paper_for_the_base_model(step: int, lr: float) -> None:
    assert noam(step, d_model=512, warmup=4000) == pytest.approx(lr, rel=1e-12)


def test_inverse_sqrt_rises_to_its_peak_and_halves_at_four_times_the_warmup() -> None:
    assert inverse_sqrt(1, peak=5e-3, warmup=2000) == pytest.approx(2.5e-6)
    assert inverse_sqrt(2000, peak=5e-3, warmup=2000) == 5e-3
    assert inverse_sqrt(8000, peak=5e-3, warmup=2000) == pytest.approx(2.5e-3)


def test_linear_rises_to_its_peak_and_falls_to_its_last_step() -> None:
    rates = [linear(step, peak=6.0, warmup=2, steps=4) for step in range(1, 7)]
    assert rates == pytest.approx([3.0, 6.0, 4.0, 2.0, 0.0, 0.0])


def test_the_first_optimizer_step_uses_the_rate_of_step_one() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(NoamSettings(name="noam", d_model=64, warmup=10, scale=2.0), optimizer)
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    expected = [2.0 / 8 * min(step**-0.5, step / math.sqrt(1000)) for step in range(1, 13)]
    assert rates == pytest.approx(expected)


def test_a_schedule_goes_on_from_its_state() -> None:
    settings = InverseSqrtSettings(name="inverse_sqrt", peak=1.0, warmup=4)
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2)]
    first = build_schedule(settings, optimizers[0])
    for _ in range(7):
        optimizers[0].step()
        first.step()
    second = build_schedule(settings, optimizers[1])
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr() == [inverse_sqrt(8, peak=1.0, warmup=4)]
