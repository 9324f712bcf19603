"""The learning rate as a function of the optimizer step, which counts from 1."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tfm_blocks.training.settings import LinearSettings, NoamSettings, ScheduleSettings


def noam(step: int, *, d_model: int, warmup: int, scale: float = 1.0) -> float:
    """scale · d_model^-0.5 · min(step^-0.5, step · warmup^-1.5): Vaswani et al. 2017, equation 3."""
    return scale / math.sqrt(d_model) * min(1 / math.sqrt(step), step / math.sqrt(warmup) ** 3)


def inverse_sqrt(step: int, *, peak: float, warmup: int) -> float:
    """Linear from 0 to `peak` in `warmup` steps, then peak · (warmup / step)^0.5."""
    return peak * min(step / warmup, math.sqrt(warmup / step))


def linear(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Linear from 0 to `peak` in `warmup` steps, then linear to 0, which it would be after the last of `steps`."""
    return peak * min(step / warmup, max(0, steps + 1 - step) / (steps + 1 - warmup))


def build_schedule(settings: ScheduleSettings, optimizer: Optimizer) -> LambdaLR:
    """Sets the learning rate of the first step; each `.step()` that of the next. The optimizer's own lr must be 1."""
    if isinstance(settings, NoamSettings):
        sizes = {"d_model": settings.d_model, "warmup": settings.warmup}
        return LambdaLR(optimizer, lambda done: noam(done + 1, **sizes, scale=settings.scale))
    peak, warmup = settings.peak, settings.warmup
    if isinstance(settings, LinearSettings):
        return LambdaLR(optimizer, lambda done: linear(done + 1, peak=peak, warmup=warmup, steps=settings.steps))
    return LambdaLR(optimizer, lambda done: inverse_sqrt(done + 1, peak=peak, warmup=warmup))
