"""A stopped or killed run resumes as if it had not been interrupted."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import LEARNING, OBJECTIVES, composed_small, taught
from tests.preloaded import run_python
from tests.runs.test_lock import leave_heartbeat
from tests.stopping import train_part
from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data import prepare
from tfm_blocks.distributed.signals import exit_on_signals, temporary_handlers
from tfm_blocks.errors import ConfigError, RunError, TfmError
from tfm_blocks.launch import job
from tfm_blocks.launch.check import CheckedRun, check_request, check_run
from tfm_blocks.launch.job import train, train_or_resume
from tfm_blocks.launch.run_spec import expect_resumable, read_saved_run, write_config
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs import lock
from tfm_blocks.runs.checkpoints import list_checkpoints, newest_intact
from tfm_blocks.runs.folder import step_files
from tfm_blocks.runs.lock import LIMIT, LOCK, hold
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.runs.records import Status
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.training.checkpoints import PreemptedError
from tfm_blocks.training.non_finite import IN_A_ROW, SKIPPED
from tfm_blocks.training.settings import read_run

ROOT = Path(__file__).parents[2]
STEPS = 8
TRAINED = ["dropout=0.3", f"trainer.steps={STEPS}", "trainer.validate_every=3", "trainer.validate_sentences=2"]
TWO_VOCABULARIES = {"two_vocabularies": ["model=two_vocabularies", "source_vocab=280"]}
Small = Callable[..., Composed]


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the command's signal handlers, and load the plug-in that sends signals."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    load_plugins(["faulty"])
    with temporary_handlers():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run, which tests copy."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch, temporary_handlers():  # without the signal of an earlier test
        return train(check_run(composed_small(folder, patch)(*TRAINED)), folder)


@pytest.fixture
def finished(trained: Path, small: Small, tmp_path: Path) -> Path:
    """Return a finished run of the test."""
    return shutil.copytree(trained, tmp_path / "run")


def stopping(every: int) -> list[str]:
    """Return overrides that send each part of a run a signal in its step `every` and do not change the weights."""
    block = f"{{block: faulty, harm: stop, sound: {every - 1}, after: src_pos}}"
    return ["plugins=[faulty]", f"++model.graph.stops={block}", *TRAINED]


def begin(composed: Composed, root: Path, callbacks: Sequence[Callback] = ()) -> Path:
    exit_on_signals()
    return train(check_run(composed), root, callbacks=callbacks)


def go_on(run: Path, *overrides: str, callbacks: Sequence[Callback] = ()) -> Path:
    """Run `python train.py resume=RUN …` in this process."""
    exit_on_signals()
    with initialize_config_dir(str(CONF.resolve()), version_base=None):
        config: Any = compose("train", [f"resume={run}", *overrides], return_hydra_config=True)
    return train_or_resume(*check_request(config), callbacks=callbacks)


def to_the_end(run: Path, *overrides: str) -> list[int]:
    """Resume until the run is done; return the steps after which it was stopped."""
    stops = []
    while state(run) != "done":
        stops.append(list_checkpoints(run / "checkpoints")[0].step)
        try:
            go_on(run, "plugins=[faulty]", *overrides)
        except PreemptedError:
            continue
    return stops


def state(run: Path) -> str:
    return str(json.loads((run / "status.json").read_text())["state"])


def last_weights(run: Path) -> dict[str, Tensor]:
    """Return the weights after the last step, not the best ones."""
    return load_file(step_files(run / "checkpoints")[-1])


TIMES = ("train/tokens_per_second", "train/waiting", "train/seconds")


def rows(run: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.csv without values that a clock measures."""
    return [{name: row[name] for name in row if name not in TIMES} for row in read_rows(run / "metrics.csv")]


def expect_same(run: Path, other: Path) -> None:
    """Check that all files of two runs are bit-identical."""
    for read in (last_weights, lambda run: load_file(run / "weights.safetensors")):
        one, two = read(run), read(other)
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert rows(run) == rows(other) != []
    scores = [json.loads((one / "status.json").read_text())["scores"] for one in (run, other)]
    assert scores[0]["test/loss"] == scores[1]["test/loss"]


