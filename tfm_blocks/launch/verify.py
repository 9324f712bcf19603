"""`verify=resume`: check that a short version of a run gives the same weights if it is stopped and resumed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from tfm_blocks.distributed.cluster import find_rank_info
from tfm_blocks.errors import ConfigError, Problem, RunError
from tfm_blocks.launch.check import CheckedRun
from tfm_blocks.launch.job import resume, train
from tfm_blocks.launch.run_spec import read_saved_run
from tfm_blocks.runs.checkpoints import newest_intact, read_checkpoint
from tfm_blocks.runs.folder import CHECKPOINTS
from tfm_blocks.training.checkpoints import PreemptedError
from tfm_blocks.training.settings import read_run

STEPS = 8
VALIDATE = 3  # steps between validations, so that one is before the stop and one after it
PARTS = ("state_dict", "optimizer_states")


def verify_resume(run: CheckedRun) -> int:
    """Train 8 steps twice, once with a stop after 4, and compare weights and optimizer state bit by bit.

    The runs skip the test, and their folders are deleted. Returns 0. Raises RunError if a tensor differs.
    """
    if find_rank_info(run.settings.trainer, os.environ).is_external:
        rule = "runs in a single command, but a launcher started this process"
        raise ConfigError(Problem("verify", rule, help="run it without the launcher: it respects trainer.devices"))
    short, until = _with_values(run, _short(run.composed.mapping)), min(STEPS, run.settings.trainer.steps)
    name = str(run.composed.mapping["name"])
    with TemporaryDirectory(prefix="tfm-blocks-verify-") as folder:
        whole, parted = (Path(folder) / part / name for part in ("whole", "parted"))
        with _stopped(parted, until // 2):
            train(short, parted.parent, until=until // 2)
        saved = read_saved_run(parted)
        chosen = saved.start.facts["precision"]["name"]  # a second measurement of `auto` could choose the other
        with _stopped(whole, until):
            train(_with_values(short, {"trainer.precision": chosen}), whole.parent, until=until)
        with _stopped(parted, until):
            resume(short.with_config(saved.config), saved, until=until)
        resumed, expected = (_tensors(run) for run in (parted, whole))
    differing = [name for name in expected if name not in resumed or not torch.equal(resumed[name], expected[name])]
    stopped = f"after {until} steps, with a stop after {until // 2}"
    if differing:
        rule = f"{len(differing)} of {len(expected)} tensors differ from a run without a stop, {stopped}"
        help = f"a block may use random numbers or state that a checkpoint lacks; first tensor: {differing[0]}"
        raise RunError(Problem("resume", rule, help=help))
    print(f"verify: {len(expected)} tensors of the weights and the optimizer are bit-equal {stopped}")
    return 0


def _short(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides for a short run: few validations, and a checkpoint only at the end."""
    return {
        "name": config["name"],
        "logger": {"csv": {}},
        "trainer.validate_every": min(VALIDATE, config["trainer"]["validate_every"]),
        "trainer.validate_sentences": 0,
        "trainer.checkpoint_every": None,
        "trainer.checkpoint_minutes": None,
    }


def _with_values(run: CheckedRun, values: Mapping[str, Any]) -> CheckedRun:
    """Return the run with other values of settings, such as `trainer.precision`."""
    composed = run.composed.with_values(values)
    return replace(run, composed=composed, settings=read_run(composed.mapping))


@contextmanager
def _stopped(run: Path, step: int) -> Iterator[None]:
    """Suppress the PreemptedError of a run that stopped after `step`. An earlier stop came from a signal."""
    try:
        yield
    except PreemptedError:
        newest = newest_intact(run / CHECKPOINTS)
        if newest is None or newest.step != step:
            raise


def _tensors(run: Path) -> dict[str, Tensor]:
    newest = newest_intact(run / CHECKPOINTS)
    assert newest is not None
    state = read_checkpoint(run / CHECKPOINTS / newest.file)
    leaves, _ = tree_flatten_with_path({part: state[part] for part in PARTS})
    return {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
