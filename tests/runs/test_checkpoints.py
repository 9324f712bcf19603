"""Checkpoints: whatever ends the process or damages the newest file, one checkpoint loads, with the weights it needs."""

import json
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
import torch

from tests.preloaded import run_python
from tfm_blocks.errors import RunError
from tfm_blocks.runs.checkpoints import (
    LATEST,
    NEVER,
    copy_checkpoint,
    delete_old_weights,
    list_checkpoints,
    newest_intact,
    read_checkpoint,
    replace_best,
    restore_weights,
    write_checkpoint,
)
from tfm_blocks.runs.folder import BEST, step_file, step_files, step_of
from tfm_blocks.runs.model import read_tensors, write_tensors

KEEP_LAST, AVERAGE, CHECKPOINTS = 3, 2, 2
WRITER = """
import itertools, sys, torch
from pathlib import Path
from tfm_blocks.runs.checkpoints import write_checkpoint
folder, begin = Path(sys.argv[1]), int(sys.argv[2])
for step in itertools.count(begin):
    write_checkpoint(folder, step, {"step": step, "weights": torch.full((1_000_000,), float(step))}, 2)
    print(step, flush=True)
"""
FULL = """
import resource, sys, torch
from pathlib import Path
from tfm_blocks.errors import RunError
from tfm_blocks.runs.checkpoints import write_checkpoint
from tfm_blocks.runs.model import write_tensors
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
weights = {"weights": torch.zeros(1_000_000)}
for write in (lambda: write_checkpoint(Path(sys.argv[1]), 9, weights, 2), lambda: write_tensors(Path(sys.argv[1]) / "w", weights)):
    try:
        write()
    except (OSError, RunError) as error:
        print(type(error).__name__, error)
"""


def write(folder, *steps, keep=2):
    for step in steps:
        write_checkpoint(folder, step, {"step": step, "weights": torch.full((100,), float(step))}, keep)


def loaded(folder):
    return read_checkpoint(folder / newest_intact(folder).file)["step"]


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    (tmp_path / "step-00000001.ckpt.part").touch()
    write(tmp_path, 1, 2, 3)
    assert [one.step for one in list_checkpoints(tmp_path)] == [3, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000003.ckpt", "step-00000002.ckpt", LATEST}
    assert loaded(tmp_path) == 3


def test_a_copied_checkpoint_has_its_best_weights_though_the_run_trains_on(tmp_path, monkeypatch):
    source, target, copy = tmp_path / "source", tmp_path / "target", shutil.copyfile
    source.mkdir()
    replace_best(source, {"w": torch.tensor(1.0)}, 1, NEVER)
    write(source, 1)

    def copied_while_training(*paths):
        copy(*paths)
        if not step_file(source, 1, "best").exists():
            replace_best(source, {"w": torch.tensor(2.0)}, 2, 1)

    monkeypatch.setattr(shutil, "copyfile", copied_while_training)
    (checkpoint,) = list_checkpoints(source)
    copy_checkpoint(source, target, checkpoint)
    restore_weights(target, 1, 1)
    assert read_tensors(target / BEST)["w"] == 1


def test_checkpoints_after_the_resumed_step_are_replaced(tmp_path):
    write(tmp_path, 1, 2, 3)
    write(tmp_path, 2)
    assert [one.step for one in list_checkpoints(tmp_path)] == [2]
    assert loaded(tmp_path) == 2


@pytest.mark.parametrize("harm", ["cut", "changed", "missing"])
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_loaded(tmp_path, capsys, harm):
    write(tmp_path, 1, 2)
    newest = tmp_path / "step-00000002.ckpt"
    if harm == "missing":
        newest.unlink()
    else:
        data = bytearray(newest.read_bytes())
        data[200] ^= 1
        newest.write_bytes(data[:-1] if harm == "cut" else data)
    assert loaded(tmp_path) == 1
    assert f"warning: {newest} is damaged: it" in capsys.readouterr().err


def test_a_run_without_an_intact_checkpoint_is_an_error(tmp_path):
    assert newest_intact(tmp_path) is None
    write(tmp_path, 1)
    (tmp_path / "step-00000001.ckpt").write_bytes(b"")
    with pytest.raises(RunError, match="none of the 1 checkpoints can be read"):
        newest_intact(tmp_path)
    (tmp_path / LATEST).write_text(json.dumps({"checkpoints": [{"step": 1}]}))
    with pytest.raises(RunError, match="is damaged"):
        newest_intact(tmp_path)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Harm:
        def __reduce__(self):
            return os.system, ("touch harmed",)

    torch.save({"step": Harm()}, tmp_path / "x.ckpt")
    with pytest.raises(RunError, match="is damaged"):
        read_checkpoint(tmp_path / "x.ckpt")


def test_files_have_the_permissions_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path, 1)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}


