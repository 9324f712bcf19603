"""What a job is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.sweeps.job import EXPECTED, SweepJob, expect_what_was_checked
from tfm_blocks.training.settings import read_run


def test_a_job_that_waited_trains_what_was_checked_or_nothing(small: Callable[..., Composed]) -> None:
    job = SweepJob("heads-2", ["heads=2"], small(), read_run(small().mapping))
    expect_what_was_checked(small("name=heads-2"), {EXPECTED: job.config})
    expect_what_was_checked(small("dropout=0.2"), {})
    with pytest.raises(ConfigError, match="conf/ has changed since the sweep was begun"):
        expect_what_was_checked(small("dropout=0.2"), {EXPECTED: job.config})