@pytest.mark.parametrize(
    "parts",
    [(3,), pytest.param((1, 5), marks=pytest.mark.grid), pytest.param(range(1, STEPS + 1), marks=pytest.mark.slow)],
)
def test_a_run_stopped_at_any_step_ends_bit_equal(small: Small, tmp_path: Path, parts: Sequence[int]) -> None:
    """A run with parts of one step is stopped after every step, including the last. It keeps a moving average."""
    average = "trainer.ema=0.9"
    begin(small(*stopping(1000), average), tmp_path)
    for number, every in enumerate(parts, 2):
        run = tmp_path / f"run-{number}"
        with pytest.raises(PreemptedError, match="stopped by SIGTERM") as caught:
            begin(small(*stopping(every), average), tmp_path)
        assert caught.value.exit_status == 75
        assert str(caught.value).endswith(f"resume: python train.py resume={run} 'plugins=[faulty]'")
        assert state(run) == "preempted"
        assert to_the_end(run) == list(range(every, STEPS + 1, every))
        expect_same(tmp_path / "run", run)


@pytest.mark.grid
def test_a_resumed_run_keeps_the_lines_of_skipped_steps(small: Small, tmp_path: Path) -> None:
    """The run stops before it logs, so only the checkpoint of step 3 reads that step 2 was skipped."""
    poison = "++model.graph.bad={block: faulty, harm: poison, sound: 0, steps: 2-, after: src_pos}"
    train_part(3, check_run(small("plugins=[faulty]", poison, *TRAINED, "trainer.log_every=8")), tmp_path)
    skipped = tmp_path / "run" / SKIPPED
    lines = skipped.read_text()
    assert {json.loads(line)["step"] for line in lines.splitlines()} == {2}
    go_on(tmp_path / "run", "plugins=[faulty]")
    assert skipped.read_text().startswith(lines)


@pytest.mark.grid
def test_a_resumed_run_repeats_an_interrupted_validation(small: Small, tmp_path: Path) -> None:
    """This includes the last validation, which no step follows."""
    left = sys.modules["faulty"].left
    leave = [
        "plugins=[faulty]",
        "++model.graph.leaves={block: faulty, harm: leave, sound: 0, after: src_pos}",
        *TRAINED,
    ]
    left.append(True)
    begin(small(*leave), tmp_path)
    left.clear()
    with pytest.raises(PreemptedError):
        begin(small(*leave), tmp_path)
    run = tmp_path / "run-2"
    assert not any("val/loss" in row for row in rows(run))
    assert to_the_end(run) == [3]
    expect_same(tmp_path / "run", run)
    left.append(True)
    begin(small(*leave, "trainer.steps=3"), tmp_path)
    left.clear()
    with pytest.raises(PreemptedError):
        begin(small(*leave, "trainer.steps=3"), tmp_path)
    assert to_the_end(tmp_path / "run-4") == [3]
    expect_same(tmp_path / "run-3", tmp_path / "run-4")


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "workers"), [(1, 0), (1, 2), (2, 0), (2, 1)])
def test_a_run_stopped_after_each_of_thirty_steps_ends_bit_equal(
    small: Small, tmp_path: Path, devices: int, workers: int
) -> None:
    long = ["trainer.steps=31", f"trainer.devices={devices}"]
    begin(small(*stopping(1000), *long), tmp_path)
    with pytest.raises(PreemptedError):
        begin(small(*stopping(1), *long, f"trainer.workers={workers}"), tmp_path)
    assert to_the_end(tmp_path / "run-2") == list(range(1, 32))
    expect_same(tmp_path / "run", tmp_path / "run-2")


