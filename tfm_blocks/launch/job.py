"""Train a new run or resume a saved one, and write its status to status.json."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from tfm_blocks.compose.resolve import recorded_config
from tfm_blocks.data.layout import SOURCE
from tfm_blocks.data.objectives import NoisyPairSettings
from tfm_blocks.data.prepare import Prepared, with_saved_tokenizer
from tfm_blocks.devices import choose_device
from tfm_blocks.distributed.cluster import RankInfo, find_rank_info, on_all_nodes
from tfm_blocks.distributed.consistency import config_fingerprint, expect_same, fingerprint
from tfm_blocks.distributed.processes import spawn_ranks
from tfm_blocks.distributed.rendezvous import Json, Rendezvous
from tfm_blocks.distributed.signals import StoppedError, exit_on_signals
from tfm_blocks.errors import counted, file_error, print_warnings, printable
from tfm_blocks.language.spec import TARGET
from tfm_blocks.launch.check import (
    CheckedRun,
    check_lengths,
    check_resumed_run,
    plugins_of_model,
    warn_about_schedule,
    with_locations,
)
from tfm_blocks.launch.cooldown import open_branch
from tfm_blocks.launch.facts import reason_of
from tfm_blocks.launch.finalize import expect_kept_weights
from tfm_blocks.launch.init_from import expect_base, expect_source, expect_teacher
from tfm_blocks.launch.rank import Callbacks, spawned_main, train_rank
from tfm_blocks.launch.run_spec import (
    Precision,
    RunSpec,
    choose_precision,
    expect_resumable,
    expect_same_text,
    expect_untrained,
    find_restarted_run,
    is_prolonged,
    recorded_precision,
    write_config,
)
from tfm_blocks.network.build import count_parameters, network_without_values
from tfm_blocks.runs.checkpoints import NEVER, newest_intact, restore_weights
from tfm_blocks.runs.folder import CHECKPOINTS, METRICS, TOKENIZER, claim_folder
from tfm_blocks.runs.lock import hold
from tfm_blocks.runs.model import write_model
from tfm_blocks.runs.records import Base, RunFile, Status
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.training.checkpoints import PreemptedError, preempted
from tfm_blocks.training.data import plan_corpus
from tfm_blocks.training.non_finite import SKIPPED, DivergedError
from tfm_blocks.training.settings import RunSettings, TrainerSettings

TYPED = ("python", "train.py")


def train_or_resume(
    run: CheckedRun,
    saved: SavedRun | tuple[SavedRun, int] | None,
    typed: Sequence[str] = TYPED,
    callbacks: Callbacks = (),
) -> Path:
    """Train a new run or a branch below runs/ or its sweep's folder, or resume the `saved` run; return the folder."""
    if isinstance(saved, SavedRun):
        return resume(run, saved, typed, callbacks=callbacks)
    root = Path("runs") / run.composed.mapping.get("sweep_name", "")
    return train(run, root, typed, callbacks=callbacks, branch=saved)


def train(
    run: CheckedRun,
    root: Path = Path("runs"),
    typed: Sequence[str] = TYPED,
    callbacks: Callbacks = (),
    branch: tuple[SavedRun, int] | None = None,
) -> Path:
    """Train a new run in a new folder below `root`, and return the folder.

    `typed` is the command line. If a launcher restarted the processes, resume the run that they began. A `branch`
    begins with a checkpoint of another run, after a step.

    Raises ConfigError or DataError before anything starts, DivergedError if the loss is not finite, and PreemptedError
    after a stop signal.
    """
    rendezvous = _connect(run)
    name, command = str(run.composed.mapping["name"]), shlex.join(typed)

    def find() -> Json:
        saved = find_restarted_run(root, name, rendezvous.rank_info, command)
        if branch and not saved:
            saved = open_branch(*branch, run, root, rendezvous.rank_info.launch)
        if not saved:
            return None
        return [str(saved.folder), saved.start.to_json(), saved.config, saved.state, saved.reason]

    if (fields := rendezvous.decide("restarted run", find)) is None:
        return _begin(rendezvous, run, root, typed, callbacks)
    folder, start, config, state, reason = fields
    saved = SavedRun(Path(folder), start=RunFile.from_json(start), config=config, state=state, reason=reason)
    if state == "done":
        if rendezvous.rank_info.rank == 0:
            print(printable(f"resume: {folder} is done"))
        return saved.folder
    recorded = check_resumed_run(recorded_config(config, run.composed.sources))  # conf/ may differ by now
    return _resume(rendezvous, recorded, saved, typed, callbacks)


def resume(run: CheckedRun, saved: SavedRun, typed: Sequence[str] = TYPED, callbacks: Callbacks = ()) -> Path:
    """Resume a run from its newest intact checkpoint, and return its folder.

    Raises the errors of `train`, and RunError if the text changed since the run began.
    """
    return _resume(_connect(run), run, saved, typed, callbacks)


