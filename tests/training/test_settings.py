from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import reduce
from typing import Any

import pytest
import yaml

from tests.conftest import COMPOSER, expect_problem
from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.run import compose_job
from tfm_blocks.data.noise import uniforms
from tfm_blocks.errors import ConfigError
from tfm_blocks.training.schedules import InverseSqrtSettings, LinearSettings, NoamSettings
from tfm_blocks.training.settings import RunSettings, read_run


def test_the_default_config_reads_and_noam_takes_the_models_width(small: Callable[..., Composed]) -> None:
    settings = read_run(small("schedule=noam", "schedule.warmup=4000", "schedule.scale=1.0").mapping)
    assert settings.schedule == NoamSettings(name="noam", d_model=16, warmup=4000, scale=1.0)
    assert settings.optimizer.betas == [0.9, 0.98]


def test_linear_ends_with_the_run_and_cannot_warm_up_for_longer(small: Callable[..., Composed]) -> None:
    overrides = ("schedule=linear", "schedule.peak=1e-3", "schedule.warmup=2")
    settings = read_run(small(*overrides, "trainer.steps=5").mapping)
    assert settings.schedule == LinearSettings(name="linear", peak=0.001, warmup=2, steps=5)
    with pytest.raises(ConfigError, match="at most the 1 steps of the schedule, but is 2"):
        read_run(small(*overrides, "trainer.steps=1").mapping)


def test_numbers_with_an_exponent_are_numbers(small: Callable[..., Composed]) -> None:
    settings = read_run(small("schedule.peak=2e-3").mapping)
    assert settings.schedule == InverseSqrtSettings(name="inverse_sqrt", peak=0.002, warmup=2)
    assert settings.optimizer.eps == 1e-9


def test_a_seed_fits_in_64_bits_with_a_sign(small: Callable[..., Composed]) -> None:
    assert uniforms(read_run(small(f"seed={2**63 - 1}").mapping).seed, 0).shape == (1,)
    with expect_problem("seed", "must be below 9.22337e+18, but is 9223372036854775808"):
        read_run(small(f"seed={2**63}").mapping)


@pytest.mark.parametrize("override", ["init_from=", "logger.wandb.entity=", "logger.wandb.project="])
def test_an_empty_name_is_refused(override: str, small: Callable[..., Composed]) -> None:
    with pytest.raises(ConfigError, match=f"{override[:-1]}: is empty"):
        read_run(small("logger=wandb", override).mapping)