@pytest.mark.grid
def test_a_model_with_numbers_as_keys_resumes(small: Small, tmp_path: Path) -> None:
    """YAML keeps the layer number of `at` as a number, and model.json has it as text."""
    model = "++model.graph.encoder.at={0: {ffn: {d_ff: 64}}}"
    begin(small(*stopping(1000), model), tmp_path)
    with pytest.raises(PreemptedError):
        begin(small(*stopping(5), model), tmp_path)
    assert to_the_end(tmp_path / "run-2") == [5]
    expect_same(tmp_path / "run", tmp_path / "run-2")


@pytest.mark.grid
def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(small: Small, tmp_path: Path) -> None:
    """This includes workers that prefetch batches."""
    begin(small("trainer.devices=2", *stopping(1000)), tmp_path)
    with pytest.raises(PreemptedError, match="stopped by SIGTERM"):
        begin(small("trainer.devices=2", "trainer.workers=2", *stopping(5)), tmp_path)
    assert to_the_end(tmp_path / "run-2") in ([5], [6])  # ranks agree about every half second
    expect_same(tmp_path / "run", tmp_path / "run-2")


@pytest.mark.grid
def test_other_devices_and_another_cap_on_a_batch_continue_the_same_plan(small: Small, tmp_path: Path) -> None:
    begin(small(*stopping(1000), "dropout=0"), tmp_path)
    with pytest.raises(PreemptedError):
        begin(small(*stopping(5), "dropout=0"), tmp_path)
    to_the_end(tmp_path / "run-2", "trainer.devices=2", "data.batch_tokens=150")
    one, other = (last_weights(tmp_path / name) for name in ("run", "run-2"))
    for name in one:
        if (
            "kv.bias" not in name
        ):  # softmax cancels keys' biases: their gradient is rounding noise, which Adam amplifies
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6)


SHARED = ["trainer.devices=2", "trainer.strategy=fsdp2"]


@pytest.mark.grid
def test_fsdp2_resumes_exactly(small: Small, tmp_path: Path) -> None:
    begin(small(*stopping(1000), *SHARED), tmp_path)
    with pytest.raises(PreemptedError):
        begin(small(*stopping(5), *SHARED), tmp_path)
    assert to_the_end(tmp_path / "run-2") in ([5], [6])
    expect_same(tmp_path / "run", tmp_path / "run-2")


@pytest.mark.grid
def test_fsdp2_resumes_with_other_processes_and_another_strategy(small: Small, tmp_path: Path) -> None:
    begin(small(*stopping(1000), "dropout=0"), tmp_path)
    with pytest.raises(PreemptedError):
        begin(small(*stopping(5), *SHARED, "dropout=0"), tmp_path)
    shutil.copytree(tmp_path / "run-2", tmp_path / "run-3")
    to_the_end(tmp_path / "run-2", "trainer.devices=1")
    to_the_end(tmp_path / "run-3", "trainer.strategy=ddp")
    one, *others = (last_weights(tmp_path / name) for name in ("run", "run-2", "run-3"))
    for other in others:
        for name in one:
            if "kv.bias" not in name:
                torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6)


@pytest.mark.grid
def test_a_requeued_slurm_job_resumes_the_run_of_its_command(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is one process and was preempted; another job starts its own run."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(PreemptedError):
        begin(small(*stopping(5)), tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert begin(small(*stopping(5)), tmp_path) == tmp_path / "run"
    assert [path.name for path in tmp_path.glob("run*")] == ["run"] and state(tmp_path / "run") == "done"
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())["commands"]) == 2
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    with pytest.raises(PreemptedError):
        begin(small(*stopping(5)), tmp_path)
    assert (tmp_path / "run-2").exists()


