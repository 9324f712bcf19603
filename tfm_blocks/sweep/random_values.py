"""Random values for the keys that a sweep varies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from tfm_blocks.compose.sweep import Choices, Interval, OpenKey, Part, Together

PATIENCE = 100  # draws per requested job; if too few combinations exist, there are fewer jobs


def draw_jobs(parts: Sequence[Part], trials: int, seed: int) -> list[list[str]]:
    """Draw the overrides of at most `trials` distinct jobs. A larger `trials` begins with the same jobs."""
    random, jobs = Random(seed), {}
    for _ in range(PATIENCE * trials):
        job = [text for part in parts for text in _draw(part, random)]
        jobs[tuple(job)] = job
        if len(jobs) == trials:
            break
    return list(jobs.values())


def _draw(part: Part, random: Random) -> Sequence[str]:
    if isinstance(part, Together):
        return random.choice(part.rows)
    return [_draw_value(part, random)]


def _draw_value(part: OpenKey, random: Random) -> str:
    if isinstance(part, Choices):
        return random.choice(part.texts)
    low, high = (math.log(part.low), math.log(part.high)) if part.log else (part.low, part.high)
    if part.whole and not part.log:
        return text_of(part, random.randint(int(part.low), int(part.high)))
    drawn = random.uniform(low, high)
    return text_of(part, math.exp(drawn) if part.log else drawn)


def text_of(part: Interval, number: float) -> str:
    """Return the override with six significant digits: precise enough for any setting, short enough for a name."""
    if part.whole:
        return f"{part.key}={min(max(round(number), int(part.low)), int(part.high))}"
    return f"{part.key}={number:.6g}"
