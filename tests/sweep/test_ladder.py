"""A ladder: its sizes, the rates that it tunes and transfers, and the cooldowns that branch off its runs."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.sweep.jobs import Small, job_of
from tests.sweep.test_engine import run, states
from tfm_blocks.cli import main
from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.sweep import read_sweep
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.check import check_run
from tfm_blocks.network.build import check_model, network_without_values
from tfm_blocks.network.weights import count_without_embeddings
from tfm_blocks.runs.records import SweepFile
from tfm_blocks.sweep.folder import SweepFolder
from tfm_blocks.sweep.job import DIVERGED, DONE, ERROR, NOT_STARTED, STOPPED
from tfm_blocks.sweep.ladder import RungPlan, read_ladder_settings
from tfm_blocks.sweep.ladder_jobs import LadderJobs, vertex
from tfm_blocks.sweep.ladder_plan import LadderPlan, _variants, plan_ladder
from tfm_blocks.sweep.settings import read_sweep_settings
from tfm_blocks.training.coordinates import Training

WORDS = ["the cat sat on the mat", "a dog ran to the park", "we see one bird", "two men walk home"]
ARGUMENTS = [
    "-m", "experiment=ladder", "model=decoder_only,llama", "vocab=300", "data.documents=lines", "data.context=32",
    "ladder.from=10k", "ladder.sizes=3", "ladder.step=8", "ladder.grow={heads:1/8,layers:1/16,d_ff:4}", "logger=csv",
]  # fmt: skip
LADDER = {
    "sizes": 3, "from": "10k", "factor": 2, "width": "d_model", "step": 8, "grow": {"d_ff": 4}, "tokens": 20,
    "lengths": [0.5, 1, 2], "cooldown": 0.2, "batch": {"value": 100, "at": "10k", "exponent": 0.5}, "warmup": 1,
    "rate": {"value": 0.01, "at": "10k", "exponent": -0.5, "tuned": 2, "step": 2, "widen": 2}, "seeds": 2, "budget": None,
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a text of some lines in a folder, and go there."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name, count in (("train", 400), ("val", 40)):
        (folder / f"{name}.txt").write_text("\n".join(f"{WORDS[i % 4]} {i}" for i in range(count)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFM_BLOCKS_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.mark.grid
def test_all_models_of_a_size_have_its_parameters_without_embeddings(text: Path) -> None:
    request = read_sweep(parse_request([*ARGUMENTS, f"data.dir={text}"]))
    plan = plan_ladder(request, read_sweep_settings(request.settings), check_run)
    assert plan is not None
    assert [rung.size for rung in plan.rungs] == [10_000, 20_000, 40_000]
    for rung, planned in enumerate(plan.rungs):
        assert planned.knobs["heads"] == planned.knobs["d_model"] / 8
        jobs = [plan.checked(variant, rung) for variant in (0, 1)]
        for job in jobs:
            composed = job.composed.with_vocab(job.match["vocab"])
            network = network_without_values(check_model(composed.model, composed.sources))
            assert count_without_embeddings(network) == pytest.approx(planned.size, rel=0.011)
            assert job.settings.trainer.steps * planned.step_tokens == pytest.approx(2 * 20 * planned.size, rel=0.02)
            assert planned.step_tokens % 32 == 0
        assert jobs[0].composed.mapping["d_model"] == jobs[1].composed.mapping["d_model"]
        assert jobs[0].composed.mapping["d_ff"] > jobs[1].composed.mapping["d_ff"]  # llama has gates and no tie


@pytest.mark.grid
def test_lengths_that_grow_with_the_square_of_the_factor_give_three_sizes_equal_compute(text: Path) -> None:
    request = read_sweep(parse_request([*ARGUMENTS, "ladder.lengths=[0.25,1,4]", f"data.dir={text}"]))
    plan = plan_ladder(request, read_sweep_settings(request.settings), check_run)
    assert plan is not None
    for variant in (0, 1):
        sizes = [
            count_without_embeddings(network_without_values(plan.spec(plan.checked(variant, rung))))
            for rung in (0, 1, 2)
        ]
        steps = [rung.steps[2 - place] for place, rung in enumerate(plan.rungs)]
        tokens = [count * rung.step_tokens for count, rung in zip(steps, plan.rungs, strict=True)]
        computes = [6 * size * count for size, count in zip(sizes, tokens, strict=True)]
        assert max(computes) < 1.02 * min(computes)


@pytest.mark.grid
def test_a_ladder_is_printed_and_trains_nothing_until_it_is_confirmed(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", *ARGUMENTS, f"data.dir={text}", "ladder.budget=0.01s"])
    assert "ladder.budget: allows 0 sizes, but a scaling law needs at least 3" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["train", *ARGUMENTS, f"data.dir={text}"])
    output = capsys.readouterr()
    assert "48 runs: 2 seeds of 3 lengths, and 12 or more to tune the rates of 2 of the sizes" in output.out
    assert "operations, about" in output.out and " on this machine, 1 at a time" in output.out
    assert "note: models of fewer than 4,000,000 parameters show large differences" in output.out
    assert "--yes: nothing was trained yet" in output.err
    assert not (text.parent / "runs").exists()


@pytest.mark.grid
def test_a_checked_ladder_has_its_sizes_and_each_model_has_another_name(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("a/b", "a-b"):
        shutil.copytree(text, text.parent / folder)
    kept = [text for text in ARGUMENTS[1:] if not text.startswith("model=")]
    request = read_sweep(parse_request(["-m", *ARGUMENTS[1:], "data.dir=a/b", "ladder.budget=3h"]))
    plan = plan_ladder(request, read_sweep_settings(request.settings), check_run)
    assert plan is not None and len(plan.rungs) == 3
    assert list(plan.labels) == ["decoder_only", "llama"]
    alike = read_sweep(parse_request(["-m", *kept, "model=decoder_only", "data.dir=a/b,a-b"]))
    assert _variants(alike, read_sweep_settings(alike.settings), plan.settings)[1] == ["a-b", "a-b-2"]
    assert "note: ladder.budget chooses the number of sizes" in capsys.readouterr().out
    single = [*kept, "data.dir=a/b", "ladder.seeds=1", "ladder.lengths=[1]", "ladder.rate.tuned=0"]
    request = read_sweep(parse_request(["-m", *single]))  # experiment=ladder chooses the model
    plan = plan_ladder(request, read_sweep_settings(request.settings), check_run)
    assert plan is not None and list(plan.labels) == ["decoder_only"]
    assert "\n3 runs: 1 seed of 1 length\n" in capsys.readouterr().out


@pytest.mark.parametrize(("overrides", "address", "rule"), [
    (["ladder.lengths=[1,0.5]"], "ladder.lengths", "must grow"),
    (["ladder.grow={heads:-1}"], "ladder.grow.heads", "must be a number or a fraction above 0"),
    (["ladder.grow={layer:1/16}"], "ladder.grow.layer", "no such key: layer=1"),
    (["ladder.from=many"], "ladder.from", "must be a number"),
    (["ladder.grow={d_model:1,heads:1/8}"], "ladder.grow", "has d_model, the width, which grows itself"),
    (["d_model=64"], "d_model", "is set by the ladder at each size"),
    (["schedule.peak=1e-3"], "schedule.peak", "is set by the ladder at each size"),
    pytest.param(["ladder.warmup=9"], "ladder.lengths", "cooldowns of 10k parameters would begin", marks=pytest.mark.grid),
    (["sweep=random"], "sweep", "a ladder tunes its rates itself"),
    (["dropout=0,0.1"], "dropout", "distinguishes no models in a scaling law: its values are numbers"),
    (
        ["model=probe_decoder", "mixer={block: attention, r: 8},{block: attention, r: 9}"], "mixer",
        "its values are numbers",
    ),
    (["data.documents=lines,blank_lines"], "data.documents", "or it belongs to schedule, trainer, data"),
    (["seed=1,1"], "seed", "lists one value twice"),
    (["seed=interval(1,3)"], "seed", "is an interval from 1 to 3"),
    pytest.param(["seed=1,x"], "sweep", "1 of 19 jobs cannot start, so none was started", marks=pytest.mark.grid),
])  # fmt: skip
def test_settings_that_make_no_ladder_are_refused(text: Path, overrides: list[str], address: str, rule: str) -> None:
    with pytest.raises(ConfigError) as raised:
        kept = [text for text in ARGUMENTS if text.partition("=")[0] != overrides[0].partition("=")[0]]
        request = read_sweep(parse_request([*kept, f"data.dir={text}", *overrides]))
        plan_ladder(request, read_sweep_settings(request.settings), check_run)
    problem = raised.value.problems[0]
    assert problem.address.startswith(address) and rule in problem.rule


def ladder_of(small: Small, folder: Path, *overrides: str, lengths: int = 3) -> LadderJobs:
    """Return the jobs of a ladder of one model and three sizes, which are not trained."""
    composed = small("schedule=wsd", "schedule.warmup=1", *overrides)
    settings = read_ladder_settings(LADDER | {"lengths": [0.5, 1, 2][:lengths]})
    assert settings is not None
    steps, decays = [10, 20, 40][:lengths], [2, 4, 8][:lengths]
    rungs = [RungPlan(10_000 * 2**rung, {"d_ff": 8}, 32, 1, steps, decays) for rung in range(3)]
    checker: Any = SimpleNamespace(check_job=lambda texts: job_of(composed, "", texts))
    plan = LadderPlan(settings, [[]], ["m"], ["1", "2"], checker, rungs)
    SweepFile(jobs=()).write(folder)
    return LadderJobs(SweepFolder(folder, (), "", (), {}), plan)


def train(jobs: LadderJobs, best: float, states: dict[str, str] | None = None) -> list[str]:
    """End each job; its loss is a parabola of the logarithm of its rate with the lowest point at `best`."""
    started = []
    while job := jobs.next():
        rate = next(float(text.partition("=")[2]) for text in job.overrides if text.startswith("schedule.peak"))
        job.progress.best = 3 + math.log(rate / best) ** 2
        job.state = (states or {}).get(job.name, DONE)
        started.append(job.name)
    return started


def test_rates_are_the_lowest_points_of_parabolas_and_follow_the_law_above(small: Small, tmp_path: Path) -> None:
    jobs = ladder_of(small, tmp_path)
    train(jobs, 0.013)
    assert jobs.succeeded
    assert jobs.rates[0] == pytest.approx([0.013, 0.013, 0.013 * 2**0.25 / 2], rel=0.01)
    assert "m: rates 0.013 at 10k, 0.013 at 20k" in jobs.news()


def test_the_grid_grows_until_the_best_rate_is_inside(small: Small, tmp_path: Path) -> None:
    jobs = ladder_of(small, tmp_path)
    started = train(jobs, 0.033)
    assert [name for name in started if name.startswith("m_10k_rate")] == [
        f"m_10k_rate-{rate}" for rate in ("0.005", "0.01", "0.02", "0.04", "0.08")
    ]
    assert jobs.rates[0][0] == pytest.approx(0.033, rel=0.01)


def test_a_best_rate_that_stays_an_end_of_the_grid_is_not_used(small: Small, tmp_path: Path) -> None:
    jobs = ladder_of(small, tmp_path)
    started = train(jobs, 10.0)
    assert not jobs.succeeded and not jobs.rates
    assert all("_rate-" in name for name in started)
    assert "not tuned, because its best rate at 10k is an end of 5 rates" in jobs.news()


def test_a_diverged_rate_is_an_upper_end(small: Small, tmp_path: Path) -> None:
    jobs = ladder_of(small, tmp_path)
    train(jobs, 0.012, {"m_10k_rate-0.02": DIVERGED})
    assert jobs.rates[0][0] == pytest.approx(0.01)
    assert jobs.succeeded


def test_the_next_command_fits_a_law_only_if_there_are_enough_lengths(small: Small, tmp_path: Path) -> None:
    for lengths, options in ((1, ""), (2, " --scaling")):
        (folder := tmp_path / str(lengths)).mkdir()
        jobs = ladder_of(small, folder, lengths=lengths)
        train(jobs, 0.013)
        assert jobs.news().endswith(f"\nnext: tfm compare {folder}{options}")


def test_a_result_that_diverged_is_no_success(small: Small, tmp_path: Path) -> None:
    jobs = ladder_of(small, tmp_path)
    train(jobs, 0.013, {"m_20k_x1_seed-2": DIVERGED})
    assert jobs.rates and not jobs.succeeded and "next: tfm compare" not in jobs.news()


@pytest.mark.parametrize("state", [ERROR, STOPPED])
def test_a_failed_or_stopped_rate_stops_the_tuning(state: str, small: Small, tmp_path: Path) -> None:
    jobs = ladder_of(small, tmp_path)
    train(jobs, 0.012, {"m_10k_rate-0.02": state})
    assert not jobs.succeeded and "not tuned, because m_10k_rate-0.02 is not done" in jobs.news()


@pytest.mark.parametrize("state", [ERROR, STOPPED])
def test_cooldowns_start_after_their_run_and_not_if_it_failed(state: str, small: Small, tmp_path: Path) -> None:
    jobs = ladder_of(small, tmp_path)
    started = train(jobs, 0.013, {"m_20k_x2_seed-1": state})
    results = [name for name in started if "_x" in name]
    assert results[:6] == [f"m_10k_x{length}_seed-{seed}" for seed in (1, 2) for length in (2, 0.5, 1)]
    left = {job.name: job.reason for job in jobs.jobs if job.state == NOT_STARTED}
    assert left == {f"m_20k_x{length}_seed-1": "m_20k_x2_seed-1 is not done" for length in (0.5, 1)}
    longest, half = (next(job for job in jobs.jobs if job.name == f"m_10k_x{length}_seed-1") for length in (2, 0.5))
    assert "trainer.checkpoint_at=[8,16]" in longest.overrides and "schedule.decay=8" in longest.overrides
    assert half.parent is longest
    assert {"trainer.steps=10", "schedule.decay=2", "trainer.checkpoint_at=[]"} <= set(half.overrides)


def test_a_rate_that_is_tried_at_the_longest_length_has_the_settings_of_the_result(
    small: Small, tmp_path: Path
) -> None:
    """--scaling refuses runs of one size and length that differ in more than their seed."""
    jobs = ladder_of(small, tmp_path, lengths=2)
    train(jobs, 0.012, {"m_10k_rate-0.02": DIVERGED})
    tried, result = (
        next(job for job in jobs.jobs if job.name == f"m_10k_{name}") for name in ("rate-0.01", "x1_seed-1")
    )
    assert tried.overrides == result.overrides and "trainer.checkpoint_at=[8]" in tried.overrides


def test_a_ladder_takes_at_least_the_time_of_its_longest_runs(small: Small, tmp_path: Path) -> None:
    plan = ladder_of(small, tmp_path).plan
    plan.seconds.update({(0, rung): 1.0 for rung in range(3)})
    runs = 2 * 3 * 20 + 3 * 2 * (40 + 2 + 4)  # tried rates of two sizes; then two seeds of three sizes
    assert plan.hours(1) * 3600 == pytest.approx(runs)
    assert plan.hours(2) * 3600 == pytest.approx(runs / 2)
    assert plan.hours(100) * 3600 == pytest.approx(20 + 40 + 4)


@pytest.mark.parametrize(("settings", "on_cluster", "reason"), [
    (["trainer.accelerator=cpu"], True, "jobs train on other machines"),
    (["trainer.accelerator=cuda"], False, "jobs train on cuda, and steps are measured on the CPU"),
    (
        ["trainer.accelerator=cpu", "objective=distil", "objective.teacher=runs/one"], False,
        "objective=distil runs a second model",
    ),
    (["trainer.accelerator=cpu"], False, "rows of data=dates have no fixed length"),
])  # fmt: skip
def test_a_time_that_steps_on_this_cpu_do_not_show_is_not_estimated(
    settings: list[str], on_cluster: bool, reason: str, small: Small, tmp_path: Path, capsys: Any
) -> None:
    plan = replace(ladder_of(small, tmp_path, *settings).plan, on_cluster=on_cluster)
    plan.measure(0, 32, 1)
    assert not plan.seconds and f"note: the time is not estimated, because {reason}" in capsys.readouterr().out
    limited = replace(plan, settings=plan.settings.model_copy(update={"budget": 3600.0}))
    for refuse in (lambda: limited.measure(0, 32, 1), limited.expect_measurable):
        with pytest.raises(ConfigError, match=f"ladder.budget: cannot choose the sizes, because {reason}"):
            refuse()


@pytest.mark.grid
def test_data_whose_steps_have_a_number_of_rows_are_refused() -> None:
    request = read_sweep(parse_request(["-m", "experiment=ladder", "model=probe_decoder", "data=parity"]))
    with pytest.raises(
        ConfigError, match=r"(?s)data: is parity, whose steps have a number of rows.*--scaling --metric"
    ):
        plan_ladder(request, read_sweep_settings(request.settings), check_run)


def test_a_step_that_fails_leaves_the_threads_as_they_were(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(*arguments: object) -> float:
        raise MemoryError

    plan = ladder_of(small, tmp_path, "trainer.accelerator=cpu").plan
    monkeypatch.setattr(Training, "seconds", seconds)
    monkeypatch.setattr(LadderPlan, "spec", lambda plan, job: None)
    monkeypatch.setattr(LadderPlan, "why_unmeasured", lambda plan: "")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(MemoryError):
            plan.measure(0, 32, 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_vertex_of_a_parabola() -> None:
    assert vertex([(place - 0.3) ** 2 for place in (-1, 0, 1)]) == pytest.approx(0.3)
    assert vertex([1.0, 0.5, math.inf]) == 0


@pytest.mark.grid
def test_a_ladder_is_trained_and_resumed(text: Path) -> None:
    (text.parent / "my_conf").mkdir()
    words = [
        *ARGUMENTS[1:], f"data.dir={text}", "ladder.tokens=3", "ladder.seeds=1", "ladder.rate.tuned=1",
        "ladder.batch.value=100000", "sweep.parallel=2", "--yes",
    ]  # fmt: skip
    status, output = run(text.parent, *words, base=[])
    assert status == 0, output
    folder = text.parent / "runs" / "ladder"
    assert set(states(folder).values()) == {DONE}
    branch, longest = (
        json.loads((folder / f"llama_20k_x{name}_seed-1" / "run.json").read_text()) for name in ("1", "2")
    )
    assert branch["parent"].startswith("runs/ladder/llama_20k_x2_seed-1@") and not longest.get("parent")
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*/status.json")}
    assert run(text.parent, *words[:-1], base=[])[0] == 0  # it was confirmed
    assert times == {path: path.stat().st_mtime_ns for path in folder.glob("*/status.json")}