def _connect(run: CheckedRun) -> Rendezvous:
    """Connect the processes of a launcher. Raises RunError if their configs or versions differ."""
    rank_info = find_rank_info(run.settings.trainer, os.environ)
    if rank_info.is_external:
        exit_on_signals(supervised=True)
    rendezvous = Rendezvous(rank_info)
    fingerprints = rendezvous.gather("config", config_fingerprint(run.composed.mapping))
    rendezvous.decide("same config", lambda: expect_same(fingerprints))
    return rendezvous


def _begin(rendezvous: Rendezvous, run: CheckedRun, root: Path, typed: Sequence[str], callbacks: Callbacks) -> Path:
    """Train a new run in a new folder."""
    settings, mapping, rank_info = run.settings, run.composed.mapping, rendezvous.rank_info
    if rank_info.rank == 0:
        warn_about_schedule(settings)
        print_warnings(run.spec.warnings)
    with with_locations(run.composed):
        vocab, source = run.composed.vocabulary
        prepared = rendezvous.prepare(settings.data, vocab, settings.objective.special, source)
        if settings.init_from:
            expect_source(run.spec, Path(settings.init_from))
        sized = run.with_vocab(*prepared.tokenizer.sizes)
    base = expect_base(sized.spec, prepared.tokenizer, settings.init_from)
    with with_locations(run.composed):
        expect_teacher(sized.spec, prepared.tokenizer, settings.objective)
    settings = sized.settings
    config = sized.composed.mapping | {"name": str(mapping["name"]), "plugins": settings.plugins}
    config = {key: value for key, value in config.items() if key not in ("resume", "cooldown", "match")}
    network = network_without_values(sized.spec)
    planned_corpus = plan_corpus(sized.spec, prepared, settings.data, settings.objective)
    check_lengths(network, prepared, sized)

    def claim() -> RunSpec:
        folder = claim_folder(root, config["name"])
        text = fingerprint(settings.seed, prepared, planned_corpus, settings.objective)
        origin = (shlex.join(typed),), rank_info.launch, dict(sized.composed.choices), text
        start = RunFile(mapping["vocab"], _wandb_id(), *origin, match=mapping.get("match", {}))
        fields = config, folder, start, resume_command(typed, folder, settings, rank_info), _precision(settings.trainer)
        return RunSpec(*fields, asked_parameters=count_parameters(run.spec))

    job = _decide(rendezvous, claim)
    with _lock(rendezvous, job.folder), _record_end(rendezvous, job):
        if rank_info.rank == 0:
            start_folder(job, settings, prepared, base, plugins_of_model(sized))
        _train(rendezvous, job, sized, prepared, callbacks)
    return job.folder


def _resume(
    rendezvous: Rendezvous,
    run: CheckedRun,
    saved: SavedRun,
    typed: Sequence[str],
    callbacks: Callbacks,
) -> Path:
    """Resume a run from its newest intact checkpoint."""
    folder = saved.folder
    with _lock(rendezvous, folder):
        with with_locations(run.composed):
            prepared = rendezvous.prepare(with_saved_tokenizer(run.settings.data, folder), saved.start.vocab)
            expect_teacher(run.spec, prepared.tokenizer, run.settings.objective)
        job = _decide(rendezvous, lambda: _spec_of_resume(run, saved, prepared, typed, rendezvous.rank_info))
        with _record_end(rendezvous, job):
            if rendezvous.rank_info.rank == 0:
                write_config(folder, job.config)
                job.start.write(folder)
                if job.checkpoint is None:  # it restarts from step 0, without its logs and weights
                    for log in (METRICS, SKIPPED):
                        (folder / log).unlink(missing_ok=True)
                    (folder / CHECKPOINTS).mkdir(exist_ok=True)
                    restore_weights(folder / CHECKPOINTS, NEVER, NEVER)
                Status("running", resume=job.command).write(folder)
            _train(rendezvous, job, run, prepared, callbacks)
    return folder


def _spec_of_resume(
    run: CheckedRun,
    saved: SavedRun,
    prepared: Prepared,
    typed: Sequence[str],
    rank_info: RankInfo,
) -> RunSpec:
    """Return the spec of a resume from the newest intact checkpoint. Raises ConfigError or RunError if it cannot."""
    settings, folder, start = run.settings, saved.folder, saved.start
    newest = newest_intact(folder / CHECKPOINTS)
    step, path = (newest.step, folder / CHECKPOINTS / newest.file) if newest else (0, None)
    expect_resumable(saved, settings, step)
    if path:
        expect_kept_weights(settings, path)
    else:
        expect_untrained(saved)
    expect_same_text(saved, prepared, run.spec, settings)
    print(printable(f"resume: {folder} after {counted(step, 'step')}"))
    prolonged, count = is_prolonged(saved, settings, step), start.facts.get("parameters_asked")
    restart = step if prolonged and path else start.prolonged
    start = replace(start, commands=(*start.commands, shlex.join(typed)), prolonged=restart)
    precision = recorded_precision(saved) or _precision(settings.trainer)
    fields = run.composed.mapping, folder, start, resume_command(typed, folder, settings, rank_info), precision
    return RunSpec(*fields, path, count if isinstance(count, int) else None, prolonged)