@pytest.mark.parametrize(
    "kills", [1, pytest.param(3, marks=pytest.mark.grid), pytest.param(30, marks=pytest.mark.slow)]
)
def test_a_process_killed_while_writing_leaves_a_checkpoint_that_loads(tmp_path, kills):
    step = 0
    for _ in range(kills):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(step + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            process.stdout.readline()  # training has started
            time.sleep(Random().uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
            written = [int(line) for line in process.stdout.read().split()]
        newest = newest_intact(tmp_path)
        state = read_checkpoint(tmp_path / newest.file)
        assert newest.step >= max(written, default=step + 1) > step
        assert state["step"] == newest.step and (state["weights"] == newest.step).all()
        step = newest.step


@pytest.mark.grid
def test_a_full_disk_keeps_the_existing_checkpoint_and_raises_a_clear_error(tmp_path):
    write(tmp_path, 1)
    done = run_python(["-c", FULL, tmp_path])
    done.check_returncode()
    one, other = done.stdout.split("\n", 1)
    assert one.startswith("OSError [Errno 27] File too large")
    assert other.startswith("RunError error:") and "cannot be written" in other
    assert loaded(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001.ckpt", LATEST}


class Training:
    """Validations with random losses, and checkpoints before or after some of them; weights are their step."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, Random(seed)
        self.loss, self.best, self.validated = math.inf, NEVER, [NEVER]
        self.known: dict[int, tuple[list[int], int]] = {}  # by the step of a checkpoint: its validations and its best

    def train(self, steps: int) -> None:
        for step in range(steps):
            for part in self.random.sample([self.validate, self.checkpoint], self.random.randrange(3)):
                part(step)

    def validate(self, step: int) -> None:
        weights = {"step": torch.tensor(float(step))}
        self.validated.append(step)
        if (loss := self.random.random()) < self.loss:
            replace_best(self.folder, weights, step, self.best)
            self.loss, self.best = loss, step
        write_tensors(step_file(self.folder, step), weights)
        delete_old_weights(self.folder, KEEP_LAST, AVERAGE)

    def checkpoint(self, step: int) -> None:
        write_checkpoint(self.folder, step, {}, CHECKPOINTS)
        self.known[step] = list(self.validated), self.best


def test_each_checkpoint_restores_its_best_weights_and_those_of_its_mean(tmp_path: Path) -> None:
    for seed in range(25):
        training = Training(tmp_path / str(seed), seed)
        training.folder.mkdir()
        training.train(Random(seed).randint(1, 15))
        assert len(step_files(training.folder)) <= KEEP_LAST + CHECKPOINTS * AVERAGE
        assert len(step_files(training.folder, "best")) <= CHECKPOINTS
        for checkpoint in list_checkpoints(training.folder):  # the newest first: restoring it keeps the older
            validated, best = training.known[checkpoint.step]
            restore_weights(training.folder, validated[-1], best)
            kept = [step_of(path) for path in step_files(training.folder)]
            repeated = checkpoint.step in training.validated and checkpoint.step not in validated
            expected = validated[1:][-(AVERAGE - repeated) :]
            assert kept[len(kept) - len(expected) :] == expected
            assert (training.folder / BEST).is_file() == (best != NEVER)
            assert best == NEVER or read_tensors(training.folder / BEST)["step"] == best