@pytest.mark.grid
def test_a_restarted_run_trains_the_config_of_its_folder(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of conf/ may have changed since the run began, but not its command line."""
    runs = list[CheckedRun]()
    monkeypatch.setattr(job, "_train", lambda rendezvous, spec, run, *rest: runs.append(run))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    train(check_run(small("schedule.peak=1e-3")), tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train(check_run(small("schedule.peak=9e-3", "dropout=0.4")), tmp_path) == tmp_path / "run"
    first, again = runs
    assert again.settings.model_dump() == first.settings.model_dump() and again.spec.mapping == first.spec.mapping


@pytest.mark.grid
def test_a_run_that_is_done_can_train_for_longer(finished: Path, small: Small, tmp_path: Path) -> None:
    begin(small(*TRAINED, "trainer.steps=5"), tmp_path)
    go_on(tmp_path / "run-2", f"trainer.steps={STEPS}")
    one, other = (last_weights(tmp_path / name) for name in ("run", "run-2"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert json.loads((tmp_path / "run-2" / "status.json").read_text())["steps"] == STEPS
    commands = json.loads((tmp_path / "run-2" / "run.json").read_text())["commands"]
    assert len(commands) == 2


@pytest.mark.grid
def test_a_run_whose_schedule_ends_before_it_is_warned_about_and_resumes_without_more_steps(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = ["schedule=linear", "schedule.warmup=1", "schedule.steps=3"]
    train_part(5, check_run(small(*TRAINED, *ended)), tmp_path)
    expected = f"warning: trainer.steps={STEPS} is more than schedule.steps=3, after which the learning rate is 0"
    assert expected in capsys.readouterr().err
    with pytest.raises(ConfigError, match="the learning rate of this run is 0 after step 3"):
        go_on(tmp_path / "run", "trainer.steps=9")
    go_on(tmp_path / "run")
    assert state(tmp_path / "run") == "done"
    with pytest.raises(ConfigError, match=r"the run already has .*\n  help: start a new run .*init_from="):
        go_on(tmp_path / "run")


VALIDATED = [
    "trainer.steps=12", "trainer.validate_every=3", "trainer.checkpoint_every=3", "trainer.log_every=1",
    "trainer.validate_sentences=0", "data.test=2",
]  # fmt: skip


class Losses(Callback):
    """Replace the validation losses that decide which weights are the best: 9, except after some steps."""

    def __init__(self, losses: Mapping[int, float]) -> None:
        self.losses = losses

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.latest["val/loss"] = self.losses.get(trainer.global_step, 9.0)


class SignalsLast(Callback):
    """Send a stop signal after the last agreement of the ranks, as during the last checkpoint."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.grid
def test_a_signal_between_the_last_step_and_the_test_stops_the_run(small: Small, tmp_path: Path) -> None:
    """The resume only repeats the test, and keeps the scores from before."""
    with pytest.raises(PreemptedError):
        begin(small(*TRAINED, "trainer.validate_every=4"), tmp_path, [SignalsLast()])
    assert state(tmp_path / "run") == "preempted"
    scores = json.loads((go_on(tmp_path / "run") / "status.json").read_text())["scores"]
    assert scores.keys() >= {"train/loss", "val/loss", "test/loss"}


class FailsAfter(Callback):
    """Fail between two steps without a new checkpoint, as if the process were killed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            raise ValueError("killed")


@pytest.mark.grid
def test_a_prolonged_run_forgets_the_validation_after_its_last_step(small: Small, tmp_path: Path) -> None:
    """That validation has the lowest loss, and an uninterrupted run does not have it."""
    losses = Losses({3: 2.0, 5: 1.0})
    whole = begin(small(*VALIDATED), tmp_path, [losses])
    part = begin(small(*VALIDATED, "trainer.steps=5"), tmp_path, [losses])
    go_on(part, "trainer.steps=12", callbacks=[losses])
    expect_same(whole, part)


@pytest.mark.grid
def test_a_prolonged_run_averages_the_validations_of_an_uninterrupted_run(small: Small, tmp_path: Path) -> None:
    averaged = [*VALIDATED, "trainer.average=3", "trainer.keep_last=3"]
    whole = begin(small(*averaged), tmp_path)
    part = begin(small(*averaged, "trainer.steps=7", "trainer.average=2"), tmp_path)
    go_on(part, "trainer.steps=12", "trainer.average=3")
    expect_same(whole, part)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("last", "average"), [(0, 2), *(pytest.param(*case, marks=pytest.mark.grid) for case in ((0, 0), (6, 0), (6, 2)))]
)
def test_a_killed_run_that_resumes_with_fewer_steps_forgets_later_validations(
    small: Small, tmp_path: Path, last: int, average: int
) -> None:
    """Validations after the `last` checkpoint replaced the best weights, and those that are averaged."""
    losses = Losses({3: 4.0, 6: 3.0, 9: 2.0, 12: 1.0})
    common = [
        *VALIDATED,
        f"trainer.checkpoint_every={last or 1000}",
        "trainer.keep_last=2",
        f"trainer.average={average}",
    ]
    whole = begin(small(*common, "trainer.steps=7"), tmp_path, [losses])
    with pytest.raises(ValueError, match="killed"):
        begin(small(*common, "trainer.steps=2000"), tmp_path, [losses, FailsAfter(11 if last else 13)])
    part = tmp_path / "run-2"
    assert list_checkpoints(part / "checkpoints")[0].step == last
    go_on(part, "trainer.steps=7", callbacks=[losses])
    expect_same(whole, part)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("average", "missing"), [(0, "best.safetensors"), (2, "step-00000003.safetensors, step-00000006.safetensors")]
)
def test_weights_of_validations_that_a_resume_needs_and_lacks_are_an_error_before_training(
    small: Small, tmp_path: Path, average: int, missing: str
) -> None:
    run = begin(small(*VALIDATED, "trainer.steps=6", "trainer.keep_last=2", f"trainer.average={average}"), tmp_path)
    for name in missing.split(", "):
        (run / "checkpoints" / name).unlink()
    status = (run / "status.json").read_text()
    with pytest.raises(RunError) as caught:
        go_on(run, "trainer.steps=8")
    (problem,) = caught.value.problems
    assert problem.address == str(run / "checkpoints" / missing.split(", ")[-1]) and "is missing" in problem.rule
    assert problem.help.endswith(f"init_from={run}") and (run / "status.json").read_text() == status
    if average:
        go_on(run, "trainer.steps=10")  # the mean is over 9 and 10
        assert state(run) == "done"


@pytest.mark.parametrize("deleted", ["", "*.ckpt latest.json"])
def test_a_finished_run_without_checkpoints_keeps_its_results(finished: Path, deleted: str) -> None:
    run = finished
    for pattern in deleted.split():
        for path in (run / "checkpoints").glob(pattern):
            path.unlink()
    if not deleted:
        shutil.rmtree(run / "checkpoints")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="has no checkpoint, but results") as caught:
        go_on(run, "trainer.steps=9")
    assert caught.value.problems[0].help.endswith(f"init_from={run}")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.grid
def test_a_run_killed_before_its_first_checkpoint_restarts(small: Small, tmp_path: Path) -> None:
    early = [*VALIDATED, "trainer.checkpoint_every=null", "trainer.steps=5"]
    whole = begin(small(*early), tmp_path)
    with pytest.raises(ValueError, match="killed"):
        begin(small(*early), tmp_path, [FailsAfter(4)])
    part = tmp_path / "run-2"
    assert rows(part) and not list_checkpoints(part / "checkpoints")
    without = shutil.copytree(part, tmp_path / "run-3")
    shutil.rmtree(without / "checkpoints")
    for run in (part, without):
        go_on(run)
        expect_same(whole, run)


@pytest.mark.grid
def test_a_text_that_changed_in_place_is_refused(small: Small, tmp_path: Path) -> None:
    """The numbers of lines and tokens are the same."""
    for name in ("train", "val", "test"):
        (tmp_path / f"{name}.src").write_text("a 1\nbb 2\n" * 4)
        (tmp_path / f"{name}.tgt").write_text("1 a\n2 bb\n" * 4)
    files = [f"data.{name}={{src: {name}.src, tgt: {name}.tgt}}" for name in ("train", "val", "test")]
    data = ["data=text", f"data.dir={tmp_path}", "vocab=260"]
    run = begin(small(*VALIDATED, *data, *files, "trainer.steps=3"), tmp_path)
    for split in ("test", "val", "train"):  # the first change is reported
        (tmp_path / f"{split}.tgt").write_text("3 a\n4 bb\n" * 4)
        with pytest.raises(RunError, match=f"the text of {split} changed since the run began"):
            go_on(run, "trainer.steps=6")
    record = json.loads((run / "run.json").read_text())
    record["text"] = {name: record["text"][name] for name in ("vocabulary", "training text")}
    (run / "run.json").write_text(json.dumps(record))
    go_on(run, "trainer.steps=6")
    assert state(run) == "done"


REFUSED = [
    (["heads=4"], "heads", "keeps its original value: heads=4"),
    (["model=base"], "model", "keeps its original value: model=base"),
    (["trainer.log_every=${trainer.steps}"], "trainer.log_every", "a resumed run takes no ${…}: trainer.log_every"),
    (["data.train=50"], "data.train", "keeps its original value: data.train=50"),
    (["seed=2", "optimizer=adamw"], "optimizer", "seed=2"),
    (["trainer.steps=4"], "trainer.steps", "is 4, but the run already has 8 steps"),
    (["seed=1"], "trainer.steps", "is 8, but the run already has 8 steps"),
]


@pytest.mark.grid
def test_resuming_another_experiment_or_a_finished_run_is_refused(finished: Path) -> None:
    for overrides, address, message in REFUSED:
        with pytest.raises(ConfigError) as caught:
            go_on(finished, *overrides)
        assert any(problem.address == address for problem in caught.value.problems)
        assert message in str(caught.value) and "help: " in str(caught.value)
        assert state(finished) == "done"


def test_a_diverged_run_resumes_only_with_a_higher_patience(small: Small, tmp_path: Path) -> None:
    config = small().mapping
    write_config(tmp_path, config)
    skipped = SavedRun(tmp_path, status=Status("diverged", f"the loss or the gradient of 10 {IN_A_ROW}"))
    scored = SavedRun(tmp_path, status=Status("diverged", "val loss nan"))
    with pytest.raises(ConfigError, match=r"repeats the steps\n  help: .*trainer.patience_nan"):
        expect_resumable(skipped, read_run(config), 3)
    config["trainer"]["patience_nan"] += 1
    expect_resumable(skipped, read_run(config), 3)
    with pytest.raises(ConfigError, match=r"repeats the steps\n  help: start a new run with a lower learning rate$"):
        expect_resumable(scored, read_run(config), 3)


@pytest.mark.grid
def test_a_resume_names_the_plug_ins_of_the_run_and_may_name_others(small: Small, tmp_path: Path) -> None:
    begin(
        small("plugins=[math,faulty]", "++model.graph.fine={block: faulty, harm: end, sound: 1000, after: src_pos}"),
        tmp_path,
    )
    with pytest.raises(ConfigError, match=r"plugins: the run uses the plug-ins \['faulty'\]"):
        go_on(tmp_path / "run", "trainer.steps=8")
    go_on(tmp_path / "run", "trainer.steps=8", "plugins=[faulty,math]")
    assert json.loads((tmp_path / "run" / "model.json").read_text())["plugins"] == ["faulty"]


@pytest.mark.grid
def test_a_run_of_another_host_is_resumed_only_when_its_heartbeat_is_old(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished
    leave_heartbeat(run, age=5)
    with pytest.raises(RunError, match=r"is being trained by another process: 4711 on node7, since 2026-11-23"):
        go_on(run, "trainer.steps=20")
    leave_heartbeat(run, age=LIMIT + 1)
    monkeypatch.setattr(lock, "BEAT", 0.01)

    class Touched(Callback):
        def on_train_start(self, *_: object) -> None:
            assert json.loads((run / LOCK).read_text())["pid"] == os.getpid()
            os.utime(run / LOCK, (0, 0))
            while not (run / LOCK).stat().st_mtime:
                time.sleep(0.01)

    go_on(run, "trainer.steps=10", callbacks=[Touched()])
    assert state(run) == "done" and not [*run.rglob(LOCK)]


@pytest.mark.grid
def test_a_resumed_run_reads_its_own_tokenizer_and_learns_none(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version could learn other subwords from the same text."""
    find = prepare._tokenizer

    def expect_own(cache: Path, splits: Any, settings: Any, *rest: Any) -> Any:
        assert settings.tokenizer == str(finished), "a tokenizer was learned"
        return find(cache, splits, settings, *rest)

    monkeypatch.setattr(prepare, "_tokenizer", expect_own)
    go_on(finished, "trainer.steps=10")
    assert state(finished) == "done"


def test_a_folder_that_cannot_be_resumed_gives_the_reason(finished: Path) -> None:
    with pytest.raises(RunError, match="there is no such run folder"):
        read_saved_run(finished / "none")
    run = finished
    with hold(run), pytest.raises(RunError, match="is being trained by another process"):
        go_on(run, "trainer.steps=20")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"text": record["text"] | {"training text": "other"}}))
    with pytest.raises(RunError, match="the training text changed since the run began"):
        go_on(run, "trainer.steps=20")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("heads: 2", "heads: 4"))
    with pytest.raises(RunError, match=r"has a different model from model\.json"):
        read_saved_run(run)
    (run / "config.yaml").write_text(config + "x: ${oc.env:HOME}\n")
    with pytest.raises(RunError, match="without"):
        read_saved_run(run)