def _decide(rendezvous: Rendezvous, make: Callable[[], RunSpec]) -> RunSpec:
    """Make the spec on rank 0, and send it to the other processes of the launcher."""
    if rendezvous.store is None:
        return make()
    return RunSpec.from_json(rendezvous.decide("job", lambda: make().to_json()))


def _train(rendezvous: Rendezvous, job: RunSpec, run: CheckedRun, prepared: Prepared, callbacks: Callbacks) -> None:
    trainer = run.settings.trainer
    if not rendezvous.rank_info.is_external and trainer.devices > 1:
        spawn_ranks(spawned_main, trainer.devices, job, callbacks)
        return
    rendezvous.join(choose_device(trainer.accelerator))
    rendezvous.expect_shared_folder(job.folder)
    train_rank(rendezvous.rank_info, job, run.settings, run.spec, prepared, callbacks)
    rendezvous.leave()


def _precision(trainer: TrainerSettings) -> Precision:
    return choose_precision(trainer.precision, choose_device(trainer.accelerator))


def _wandb_id() -> str:
    """Return the ID that a W&B sweep agent assigned to the run, or a new ID."""
    agent = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None
    return agent or uuid4().hex[:8]


def _lock(rendezvous: Rendezvous, folder: Path) -> AbstractContextManager[None]:
    """Lock the folder on rank 0. After a restart by a launcher, wait until the earlier process releases it."""
    return hold(folder, wait=rendezvous.rank_info.restarts > 0) if rendezvous.rank_info.rank == 0 else nullcontext()


def resume_command(typed: Sequence[str], folder: Path, settings: RunSettings, rank_info: RankInfo) -> str:
    """Return the command that resumes the run. It names the plug-ins, because a run folder never imports code."""
    program = [word for word in typed[:2] if "=" not in word]
    plugins = [f"plugins=[{','.join(settings.plugins)}]"] if settings.plugins else []
    return shlex.join(on_all_nodes([*program, f"resume={folder}", *plugins], rank_info))


@contextmanager
def _record_end(rendezvous: Rendezvous, job: RunSpec) -> Iterator[None]:
    """Write the error that ends the run to status.json on rank 0, and print the command that resumes it.

    The state done is not replaced, and a stop signal that arrives after it, while the loggers close, is ignored.
    """
    before = Status.read_or_empty(job.folder)  # a resumed run may have been done before, with fewer steps
    try:
        yield
    except BaseException as error:
        on_all_ranks = isinstance(error, PreemptedError)
        if (status := Status.read_or_empty(job.folder)) != before and status.state == "done":
            if on_all_ranks or isinstance(error, StoppedError):
                return
            raise
        if isinstance(error, StoppedError) and not error.is_second:
            error = preempted(error.number, job.command)
        if isinstance(error, OSError):
            error = file_error(error, str(job.folder)) or error
        agreed = (PreemptedError, DivergedError)  # all ranks raise these
        if rendezvous.rank_info.rank == 0:
            states = {PreemptedError: "preempted", StoppedError: "stopped", DivergedError: "diverged"}
            state = next((states[kind] for kind in states if isinstance(error, kind)), "failed")
            with suppress(OSError):  # the disk may not be writable
                Status(state, reason_of(error), job.command).write_end(job.folder)
            if not isinstance(error, agreed):
                print(printable(f"resume: {job.command}"), file=sys.stderr)
        if on_all_ranks:
            rendezvous.leave_together()
        if rendezvous.rank_info.rank and isinstance(error, agreed):
            # only rank 0 prints the error
            raise SystemExit(error.exit_status) from None
        raise error from None


def start_folder(job: RunSpec, settings: RunSettings, prepared: Prepared, base: Base, plugins: Sequence[str]) -> None:
    """Write the files of a run folder that are known before the first step. The model needs `plugins`."""
    write_config(job.folder, job.config)
    columns = (TARGET,) if prepared.train.positional else prepared.train.columns
    if isinstance(settings.objective, NoisyPairSettings):
        columns = (SOURCE, TARGET)
    write_model(job.folder, job.config["model"], plugins, columns, base)
    prepared.tokenizer.save(job.folder / TOKENIZER)
    (job.folder / CHECKPOINTS).mkdir()
    job.start.write(job.folder)
    Status("running", resume=job.command).write(job.folder)
