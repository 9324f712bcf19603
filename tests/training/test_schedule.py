from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.optimization import _get_wsd_scheduler_lambda

import tfm_blocks as tfm
from tests.conftest import COMPOSER, expect_problem
from tests.training.test_module import make, trainer
from tfm_blocks.cli import main
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.run import compose_job
from tfm_blocks.config.settings import read_settings
from tfm_blocks.launch.check import check_run
from tfm_blocks.training.groups import build_optimizer, momentum_of, set_rates
from tfm_blocks.training.optimizer_settings import read_optimizer
from tfm_blocks.training.schedules import (
    ConstantSettings,
    CosineSettings,
    InverseSqrtSettings,
    LinearSettings,
    NoamSettings,
    WsdSettings,
)
from tfm_blocks.training.settings import read_run


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


STEPS = range(1, 101)
WARMUP, DECAY = 7, 20


def rates_of_torch(schedule, first):
    """Return the rates of STEPS of a torch schedule that begins after step `first`, from a peak of 2."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    scheduler = schedule(optimizer)
    rates = {}
    for step in range(first, 101):
        rates[step] = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
    return [rates.get(step, 2.0) for step in STEPS]


def wsd(**changes):
    settings = {"name": "wsd", "peak": 2.0, "steps": 100, "warmup": WARMUP, "decay": DECAY, "floor": 0.1}
    return read_settings(WsdSettings, settings | {"shape": "linear"} | changes)


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_cosine_has_the_rates_of_torch_after_its_warmup(floor: float) -> None:
    schedule = CosineSettings(name="cosine", peak=2.0, steps=100, warmup=WARMUP, floor=floor)
    lr_scheduler = torch.optim.lr_scheduler
    expected = rates_of_torch(
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 101 - WARMUP, eta_min=2 * floor), WARMUP
    )
    assert [schedule.rate(step) for step in STEPS][WARMUP:] == pytest.approx(expected[WARMUP:])
    assert [schedule.rate(step) for step in (1, 7, 101, 500)] == pytest.approx([2 / 7, 2, 2 * floor, 2 * floor])


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_wsd_has_the_rates_of_transformers_after_its_warmup(shape: str) -> None:
    schedule = wsd(shape=shape)
    expected = [
        _get_wsd_scheduler_lambda(
            step,
            num_warmup_steps=WARMUP,
            num_stable_steps=100 - WARMUP - DECAY,
            num_decay_steps=DECAY + 1,  # here the floor is reached after the last step
            warmup_type="linear",
            decay_type=shape,
            min_lr_ratio=0.1,
            num_cycles=0.5,
        )
        for step in STEPS
    ]
    assert [schedule.rate(step) / 2 for step in STEPS][WARMUP:] == pytest.approx(expected[WARMUP:])


def test_an_exponential_decay_has_the_rates_of_torch() -> None:
    gamma = 0.1 ** (1 / (DECAY + 1))
    expected = rates_of_torch(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma), 100 - DECAY)
    assert [wsd(shape="exponential").rate(step) for step in STEPS][WARMUP:] == pytest.approx(expected[WARMUP:])


def test_wsd_without_a_stable_part_equals_linear_and_a_warmup_of_one_step_is_none() -> None:
    linear = LinearSettings(name="linear", peak=2.0, steps=100, warmup=WARMUP)
    whole = wsd(decay=100 - WARMUP, floor=0.0)
    assert [whole.rate(step) for step in range(1, 110)] == [linear.rate(step) for step in range(1, 110)]
    constant = ConstantSettings(name="constant", peak=2.0, steps=100, warmup=1)
    assert {constant.rate(step) for step in range(1, 200)} == {2.0}


def test_lengths_are_steps_fractions_of_the_run_or_tokens(small: Callable[..., Composed]) -> None:
    lengths = ["schedule.warmup=0.1", "schedule.decay=4.8k tokens", "trainer.steps=50", "data.step_tokens=240"]
    schedule = read_run(small("schedule=wsd", *lengths, "trainer.validate_every=50").mapping).schedule
    assert isinstance(schedule, WsdSettings) and (schedule.warmup, schedule.decay) == (5, 20)


@pytest.mark.parametrize("wrong", ["[5000]", "0.5", "abc", "0", "-3", "true", "null"])
def test_a_length_in_tokens_adds_no_error_to_the_error_of_wrong_step_tokens(
    small: Callable[..., Composed], wrong: str
) -> None:
    with expect_problem("data.step_tokens", "must be"):
        read_run(small("schedule=wsd", "schedule.warmup=1k tokens", f"data.step_tokens={wrong}").mapping)


@pytest.mark.parametrize(
    ("overrides", "address", "rule"),
    [
        (["schedule.warmup=0"], "warmup", "must be steps, a fraction of the run, or tokens, but is 0"),
        (["schedule.warmup=true"], "warmup", "must be steps"),
        (["schedule.warmup=1.5"], "warmup", "must be steps"),
        (["schedule.warmup=5M"], "warmup", "must be steps"),
        (["schedule.warmup=many tokens"], "warmup", "must be steps"),
        (["schedule.warmup=101"], "warmup", "at most the 100 steps of the schedule"),
        (["schedule.warmup=10M tokens"], "warmup", "at most the 100 steps of the schedule"),
        (["schedule.decay=100"], "decay", "at most the 90 steps after the warm-up, but is 100"),
        (["schedule.shape=root"], "shape", "must be one of linear, cosine, 1-sqrt, exponential"),
        (["schedule.shape=exponential"], "shape", "never reaches schedule.floor"),
        (["schedule.floor=1.0"], "floor", "below 1"),
        (["data=parity", "schedule.decay=1M tokens"], "decay", "this data has no number of tokens"),
    ],
)
def test_a_wrong_length_or_shape_is_refused_with_its_place_and_a_fix(
    small: Callable[..., Composed], overrides: list[str], address: str, rule: str
) -> None:
    with expect_problem(f"schedule.{address}", rule):
        parity = "data=parity" in overrides
        size = ["trainer.steps=100", "trainer.validate_every=50", "schedule=wsd", "schedule.warmup=10"]
        read_run((composed_parity if parity else small)(*size, *overrides).mapping)


def test_a_warmup_of_all_steps_suggests_a_shorter_warmup(small: Callable[..., Composed]) -> None:
    with expect_problem("schedule.decay", "at most the 0 steps after the warm-up", "write a smaller schedule.warmup"):
        read_run(small("schedule=wsd", "trainer.steps=100", "schedule.warmup=100", "schedule.decay=1").mapping)


def composed_parity(*overrides: str) -> Composed:
    return compose_job(["model=probe_encoder", *overrides, "logger=csv", "name=run"], COMPOSER)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_nth_step_of_the_optimizer_uses_the_rate_of_step_n(small: Callable[..., Composed], steps: int) -> None:
    module, data = make(small("trainer.log_every=1", "schedule.warmup=2", "schedule.peak=0.1"))
    fit = trainer(steps)
    fit.fit(module, datamodule=data)
    rates = {group["lr"] for group in fit.optimizers[0].param_groups}
    assert rates == {module.latest["train/lr"]} == {module.settings.schedule.rate(steps)}


def test_a_group_without_decay_follows_no_schedule_of_the_decay() -> None:
    """A plug-in optimizer may have no setting weight_decay."""
    schedule = ConstantSettings(name="constant", peak=2.0, steps=100, warmup=1, weight_decay=0.5)
    groups = [{"rate": 1.0}, {"rate": 1.0, "weight_decay": 0.1, "peak_decay": 0.1}]
    set_rates(groups, schedule, 1)
    assert [group.get("weight_decay") for group in groups] == [None, 0.1]


FOLLOWED = {"momentum": 0.95, "weight_decay": 0.25}


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd"])
def test_momentum_and_decay_follow_the_rate_as_in_torch(name: str) -> None:
    """OneCycleLR moves the momentum in proportion to the rate."""
    steps, warmup = 50, 10
    schedule = LinearSettings(name="linear", peak=2.0, warmup=warmup, steps=steps, **FOLLOWED)
    model = tfm.build("tiny", layers=1, d_model=8, d_ff=12, heads=2, vocab=30)
    optimizer = build_optimizer(read_optimizer({"name": name, "weight_decay": 0.4}), model)
    own = [momentum_of(group)[0] for group in optimizer.param_groups]
    reference = torch.optim.SGD([torch.zeros(1)], lr=2.0, momentum=0.5)
    cycle = {"anneal_strategy": "linear", "div_factor": 1e30, "final_div_factor": 1.0, "pct_start": 11 / 52}
    momenta = {"base_momentum": own[0], "max_momentum": FOLLOWED["momentum"], "cycle_momentum": True}
    one_cycle = torch.optim.lr_scheduler.OneCycleLR(reference, 2.0, total_steps=steps + 2, **cycle, **momenta)
    for step in range(1, steps + 1):
        reference.step()
        one_cycle.step()
        assert set_rates(optimizer.param_groups, schedule, step) == pytest.approx(reference.param_groups[0]["lr"])
        for peak, group in zip(own, optimizer.param_groups, strict=True):
            if peak == own[0]:
                assert momentum_of(group)[0] == pytest.approx(reference.param_groups[0]["momentum"])
            if group["peak_decay"]:
                assert group["weight_decay"] == pytest.approx(0.4 * (0.25 + 0.75 * group["lr"] / 2))


@pytest.mark.parametrize(
    ("overrides", "address", "rule"),
    [
        (["optimizer=adafactor", "schedule.momentum=0.9"], "momentum", "adafactor, optimizer.name, has no momentum"),
        (["optimizer=adam", "schedule.weight_decay=0"], "weight_decay", "no weight has a decay"),
        (["schedule.momentum=1"], "momentum", "below 1"),
    ],
)
def test_a_schedule_of_what_the_optimizer_lacks_is_refused(
    small: Callable[..., Composed], overrides: list[str], address: str, rule: str
) -> None:
    with expect_problem(f"schedule.{address}", rule):
        check_run(small(*overrides))


def test_the_rates_of_all_groups_are_shown_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = "+optimizer.groups.deep={where: {node: decoder}, rate: 'i+1'}"
    frozen = "+optimizer.groups.off={where: {node: encoder}, train: false}"
    sizes = ["layers=2", "d_model=32", "d_ff=64", "heads=2", "data=parity", "trainer.steps=60"]
    command = ["show", "tiny", *sizes, "schedule=linear", "schedule.peak=0.01", "schedule.warmup=10", "optimizer=adamw"]
    main([*command, group, frozen, "--schedule", "--json", "-o", str(tmp_path / "rates.svg")])
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [*range(1, 61)]
    expected = [0.01 * min(step / 10, (61 - step) / 51) for step in range(1, 61)]
    assert found["rates"] == pytest.approx(expected)
    factors = {group["group"]: (group["optimizer"], group["factors"]) for group in found["groups"]}
    assert factors == {"default": ("adamw", [1, 1]), "off": ("frozen", [0, 0]), "deep": ("adamw", [1, 2])}
    assert "deep: adamw" in (tmp_path / "rates.svg").read_text()
    main([*command, group, "schedule.momentum=0.8", "schedule.weight_decay=0", "--schedule"])
    out = capsys.readouterr().out
    assert re.search(r"deep +│ adamw +│ 1 to 2 +│ 0.001 to 0.002 │ 0.01 to 0.02", out)
    assert "momentum follows the rate: 0.8 at a rate of 0" in out and "weight decay follows the rate: × 0 at" in out


def test_the_largest_rate_of_a_long_run_is_among_those_shown(capsys: pytest.CaptureFixture[str]) -> None:
    long = ["trainer.steps=60000", "schedule=inverse_sqrt", "schedule.peak=1e-3", "schedule.warmup=150"]
    main(["show", "tiny", *long, "--schedule", "--json"])
    assert max(json.loads(capsys.readouterr().out)["rates"]) == 1e-3


@pytest.mark.parametrize("view", ["--schedule", "--weights"])
@pytest.mark.parametrize(
    ("wrong", "rule"),
    [("where: {block: layernorm}", "is called 'layernorm'"), ("where: {role: head}, rte: 2", "rte: no such setting")],
)
def test_a_wrong_group_is_shown_with_its_file_and_line(
    tmp_path: Path, view: str, wrong: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "experiment" / "own.yaml").parent.mkdir()
    file.write_text(f"# @package _global_\noptimizer:\n  groups:\n    norms: {{{wrong}}}\n")
    with pytest.raises(SystemExit):
        main(["show", "tiny", "experiment=own", "--config-dir", str(tmp_path), "data=parity", view])
    error = capsys.readouterr().err
    assert rule in error and "own.yaml:4:" in error and ("layernorm" not in wrong or "role is gain" in error)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--schedule"], "tiny is a model without the settings of a run"),
        (["-o", "rates.svg"], "has no effect without --schedule"),
        (["schedule=cosine", "--schedule", "-o", "rates.txt"], "must be a file .svg, .pdf, .png"),
        (["schedule=cosine", "--schedule", "--src", "3"], "--src: no effect with --schedule"),
    ],
)
def test_rates_without_a_run_and_options_without_effect_are_errors(
    options: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["show", "tiny", "data=parity", *options] if "schedule=cosine" in options else ["show", "tiny", *options])
    assert rule in capsys.readouterr().err