@pytest.mark.grid
def test_a_checkpoint_is_written_after_the_configured_time(small: Small, tmp_path: Path) -> None:
    clock = ["trainer.checkpoint_every=null", "trainer.checkpoint_keep=20"]
    for minutes, steps in ((1e-6, [6, 5, 4, 3, 2, 1, 0]), (60, [6])):
        begin(small(*clock, f"trainer.checkpoint_minutes={minutes}"), tmp_path / str(minutes))
        assert [one.step for one in list_checkpoints(tmp_path / str(minutes) / "run" / "checkpoints")] == steps


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Return a folder on a disk of 1 MB and the error of a full disk; without root, files are limited to 100 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield disk, "File too large"
        return
    yield disk, "No space left on device"
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.grid
def test_a_full_disk_ends_the_run_with_a_sentence_and_its_files_load(
    tmp_path: Path, little_disk: tuple[Path, str]
) -> None:
    disk, reason = little_disk
    code = "import resource, sys; " + "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); " * (
        reason[0] == "F"
    )
    code += f"sys.argv[0] = {str(ROOT / 'train.py')!r}; from tfm_blocks.cli.train import train; "
    code += "sys.exit(train(sys.argv[1:], program='python train.py', command=[]))"
    done = run_python(
        ["-c", code, *SMALL, "trainer.steps=60", "schedule.warmup=20"], **outside(tmp_path) | {"cwd": disk}
    )
    assert done.returncode == 1, done.stderr
    first, *rest = done.stderr.strip().splitlines()
    assert first == "resume: python train.py resume=runs/run"
    assert rest[0].startswith("error: ") and f"cannot be written: {reason}" in rest[0] and len(rest) == 2
    assert state(disk / "runs" / "run") in ("failed", "running")  # if not even the new status fits on the disk
    if reason[0] == "N":
        assert newest_intact(disk / "runs" / "run" / "checkpoints") is not None


