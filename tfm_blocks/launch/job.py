"""One run from its folder to its end: a new folder, or one that was left, and what status.json says of it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml
from lightning.pytorch import Callback

from tfm_blocks.data.prepare import Prepared
from tfm_blocks.distributed.cluster import find_rank_info
from tfm_blocks.distributed.consistency import config_fingerprint, expect_same, fingerprint
from tfm_blocks.distributed.processes import spawn_ranks
from tfm_blocks.distributed.rendezvous import Json, Rendezvous
from tfm_blocks.distributed.signals import StoppedError, exit_on_signals
from tfm_blocks.errors import TfmError, file_error, print_warnings
from tfm_blocks.launch.check import CheckedRun, check_lengths, warn_about_warmup, with_locations
from tfm_blocks.launch.devices import device_of
from tfm_blocks.launch.init_from import find_weights
from tfm_blocks.launch.precision import measure_precision
from tfm_blocks.launch.rank import spawned_main, train_rank
from tfm_blocks.launch.resume import SavedRun, expect_same_text, find_restarted_run
from tfm_blocks.launch.run_spec import RunSpec
from tfm_blocks.network.build import count_parameters, network_without_values
from tfm_blocks.network.graph import Network
from tfm_blocks.runs.checkpoints import newest_intact
from tfm_blocks.runs.folder import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    RUN,
    TOKENIZER,
    claim_folder,
    settle,
    step_of,
    write_json,
)
from tfm_blocks.runs.lock import hold
from tfm_blocks.runs.model import write_model
from tfm_blocks.runs.status import Status, read_status_or_empty, write_end, write_status
from tfm_blocks.training.checkpoints import PreemptedError, preempted
from tfm_blocks.training.data import plan_corpus
from tfm_blocks.training.non_finite import SKIPPED, DivergedError
from tfm_blocks.training.settings import RunSettings

TYPED = ("python", "train.py")


def train(
    run: CheckedRun,
    root: Path = Path("runs"),
    typed: Sequence[str] = TYPED,
    until: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Trains a new run in a new folder below `root`, and returns it; its last lines say what to type next.

    `typed` is the command line. Raises ConfigError or DataError before anything is started, DivergedError where the
    loss is not finite, PreemptedError where a signal has stopped it; status.json says how it ended. A launcher that
    starts the processes anew goes on with the run that they have begun. After `until` steps it stops as by a signal.
    """
    rendezvous = _meet(run)
    name, command = str(run.composed.mapping["name"]), shlex.join(typed)

    def find() -> Json:
        left = find_restarted_run(root, name, rendezvous.rank_info, command)
        return left.to_json() if left else None

    found = rendezvous.decide("begun", find)
    if found is None:
        return _begin(rendezvous, run, root, typed, until, callbacks)
    begun = SavedRun.from_json(found)
    if begun.state == "done":
        return begun.folder
    return _resume(rendezvous, run.with_config(begun.config), begun, typed, None, callbacks)


def _begin(
    rendezvous: Rendezvous,
    asked: CheckedRun,
    root: Path,
    typed: Sequence[str],
    until: int | None,
    callbacks: Sequence[Callback],
) -> Path:
    settings, mapping = asked.settings, asked.composed.mapping
    if rendezvous.rank_info.rank == 0:
        warn_about_warmup(settings)
        print_warnings(asked.spec.warnings)
    with with_locations(asked.composed):
        prepared = rendezvous.prepare(settings.data, mapping["vocab"])
        if settings.init_from:
            find_weights(Path(settings.init_from))  # which must be there before anything is started
    run = asked.with_vocab(prepared.tokenizer.size)
    config = run.composed.mapping | {"plugins": settings.plugins}
    config = {key: value for key, value in config.items() if key not in ("resume", "verify")}
    network = network_without_values(run.spec)
    check_lengths(network, prepared, run)

    def claim() -> Json:
        timings = _measure_precision(rendezvous, network, prepared, settings)
        folder = claim_folder(root, str(mapping["name"]))
        command = resume_command(typed, folder, settings)
        started = config, folder, mapping["vocab"], command, _wandb_id()
        return RunSpec(*started, until=until, asked_parameters=count_parameters(asked.spec), timings=timings).to_json()

    job = RunSpec.from_json(rendezvous.decide("job", claim))
    with _held(rendezvous, job.folder), _ends(rendezvous, job):
        if rendezvous.rank_info.rank == 0:
            choices = dict(run.composed.choices)
            how = {"commands": [shlex.join(typed)], "launch": rendezvous.rank_info.launch, "choices": choices}
            planned_corpus = plan_corpus(network.spec, prepared, settings.data)
            start_folder(job, prepared, how | {"text": fingerprint(settings.seed, prepared, planned_corpus)})
        _run(rendezvous, job, run, prepared, callbacks)
    return job.folder


