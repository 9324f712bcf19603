"""A tuned grid: the jobs that train, their order, and the results that select the best value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.jobs import Small, job_of
from tests.sweep.test_engine import run, states
from tests.sweep.test_job import TINY
from tfm_blocks.cli import main
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.metric_schema import OBJECTIVE
from tfm_blocks.runs.records import SweepFile
from tfm_blocks.sweep.command import make_job_like
from tfm_blocks.sweep.folder import SweepFolder
from tfm_blocks.sweep.job import DIVERGED, DONE, KILLED, NOT_STARTED, PRUNED, STOPPED, SweepJob
from tfm_blocks.sweep.sources import TunedGrid

LOSSES = {("tiny", "1e-3"): 2.0, ("tiny", "1e-2"): 1.0, ("base", "1e-3"): 1.0, ("base", "1e-2"): 2.0}


@dataclass(frozen=True)
class Checker:
    """Checks the overrides of a job as `JobChecker` does, in the fields that `make_job_like` uses."""

    check_job: Callable[[Sequence[str]], SweepJob]
    budget: None = None
    used: tuple[str, ...] = ()


def tuned_grid(composed: Composed, seeds: str = "123") -> TunedGrid:
    overrides = [
        [f"model={model}", f"seed={seed}", f"schedule.peak={rate}"] for seed in seeds for model, rate in LOSSES
    ]
    return TunedGrid([job_of(composed, " ".join(each), each) for each in overrides], "schedule.peak", ["model"])


def train(grid: TunedGrid, losses: Mapping[tuple[str, str], float] | Callable[[str, str], float | None]) -> list[str]:
    """End each job with its loss; a job without a loss diverges. Return the jobs in the order of their starts."""
    started = []
    while job := grid.next():
        model, _, rate = (text.partition("=")[2] for text in job.overrides)
        loss = losses(model, rate) if callable(losses) else losses.get((model, rate))
        job.state, job.progress.best = DIVERGED if loss is None else DONE, loss or 0.0
        grid.ended(job)
        started.append(job.name)
    return started


def test_other_seeds_train_with_the_best_value_of_their_family(small: Small) -> None:
    grid = tuned_grid(small())
    assert train(grid, LOSSES) == [
        *[f"model={model} seed=1 schedule.peak={rate}" for model, rate in LOSSES],
        "model=tiny seed=2 schedule.peak=1e-2", "model=base seed=2 schedule.peak=1e-3",
        "model=tiny seed=3 schedule.peak=1e-2", "model=base seed=3 schedule.peak=1e-3",
    ]  # fmt: skip
    pruned = [job for job in grid.jobs if job.state == PRUNED]
    assert len(pruned) == 4 and pruned[0].reason == f"another schedule.peak has a lower {OBJECTIVE}"
    assert grid.succeeded


def test_no_other_seed_starts_before_all_values_have_ended(small: Small) -> None:
    grid = tuned_grid(small())
    assert sum(grid.next() is not None for _ in range(12)) == 4


def test_a_diverged_value_is_never_the_best(small: Small) -> None:
    grid = tuned_grid(small(), "12")
    started = train(grid, {key: loss for key, loss in LOSSES.items() if key != ("tiny", "1e-2")})
    assert "model=tiny seed=2 schedule.peak=1e-3" in started and not grid.succeeded


def test_other_seeds_do_not_start_if_all_values_failed(small: Small) -> None:
    grid = tuned_grid(small(), "12")
    train(grid, {key: loss for key, loss in LOSSES.items() if key[0] == "base"})
    left = [job for job in grid.jobs if job.state == NOT_STARTED]
    assert [job.overrides[:2] for job in left] == [["model=tiny", "seed=2"]] * 2
    assert {job.reason for job in left} == {"all jobs with seed=1 failed"}


@pytest.mark.parametrize("state", [NOT_STARTED, STOPPED])
def test_other_seeds_do_not_start_if_one_value_has_no_result(state: str, small: Small) -> None:
    grid = tuned_grid(small(), "12")
    started = []
    while job := grid.next():
        started.append(job.name)
        job.state, job.progress.best = (
            (state if len(started) == 1 else DONE),
            LOSSES[job.overrides[0][6:], job.overrides[2][14:]],
        )
        grid.ended(job)
    assert started == [job.name for job in grid.jobs[:4]] + ["model=base seed=2 schedule.peak=1e-3"]
    left = {job.reason for job in grid.jobs[4:] if job.state == NOT_STARTED and job.overrides[0] == "model=tiny"}
    assert left == {f"{started[0]} is not done"} and not grid.waiting and not grid.succeeded


@pytest.mark.parametrize(("best", "diverges_above", "widen", "tiny"), [
    (1e-3, 1.0, 4, ["0.0001"]),  # the lower end
    (2e-4, 1.0, 4, ["0.0001", "1e-05"]),  # best at 1e-4, so 1e-5 is tried too
    (0.9, 1.0, 4, ["0.1", "1", "10"]),
    (0.9, 0.05, 4, ["0.1"]),  # a rate that diverges is beyond the best
    (1e-9, 1.0, 2, ["0.0001", "1e-05"]),  # bounded
    (1e-9, 1.0, 0, []),
])  # fmt: skip
def test_a_grid_grows_until_its_best_rate_is_inside(
    best: float, diverges_above: float, widen: int, tiny: list[str], small: Small
) -> None:
    composed = small()

    def make(other: SweepJob, overrides: Sequence[str]) -> SweepJob:
        return job_of(composed, " ".join(overrides), overrides)

    def loss(model: str, rate: str) -> float | None:
        if float(rate) > diverges_above * 10:
            return None
        middle = best if model == "tiny" else 1.1e-3
        return None if float(rate) > diverges_above else abs(math.log10(float(rate)) - math.log10(middle))

    overrides = [
        [f"model={model}", f"seed={seed}", f"schedule.peak={rate}"] for seed in "123" for model, rate in LOSSES
    ]
    jobs = [job_of(composed, " ".join(each), each) for each in overrides]
    grid = TunedGrid(jobs, "schedule.peak", ["model"], widen, make)
    started = train(grid, loss)
    first = [name.rpartition("=")[2] for name in started if "tiny seed=1" in name]
    assert first == ["1e-3", "1e-2", *tiny]
    rates = {name.rpartition("=")[2] for name in started if "tiny" in name and "seed=1" not in name}
    chosen = min((rate for rate in first if float(rate) <= diverges_above), key=lambda rate: loss("tiny", rate) or 0.0)
    assert rates == {chosen} and sum("tiny" in name for name in started) == len(first) + 2
    assert sum("base seed=1" in name for name in started) == 2 + bool(widen)  # 1e-3 is its best, 1e-4 is not better
    assert grid.succeeded


@pytest.mark.parametrize(("state", "succeeded"), [(DIVERGED, True), (KILLED, False)])
def test_an_added_rate_may_diverge_but_not_be_killed(state: str, succeeded: bool, small: Small) -> None:
    composed = small()
    overrides = [[f"seed={seed}", f"schedule.peak={rate}"] for seed in "12" for rate in ("1e-4", "1e-3")]
    jobs = [job_of(composed, " ".join(each), each) for each in overrides]
    grid = TunedGrid(jobs, "schedule.peak", [], 1, lambda _, each: job_of(composed, " ".join(each), each))
    while job := grid.next():
        rate = float(job.overrides[1].partition("=")[2])
        job.state, job.progress.best = (state, math.nan) if rate > 1e-3 else (DONE, 1 / rate)
        grid.ended(job)
    assert len(grid.jobs) == 5 and grid.succeeded == succeeded


def test_other_seeds_train_with_all_values_paired_with_the_best_one(small: Small) -> None:
    composed, rows = small(), [("1e-3", 100), ("1e-3", 200), ("1e-2", 200)]
    overrides = [
        [f"seed={seed}", f"schedule.peak={row[0]}", f"schedule.warmup={row[1]}"] for seed in "12" for row in rows
    ]
    jobs = [job_of(composed, " ".join(each), each) for each in overrides]
    grid = TunedGrid(jobs, "schedule.peak", [], paired=["schedule.warmup"])
    for loss in (5.0, 1.0, 2.0, 1.0):
        job = grid.next()
        assert job
        job.state, job.progress.best = DONE, loss
        grid.ended(job)
    assert job.overrides == overrides[4] and grid.next() is None


def test_added_rates_of_tasks_with_similar_names_have_separate_names(small: Small, tmp_path: Path) -> None:
    composed: Any = small()
    SweepFile(jobs=()).write(tmp_path)
    folder, names = SweepFolder(tmp_path, (), "", (), {}), {"dir-text_a_peak-0.01"}
    checker: Any = Checker(lambda texts: job_of(composed, "", texts))
    other = job_of(composed)
    overrides = ["data.dir=text/a", "schedule.peak=0.01"]
    job = make_job_like(["data.dir", "schedule.peak"], folder, checker, names, other, overrides)
    assert job.name == "dir-text_a_peak-0.01-2" and job.name in names


def test_an_added_rate_has_the_key_as_it_was_typed(small: Small) -> None:
    composed = small()
    overrides = [[f"seed={seed}", f"++schedule.peak={rate}"] for seed in "12" for rate in ("1e-3", "1e-2")]
    jobs = [job_of(composed, " ".join(each), each) for each in overrides]
    grid = TunedGrid(jobs, "schedule.peak", [], 1, lambda _, each: job_of(composed, " ".join(each), each))
    for loss in (1.0, 2.0, 3.0):
        job = grid.next()
        assert job
        job.state, job.progress.best = DONE, loss
        grid.ended(job)
    assert list(job.overrides) == ["seed=1", "++schedule.peak=0.0001"]


def test_a_grid_of_one_number_has_no_end_to_grow_beyond(small: Small) -> None:
    """Rates that move together with another key may be equal."""
    composed = small()
    overrides = [
        ["seed=1", f"model={model}", f"schedule.peak={rate}"] for model, rate in (("a", "1e-3"), ("b", "0.001"))
    ]
    jobs = [job_of(composed, " ".join(each), each) for each in overrides]
    grid = TunedGrid(jobs, "schedule.peak", [], 4, lambda _, each: job_of(composed, " ".join(each), each))
    assert len(train(grid, lambda model, rate: 1.0)) == 2


@pytest.mark.parametrize(("overrides", "message"), [
    (["seed=1,2", "sweep.tune=schedule.peak"], "but schedule.peak has no list of values"),
    (["schedule.peak=1e-3,1e-2", "sweep.tune=schedule.peak"], "but seed has no list of values"),
    (["seed=1,2", "sweep=random", "sweep.tune=seed"], "needs all values with the first seed, which only a grid trains"),
])  # fmt: skip
def test_a_tuned_grid_needs_values_and_seeds(
    overrides: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["train", "-m", "model=tiny", "schedule=linear", *overrides])
    assert message in capsys.readouterr().err


@pytest.mark.grid
def test_a_tuned_sweep_widens_its_grid_and_resumes_without_a_new_job(tmp_path: Path) -> None:
    (tmp_path / "my_conf").mkdir()
    words = [
        "schedule=linear", "schedule.warmup=1", "trainer.validate_every=2", "logger=csv", "schedule.peak=1e-7,1e-6",
        "seed=1,2,3", "sweep.tune=schedule.peak", "sweep.widen=2", "sweep.name=tuned",
    ]  # fmt: skip
    status, output = run(tmp_path, *words, base=TINY)
    assert status == 0 and "tune: 2 values of schedule.peak added, because the best value was at an edge" in output, (
        output
    )
    folder = tmp_path / "runs" / "tuned"
    trained = {name for name, state in states(folder).items() if state == DONE}
    assert trained == {path.parent.name for path in folder.glob("*/status.json")}
    assert len(trained) == 6 and sum(name.startswith("peak-0.0001_") for name in trained) == 3, trained
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*/status.json")}
    assert run(tmp_path, *words, base=TINY)[0] == 0
    assert times == {path: path.stat().st_mtime_ns for path in folder.glob("*/status.json")}