SMALL = [
    "name=run", "layers=1", "d_model=32", "d_ff=32", "heads=2", "vocab=300", "dropout=0.3", "data.train=500", "data.val=10", "data.test=10",
    "data.step_tokens=300", "trainer.validate_every=25", "trainer.validate_sentences=0", "trainer.checkpoint_every=1",
    "trainer.log_every=1", "logger=csv", "trainer.accelerator=cpu",
]  # fmt: skip


def outside(folder: Path) -> dict[str, Any]:
    """Return the working directory and the environment of a command in a separate process."""
    environment = {**os.environ, "TFM_BLOCKS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    return {"cwd": folder, "env": environment}


@pytest.mark.parametrize(
    ("kills", "devices", "options"),
    [
        pytest.param(2, 1, [], marks=pytest.mark.grid),
        pytest.param(20, 1, [], marks=pytest.mark.slow),
        pytest.param(6, 2, [], marks=pytest.mark.slow),
        *(
            pytest.param(1, 1, options, marks=pytest.mark.grid, id=name)
            for name, options in (LEARNING | OBJECTIVES | TWO_VOCABULARIES).items()
        ),
    ],
)
def test_a_run_killed_at_random_moments_ends_bit_equal(
    small: Callable[..., Composed], tmp_path: Path, kills: int, devices: int, options: list[str]
) -> None:
    """Kill all processes or only the parent, and resume with the command in status.json."""
    if options != (options := taught(small, tmp_path, options)):  # the width and the tokenizer are those of the teacher
        options += [f"d_model={small().mapping['d_model']}", f"data.tokenizer={tmp_path / 'teacher' / 'run'}"]
    train_py = [sys.executable, str(ROOT / "train.py")]
    overrides = [
        *SMALL[1:],
        *options,
        f"trainer.steps={30 * kills}",
        f"trainer.devices={devices}",
    ]  # a kill takes up to 20 steps
    run_python([*train_py[1:], *overrides, "name=run"], **outside(tmp_path)).check_returncode()
    whole, run = tmp_path / "runs" / "run", tmp_path / "runs" / "killed"
    command = [*train_py, *overrides, "name=killed"]
    for number in range(kills):
        with subprocess.Popen(command, **outside(tmp_path), start_new_session=True) as process:
            before = newest(run)
            while newest(run) == before and process.poll() is None:
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.2))
            assert process.poll() is None, f"the run has ended before kill {number + 1} of {kills}"
            process.kill() if number % 2 else os.killpg(process.pid, signal.SIGKILL)
        left = json.loads((run / "status.json").read_text())
        assert left["state"] == "running"
        command = [*train_py, *shlex.split(left["resume"])[2:]]
    run_python(command[1:], **outside(tmp_path)).check_returncode()
    expect_same(whole, run)


