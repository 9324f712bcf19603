"""Train a run from Python, as `tfm train` does, and return to the caller."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ProgressBar

from tfm_blocks.compose.run import compose_request
from tfm_blocks.devices import AUTO, choose_device, fork_generators
from tfm_blocks.distributed.signals import StoppedError, temporary_handlers
from tfm_blocks.distributed.workers import fork_server_restored, main_hidden
from tfm_blocks.errors import Problem, RunError, config_error
from tfm_blocks.launch.check import check_request
from tfm_blocks.launch.job import train_or_resume
from tfm_blocks.launch.process_settings import return_freed_memory, set_library_defaults
from tfm_blocks.launch.rank import LIGHTNING, Callbacks
from tfm_blocks.runs.files import read_json
from tfm_blocks.runs.folder import STATUS
from tfm_blocks.translation.translator import Translator

LOGGERS = (*LIGHTNING, "torch.distributed.elastic", "torch.multiprocessing.spawn")


@contextmanager
def restore_caller() -> Iterator[None]:
    """Restore what a run sets for its whole process.

    These are handlers of signals, the environment, logging levels, warning filters, random generators, the fork server
    of multiprocessing, how the C library treats freed memory, and the autocast of backward passes that torch compiles.
    """
    with ExitStack() as stack:
        compiler = torch._functorch.config
        stack.callback(setattr, compiler, "backward_pass_autocast", compiler.backward_pass_autocast)
        stack.callback(return_freed_memory)
        stack.callback(_restore_environment, dict(os.environ))
        for name in LOGGERS:
            stack.callback(logging.getLogger(name).setLevel, logging.getLogger(name).level)
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(fork_generators(torch.device(choose_device(AUTO))))
        stack.enter_context(fork_server_restored())
        stack.enter_context(temporary_handlers())
        yield


def _restore_environment(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


PROGRAM = ("tfm", "train")  # what resumes the run from a shell


@dataclass(frozen=True)
class Run:
    """The folder of a finished run."""

    folder: Path

    @property
    def status(self) -> dict[str, Any]:
        """Return the content of status.json, such as `steps`, `seconds`, and the `reason` of an early stop."""
        return read_json(self.folder / STATUS)

    @property
    def scores(self) -> Mapping[str, float]:
        """Return the last value of each metric, such as `test/loss` of the final weights, or `val/bleu`."""
        scores: Mapping[str, float] = self.status["scores"]
        return scores

    def load(
        self, *, device: str = "cpu", plugins: Sequence[str] = (), checkpoint: str | int | None = None
    ) -> Translator:
        """Load the run's translator, as `tfm.load` does."""
        return Translator.load(self.folder, device=device, plugins=plugins, checkpoint=checkpoint)


def train(
    model: str | None, overrides: Sequence[str], *, callbacks: Callbacks = (), config_dir: Path | None = None
) -> Run:
    """Train what the model and the overrides describe, or resume a run with `resume=FOLDER` among them.

    Raises what `tfm_blocks.launch.job.train` raises. A signal that ends the run at once reaches the caller's handler.
    """
    _expect_callbacks(callbacks)
    if model and (path := Path(model)).suffix in (".yaml", ".yml"):
        folder = path.parent.parent
        if path.parent.name != "model" or (config_dir and config_dir.resolve() != folder.resolve()):
            rule = f"a model file must be at {config_dir or 'FOLDER'}/model/{path.name}, but is {path}"
            raise config_error("model", rule, "move it there, or build it alone with tfm.build")
        model, config_dir = path.stem, folder
    try:
        with restore_caller():
            return Run(_train([f"model={model}"] * bool(model) + [*overrides], callbacks, config_dir))
    except StoppedError as error:
        number = error.number
    signal.raise_signal(number)
    raise RunError(Problem("", f"the run was stopped by {signal.Signals(number).name} before the end of a step"))


def _train(overrides: Sequence[str], callbacks: Callbacks, config_dir: Path | None) -> Path:
    config, arguments = compose_request(overrides, config_dir)
    run, saved = check_request(config)
    several = run.settings.trainer.devices > 1
    if several:
        _expect_picklable(callbacks)
        set_library_defaults()  # of the new processes, which do not import the caller's script
    with main_hidden() if several else nullcontext():
        return train_or_resume(run, saved, [*PROGRAM, *arguments], callbacks)


def _expect_callbacks(callbacks: Sequence[object]) -> None:
    """Raise ConfigError for an object that is not a callback, or that conflicts with the run's own callbacks."""
    for callback in callbacks:
        name = type(callback).__name__
        if not isinstance(callback, Callback):
            rule = f"must be Lightning callbacks, but one is a {name}"
            raise config_error("callbacks", rule, "derive it from lightning.pytorch.Callback")
        if isinstance(callback, (Checkpoint, ProgressBar)):
            rule = f"has {name}, but a run writes its own checkpoints and progress"
            help = "remove it: trainer.keep_last and trainer.checkpoint_every set which checkpoints are kept"
            raise config_error("callbacks", rule, help)


def _expect_picklable(callbacks: Callbacks) -> None:
    """Raise ConfigError for a callback that cannot be sent to the processes of a run on several devices."""
    for callback in callbacks:
        rule, name = "", type(callback).__name__
        if type(callback).__module__ == "__main__":
            rule = f"{name} is defined in the script, which the processes of trainer.devices do not import"
        try:
            pickle.dumps(callback)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            rule = f"{name} cannot be sent to the processes of trainer.devices: {error}"
        if rule:
            raise config_error("callbacks", rule, "move its class to a module and import it from there")