def _wandb_id() -> str:
    """An agent of a W&B sweep has given the run its own."""
    agent = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None
    return agent or uuid4().hex[:8]


def resume(
    run: CheckedRun,
    left: SavedRun,
    typed: Sequence[str] = TYPED,
    until: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Goes on with a run after the newest of its checkpoints that is whole, in its folder, and returns that.

    Raises what `train` raises, and RunError where the text is not what the run was begun with.
    """
    return _resume(_meet(run), run, left, typed, until, callbacks)


def _meet(run: CheckedRun) -> Rendezvous:
    """All processes of a launcher have read the same command line and the same files. Raises RunError."""
    rank_info = find_rank_info(run.settings.trainer, os.environ)
    if rank_info.is_external:
        exit_on_signals(supervised=True)
    rendezvous = Rendezvous(rank_info)
    found = rendezvous.gather("asked", config_fingerprint(run.composed.mapping))
    rendezvous.decide("same", lambda: expect_same(found))
    return rendezvous


def _resume(
    rendezvous: Rendezvous,
    run: CheckedRun,
    left: SavedRun,
    typed: Sequence[str],
    until: int | None,
    callbacks: Sequence[Callback],
) -> Path:
    settings, config = run.settings, run.composed.mapping
    with _held(rendezvous, left.folder):
        with with_locations(run.composed):
            prepared = rendezvous.prepare(settings.data, left.asked_vocab)

        def go_on() -> Json:
            newest = newest_intact(left.folder / CHECKPOINTS)
            step = newest.step if newest else 0
            left.expect_resumable(settings, step)
            path = left.folder / CHECKPOINTS / newest.file if newest else None
            command = resume_command(typed, left.folder, settings)
            started = left.asked_vocab, command, left.wandb_id, path, until, left.asked_parameters
            network = network_without_values(run.spec)
            planned_corpus = plan_corpus(network.spec, prepared, settings.data)
            expect_same_text(left, fingerprint(settings.seed, prepared, planned_corpus))
            print(f"resume: {left.folder} after {step} steps")
            timings = left.timings or _measure_precision(rendezvous, network, prepared, settings)
            prolonged = left.is_prolonged(settings, step)
            return RunSpec(config, left.folder, *started, prolonged=prolonged, timings=timings).to_json()

        job = RunSpec.from_json(rendezvous.decide("job", go_on))
        with _ends(rendezvous, job):
            if rendezvous.rank_info.rank == 0:
                _go_on_in_folder(job, left, typed)
            _run(rendezvous, job, run, prepared, callbacks)
    return left.folder


def _measure_precision(
    rendezvous: Rendezvous, network: Network, prepared: Prepared, settings: RunSettings
) -> dict[str, float]:
    """Measure for `trainer.precision=auto` with the threads that a rank will have."""
    ranks = 1 if rendezvous.rank_info.is_external else settings.trainer.devices
    planned_corpus = plan_corpus(network.spec, prepared, settings.data)
    return dict(measure_precision(network, planned_corpus, settings, ranks))


def _held(rendezvous: Rendezvous, folder: Path) -> AbstractContextManager[None]:
    """Hold the folder on rank 0. A launcher that restarts a run has ended it before: wait for its heartbeat to stop."""
    return hold(folder, wait=rendezvous.rank_info.restarts > 0) if rendezvous.rank_info.rank == 0 else nullcontext()


def _run(
    rendezvous: Rendezvous, job: RunSpec, run: CheckedRun, prepared: Prepared, callbacks: Sequence[Callback]
) -> None:
    if not rendezvous.rank_info.is_external and run.settings.trainer.devices > 1:
        spawn_ranks(spawned_main, run.settings.trainer.devices, job, callbacks)
        return
    rendezvous.join(device_of(run.settings.trainer))
    rendezvous.expect_shared_folder(job.folder)
    train_rank(rendezvous.rank_info, job, run.settings, run.spec, prepared, callbacks)
    rendezvous.leave()


def resume_command(typed: Sequence[str], folder: Path, settings: RunSettings) -> str:
    """What goes on with the run. A run folder never imports anything: who types it names the plug-ins."""
    program = [word for word in typed[:2] if "=" not in word]
    plugins = [f"plugins=[{','.join(settings.plugins)}]"] if settings.plugins else []
    return shlex.join([*program, f"resume={folder}", *plugins])


@contextmanager
def _ends(rendezvous: Rendezvous, job: RunSpec) -> Iterator[None]:
    """Whatever ends the run is written down by the first process, which tells the command that goes on with it.

    A run that is done stays so, and a signal that comes while its loggers are closed has nothing left to stop.
    """
    before = read_status_or_empty(job.folder)  # of a part before this one, which was shorter
    try:
        yield
    except BaseException as error:
        agreed = isinstance(error, PreemptedError)
        if (status := read_status_or_empty(job.folder)) != before and status.state == "done":
            if agreed or isinstance(error, StoppedError):
                return
            raise
        if isinstance(error, StoppedError) and not error.again:
            error = preempted(error.number, job.command)
        if isinstance(error, OSError):
            error = file_error(error, str(job.folder)) or error
        if rendezvous.rank_info.rank == 0:
            _write_end(job, error)
        if agreed:
            rendezvous.leave_together()
        if rendezvous.rank_info.rank and isinstance(
            error, (PreemptedError, DivergedError)
        ):  # the first process says so
            raise SystemExit(error.exit_status) from None
        raise error from None


def _write_end(job: RunSpec, error: BaseException) -> None:
    with suppress(OSError):  # of a disk that cannot be written at all
        write_end(job.folder, Status(_state(error), _reason(error), job.command))
    if not isinstance(error, (PreemptedError, DivergedError)):
        print(f"resume: {job.command}", file=sys.stderr)


def _state(error: BaseException) -> str:
    for kind, state in ((PreemptedError, "preempted"), (StoppedError, "stopped"), (DivergedError, "diverged")):
        if isinstance(error, kind):
            return state
    return "failed"


def _reason(error: BaseException) -> str:
    """The error in one line; of a process that failed, the last line of its traceback."""
    if isinstance(error, StoppedError):
        return signal.Signals(error.number).name
    if isinstance(error, TfmError):
        return error.problems[0].rule
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def start_folder(job: RunSpec, prepared: Prepared, record: Mapping[str, Any]) -> None:
    """Everything of a run folder that is known before the first step; `record` says how it was begun."""
    write_config(job)
    write_model(job.folder, job.config["model"], job.config["plugins"], prepared.train.columns)
    prepared.tokenizer.save(job.folder / TOKENIZER)
    (job.folder / CHECKPOINTS).mkdir()
    write_json(job.folder / RUN, {"vocab": job.asked_vocab, "wandb_id": job.wandb_id, **record})
    write_status(job.folder, Status("running", resume=job.command))


def write_config(job: RunSpec) -> None:
    """`config.yaml`, whole or as it was."""
    part = job.folder / f"{CONFIG}.part"
    part.write_text(yaml.safe_dump(job.config, sort_keys=False, allow_unicode=True), "utf-8")
    settle(part, job.folder / CONFIG)


def _go_on_in_folder(job: RunSpec, left: SavedRun, typed: Sequence[str]) -> None:
    """The folder says what has changed, and has no row of metrics that is written again."""
    write_config(job)
    record = left.record | {"commands": [*left.record.get("commands", []), shlex.join(typed)]}
    if job.prolonged and job.checkpoint:
        record["prolonged"] = step_of(job.checkpoint)
    write_json(job.folder / RUN, record)
    if job.checkpoint is None:
        for log in (METRICS, SKIPPED):
            (job.folder / log).unlink(missing_ok=True)
    write_status(job.folder, Status("running", resume=job.command))
