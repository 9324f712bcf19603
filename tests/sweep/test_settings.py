from __future__ import annotations

import pytest

from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.sweep import read_sweep
from tfm_blocks.errors import ConfigError
from tfm_blocks.sweep.settings import read_sweep_settings


def parallel(*overrides: str, on_cluster: bool) -> int:
    """Return the value that the command line and conf/ give."""
    return read_sweep_settings(read_sweep(parse_request(["-m", *overrides])).settings, on_cluster=on_cluster).parallel


@pytest.mark.grid
def test_a_cluster_queues_a_hundred_jobs_and_this_machine_runs_one() -> None:
    for method in ("grid", "random"):
        assert parallel(f"sweep={method}", "seed=1,2", on_cluster=True) == 100
        assert parallel(f"sweep={method}", "seed=1,2", on_cluster=False) == 1


def test_a_search_on_a_cluster_queues_few_trials() -> None:
    assert parallel("sweep=optuna", "seed=1,2", on_cluster=True) == 10


@pytest.mark.parametrize("on_cluster", [False, True])
def test_sweep_parallel_takes_precedence(on_cluster: bool) -> None:
    assert parallel("seed=1,2", "sweep.parallel=3", on_cluster=on_cluster) == 3
    with pytest.raises(ConfigError, match=r"sweep\.parallel: must be at least 1"):
        parallel("seed=1,2", "sweep.parallel=0", on_cluster=on_cluster)


def test_the_seed_of_optuna_has_32_bits() -> None:
    with pytest.raises(ConfigError, match=r"sweep\.seed: must be below 4\.29497e\+09, but is 4294967296"):
        parallel("seed=1,2", "sweep=optuna", f"sweep.seed={2**32}", on_cluster=False)
