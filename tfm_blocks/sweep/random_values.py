"""Values that are drawn from what a sweep leaves open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from tfm_blocks.compose.sweep import Choices, Interval, OpenKey

PATIENCE = 100  # draws for each job that is asked for: where fewer combinations are left, there are fewer jobs


def draw_jobs(parts: Sequence[OpenKey], trials: int, seed: int) -> list[list[str]]:
    """The overrides of so many jobs, no two alike; of more trials the first are the same."""
    random, jobs = Random(seed), {}
    for _ in range(PATIENCE * trials):
        job = [_draw(part, random) for part in parts]
        jobs[tuple(job)] = job
        if len(jobs) == trials:
            break
    return list(jobs.values())


def _draw(part: OpenKey, random: Random) -> str:
    if isinstance(part, Choices):
        return random.choice(part.texts)
    low, high = (math.log(part.low), math.log(part.high)) if part.log else (part.low, part.high)
    if part.whole and not part.log:
        return text_of(part, random.randint(int(part.low), int(part.high)))
    drawn = random.uniform(low, high)
    return text_of(part, math.exp(drawn) if part.log else drawn)


def text_of(part: Interval, number: float) -> str:
    """The override, with six digits, which are enough for any setting and few enough for a name."""
    if part.whole:
        return f"{part.key}={min(max(round(number), int(part.low)), int(part.high))}"
    return f"{part.key}={number:.6g}"