def newest(run: Path) -> int:
    checkpoints = list_checkpoints(run / "checkpoints")
    return checkpoints[0].step if checkpoints else -1


def test_other_failures_print_the_resume_command_too(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = "++model.graph.bad={block: faulty, harm: error, sound: 3, after: src_pos}"
    with pytest.raises((TfmError, RuntimeError), match="the last rank broke"):
        begin(small("plugins=[faulty]", fault), tmp_path)
    assert state(tmp_path / "run") == "failed"
    assert f"resume: python train.py resume={tmp_path / 'run'} 'plugins=[faulty]'" in capsys.readouterr().err


@pytest.mark.grid
def test_a_blank_row_of_metrics_does_not_stop_a_resume(finished: Path) -> None:
    path = finished / "metrics.csv"
    path.write_text(path.read_text().replace("\n", "\n\n", 1))
    go_on(finished, "trainer.steps=10")
    assert state(finished) == "done" and read_rows(path)[-1]["step"] == 10


DAMAGED = [("config.yaml", "a: " + "[" * 50_000), ("metrics.csv", ""), ("metrics.csv", "x,y\n"), ("run.json", "{}")]


def test_a_damaged_file_is_refused_before_a_resume_changes_the_state(finished: Path, tmp_path: Path) -> None:
    for number, (name, content) in enumerate(DAMAGED):
        run = shutil.copytree(finished, tmp_path / f"damaged-{number}")
        (run / name).write_text(content)
        with pytest.raises(RunError, match="is damaged"):
            go_on(run, "trainer.steps=10")
        assert state(run) == "done", name