def test_problems_of_all_groups_are_reported_together(small: Callable[..., Composed]) -> None:
    groups = ["data=text", "data.dir=x", "data.max_length=0", "optimizer.eps=-1", "+optimizer.lr=1", "schedule=linear"]
    rest = ["schedule.warmup=9", "trainer.steps=6", "trainer.average=3", "trainer.clip=0", "+logger.tensorbord={}"]
    with pytest.raises(ConfigError) as caught:
        read_run(small(*groups, *rest, "seed=-1", "plugins=mine", "label_smoothing=1").mapping)
    assert {problem.address for problem in caught.value.problems} == {
        "seed", "label_smoothing", "plugins", "data.max_length", "data.train", "data.val", "data.test",
        "optimizer.eps", "optimizer.lr", "schedule.warmup", "trainer.average", "trainer.clip", "logger.tensorbord",
    }  # fmt: skip
    assert all(problem.help for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["callbacks.early_stopping.monitor=val/length_ratio"], "a validation metric that can improve, but is 'val/length_ratio'"),
        (["callbacks.early_stopping.monitor=train/loss"], "one of: val/accuracy, val/accuracy/{corpus}, val/bits_per_byte, val/bits_per_byte/{corpus}, "),
        (["callbacks.early_stopping.patience=0"], "callbacks.early_stopping.patience: must be at least 1"),
        (["callbacks.early_stopping.min_delta=-1"], "callbacks.early_stopping.min_delta: must be at least 0"),
        (["+callbacks.early_stoping={}"], "callbacks.early_stoping: no such setting"),
        (["callbacks.early_stopping.monitor=val/bleu", "callbacks.early_stopping.patience=1", "trainer.validate_sentences=0"], "but trainer.validate_sentences is 0"),
        (["callbacks.early_stopping.monitor=val/bits_per_byte", "callbacks.early_stopping.patience=1"], "a run of this data and objective does not measure"),
        (["callbacks.early_stopping.monitor=val/loss/a", "callbacks.early_stopping.patience=1"], "the corpora of data.mix with validation text are: none"),
    ],
)  # fmt: skip
def test_early_stopping_monitors_metrics_of_the_run(
    small: Callable[..., Composed], overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(small(*overrides).mapping)
    assert message in str(caught.value) and "help: " in str(caught.value)


LABELLED = ["model=classifier", "objective=label", "data=labels", "data.dir=x"]
NAMED = [*LABELLED, "data.labels=[neg,pos]"]


@pytest.mark.parametrize(
    ("overrides", "measured", "missing"),
    [
        (NAMED, ["perplexity", "accuracy", "f1", "mcc"], ["token_accuracy", "spearman", "exact", "bleu"]),
        ([*NAMED, "data.predict=words"], ["perplexity", "mcc"], ["token_accuracy", "spearman"]),
        ([*NAMED, "data.predict=several"], ["accuracy", "f1"], ["perplexity", "token_accuracy", "mcc", "spearman"]),
        ([*LABELLED, "data.predict=number"], ["loss", "spearman"], ["perplexity", "accuracy", "f1", "mcc"]),
        (["objective=replaced_token", "objective.generator={model: electra}", "data=lm", "data.dir=x"],
         ["loss", "token_accuracy"], ["perplexity", "accuracy"]),
        (["data=parity"], ["perplexity", "accuracy"], ["token_accuracy", "f1"]),
    ],
)  # fmt: skip
def test_early_stopping_monitors_the_scores_of_the_objective(
    overrides: list[str], measured: list[str], missing: list[str]
) -> None:
    config = compose_job(
        [*overrides, "callbacks.early_stopping.patience=1", "logger=csv", "name=run"], COMPOSER
    ).mapping
    for name in (*measured, *missing):
        config["callbacks"]["early_stopping"]["monitor"] = f"val/{name}"
        with nullcontext() if name in measured else pytest.raises(ConfigError, match="does not measure"):
            read_run(config)


def test_early_stopping_does_not_wait_for_translations_of_plain_text(small: Callable[..., Composed]) -> None:
    config = small("callbacks.early_stopping.monitor=val/bleu", "callbacks.early_stopping.patience=1").mapping
    lm = yaml.safe_load((CONF / "data" / "lm.yaml").read_text()) | {"dir": "x"}
    with pytest.raises(
        ConfigError, match="val/bleu, which is a score of translations, but plain text is not translated"
    ):
        read_run({**config, "data": lm})


def test_early_stopping_monitors_a_corpus_with_validation_text(small: Callable[..., Composed]) -> None:
    monitor = "callbacks.early_stopping.monitor=val/loss/"
    lm = yaml.safe_load((CONF / "data" / "lm.yaml").read_text()) | {"dir": "x", "mix": {"a": {}, "b": {"val": None}}}
    config = small(f"{monitor}a", "callbacks.early_stopping.patience=1").mapping | {"data": lm}
    assert read_run(config).callbacks.early_stopping.monitor == "val/loss/a"
    with pytest.raises(
        ConfigError, match=r"monitors val/loss/b, but the corpora of data\.mix with validation text are: a"
    ):
        read_run(small(f"{monitor}b", "callbacks.early_stopping.patience=1").mapping | {"data": lm})


VALUES = [None, True, -1, 0, 10**30, 2.5, math.nan, "", "x" * 1000, [], ["{}"], {}, {"lr": 1}, {3: 4}, {None: [0]}]


def paths(mapping: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in mapping.items():
        yield (key,)
        yield from ((key, *rest) for rest in (paths(value) if isinstance(value, dict) else ()))


@pytest.mark.parametrize("data", [pytest.param("dates", marks=pytest.mark.grid), "text"])
def test_whatever_a_value_is_it_is_read_or_refused_with_a_way_out(small: Callable[..., Composed], data: str) -> None:
    mapping = {key: value for key, value in small().mapping.items() if key in RunSettings.model_fields}
    if data == "text":
        mapping["data"] = yaml.safe_load((CONF / "data" / "text.yaml").read_text()) | {"dir": "x"}
    for path in [*paths(mapping), *((*group, "new") for group in paths(mapping))]:
        if data == "text" and path[0] != "data":  # the other keys are those of the first row
            continue
        for value in VALUES:
            changed = deepcopy(mapping)
            around = reduce(lambda part, key: part[key] if isinstance(part, dict) else {}, path[:-1], changed)
            if not isinstance(around, dict):
                continue
            around[path[-1]] = value
            try:
                read_run(changed)
            except ConfigError as error:
                for problem in error.problems:
                    assert problem.address.startswith(path[0]) and problem.help, (path, value, problem)
                    assert len(str(problem)) < 600


@pytest.mark.parametrize(
    ("override", "address"),
    [
        ("optimizer.betas=[0.9,1.0]", "optimizer.betas"),
        ("schedule.warmup=0", "schedule.warmup"),
        ("trainer.steps=0", "trainer.steps"),
        ("trainer.devices=two", "trainer.devices"),
        ("trainer.average=3", "trainer.average"),
        ("trainer.test_beam=0", "trainer.test_beam"),
        ("trainer.test_alpha=-1", "trainer.test_alpha"),
        ("trainer.test_beam=5000", "trainer.test_beam"),
        ("trainer.test_patient=true", "trainer.test_patient"),
        ("trainer.precision=fp8", "trainer.precision"),
        ("data.tokenizer={source: one}", "data.tokenizer"),
        ("label_smoothing=1.5", "label_smoothing"),
        ("schedule.name=sine", "schedule.name"),
        ("+schedule.warm=3", "schedule.warm"),
        ("+trainer.stepz=3", "trainer.stepz"),
    ],
)
def test_an_invalid_value_is_refused_with_its_address(
    small: Callable[..., Composed], override: str, address: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(small(override).mapping)
    assert [problem.address for problem in caught.value.problems] == [address]


@pytest.mark.parametrize(
    ("override", "address"), [("trainer.ema=0.9", "trainer.ema"), ("trainer.compile=true", "trainer.compile")]
)
def test_options_that_need_full_weights_are_refused_with_sharded_weights(
    small: Callable[..., Composed], override: str, address: str
) -> None:
    with pytest.raises(ConfigError, match=r"needs unsharded weights(?s:.*)trainer\.strategy=ddp") as caught:
        read_run(small(override, "trainer.strategy=fsdp2").mapping)
    assert [problem.address for problem in caught.value.problems] == [address]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_logger_whose_library_is_missing_is_refused_with_the_command_that_installs_it(
    small: Callable[..., Composed], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = small(f"logger=[csv,{name}]").mapping
    assert read_run(config).logger.csv is not None
    monkeypatch.setitem(sys.modules, name, None)  # as Python marks what cannot be imported
    with pytest.raises(
        ConfigError, match=rf"logger\.{name}: needs a library(?s:.*)pip install -c constraints.txt -e '\.\[{name}\]'"
    ):
        read_run(config)


@pytest.mark.parametrize(
    ("overrides", "expected", "chosen"),
    [
        (
            ["trainer.steps=100", "schedule=linear", "schedule.warmup=1000"],
            ["write schedule.warmup=10, or trainer.steps=4000 or more"],
            [["schedule.warmup=10"], ["trainer.steps=4000"]],
        ),
        (
            ["trainer.steps=100", "trainer.average=5", "trainer.keep_last=5", "trainer.validate_every=350"],
            ["write trainer.average=1, or in a new run trainer.validate_every=20"],
            [["trainer.average=1"], ["trainer.validate_every=20"]],
        ),
        (
            ["trainer.steps=100", "trainer.average=5", "trainer.keep_last=2", "trainer.validate_every=50"],
            ["write trainer.average=2, or in a new run trainer.validate_every=20 and trainer.keep_last=5"],
            [["trainer.average=2"], ["trainer.validate_every=20", "trainer.keep_last=5"]],
        ),
        (["trainer.steps=3", "trainer.average=5"], ["write trainer.average=1"], [["trainer.average=1"]]),
    ],
)
def test_too_few_steps_are_refused_with_values_that_work(
    small: Callable[..., Composed], overrides: list[str], expected: list[str], chosen: list[list[str]]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(small(*overrides).mapping)
    assert [problem.help for problem in caught.value.problems] == expected
    for change in chosen:
        read_run(small(*overrides, *change).mapping)
