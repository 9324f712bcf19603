"""Train and score on each rank of a run. Rank 0 writes the results."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer

from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import Prepared, prepare
from tfm_blocks.distributed.cluster import RankInfo, torchrun_rank_info
from tfm_blocks.distributed.consistency import ExpectSameRun, fingerprint
from tfm_blocks.distributed.rendezvous import describe_backend
from tfm_blocks.distributed.signals import StoppedError, defer_signals, pending_signal
from tfm_blocks.distributed.workers import worker_options
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Spec
from tfm_blocks.launch.devices import device_of
from tfm_blocks.launch.facts import record_facts
from tfm_blocks.launch.finalize import final_weights, finish
from tfm_blocks.launch.init_from import load_matching_weights
from tfm_blocks.launch.loggers import open_loggers
from tfm_blocks.launch.memory import freeze_loaded_objects, keep_freed_memory
from tfm_blocks.launch.precision import Precision, choose_precision
from tfm_blocks.launch.run_spec import RunSpec
from tfm_blocks.launch.trainer import RestoreSignalHandlers, build_trainer, quiet_lightning
from tfm_blocks.network.build import build_network, read_model
from tfm_blocks.network.call import losses_of
from tfm_blocks.network.graph import Network
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs.folder import CHECKPOINTS, METRICS
from tfm_blocks.runs.lock import hold
from tfm_blocks.runs.model import weights_of
from tfm_blocks.tracking.lightning_loggers import LightningLogger
from tfm_blocks.training.checkpoints import Checkpoints, PreemptedError, preempted
from tfm_blocks.training.data import PlannedCorpus, plan_corpus
from tfm_blocks.training.data_module import RunData
from tfm_blocks.training.early_stopping import EarlyStopping
from tfm_blocks.training.fsdp2 import fill_shares, full_tensors
from tfm_blocks.training.heartbeat import Heartbeat
from tfm_blocks.training.memory_check import MemoryCheck, copies_of
from tfm_blocks.training.module import TrainingModule
from tfm_blocks.training.non_finite import SKIPPED, NonFiniteSteps
from tfm_blocks.training.settings import CallbackSettings, RunSettings, read_run
from tfm_blocks.training.stopped_early import StoppedEarly


def spawned_main(ranks: Ranks, job: RunSpec, callbacks: Sequence[Callback] = ()) -> None:
    """Entry point of a spawned rank; loads the data that the parent cached, and prints nothing twice."""
    try:
        settings = read_run(job.config)
        load_plugins(settings.plugins, warn=lambda text: None)  # the parent printed the warnings
        prepared = prepare(settings.data, job.asked_vocab, tell=lambda text: None)
        spec = read_model(job.config["model"], Sources())
        train_rank(torchrun_rank_info(os.environ, "local"), job, settings, spec, prepared, callbacks)
    except StoppedError as error:
        raise preempted(error.number, job.command) from None
    except PreemptedError:
        if ranks.rank == 0:  # all ranks agreed to stop; rank 0 reports it after it closed its loggers
            raise


def train_rank(
    rank_info: RankInfo,
    job: RunSpec,
    settings: RunSettings,
    spec: Spec,
    prepared: Prepared,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train, score the final weights on the test set or else the validation set, and write them to the folder.

    `callbacks` come from a caller in Python.
    """
    ranks = rank_info.ranks
    quiet_lightning()
    keep_freed_memory()
    with (
        hold(job.folder / CHECKPOINTS, wait=True) if ranks.rank == 0 else nullcontext(),
        Heartbeat("building the model", enabled=ranks.rank == 0) as heartbeat,
    ):
        network = build_network(spec, seed=settings.seed)
        callbacks = [*_configured(settings.callbacks), *callbacks]
        if ranks.rank:
            _fit_and_test(rank_info, job, prepared, settings, network, [], callbacks, heartbeat)
            return
        heartbeat.doing("opening the loggers")
        facts = record_facts(job, settings.trainer, network, rank_info)
        with open_loggers(job, settings, prepared, facts, losses_of(network.spec)) as loggers:
            _fit_and_test(rank_info, job, prepared, settings, network, loggers, callbacks, heartbeat)
            heartbeat.doing("closing the loggers")


def _fit_and_test(
    rank_info: RankInfo,
    job: RunSpec,
    prepared: Prepared,
    settings: RunSettings,
    network: Network,
    loggers: list[LightningLogger],
    callbacks: Sequence[Callback],
    heartbeat: Heartbeat,
) -> None:
    ranks = rank_info.ranks
    precision = _print_run(rank_info, job, prepared, settings, network)
    planned_corpus = plan_corpus(network.spec, prepared, settings.data)
    skipped = job.folder / SKIPPED
    non_finite = NonFiniteSteps(None if ranks.rank else skipped, prepared.train, settings.trainer.patience_nan)
    module = TrainingModule(network, prepared, settings, ranks, non_finite, pending_signal)
    data = _data(ranks, planned_corpus, prepared, settings)  # its fork server starts during the memory check
    heartbeat.doing("checking the memory")
    peak = build_memory_check(rank_info, module, planned_corpus, precision).run(settings.seed)
    if ranks.rank == 0:
        print(peak)
    logs = (job.folder / METRICS, skipped)
    stop = _stop_signal(job, module)
    checkpoints = Checkpoints(job.folder / CHECKPOINTS, logs, settings.trainer, stop, job.command, job.until)
    same_run = ExpectSameRun(fingerprint(settings.seed, prepared, planned_corpus))
    early = StoppedEarly(callbacks, prolonged=job.prolonged)
    callbacks = [RestoreSignalHandlers(), checkpoints, same_run, early, *callbacks]
    trainer = build_trainer(rank_info, job, settings.trainer, precision, loggers, callbacks, heartbeat)
    with freeze_loaded_objects():
        with defer_signals():
            trainer.fit(module, datamodule=data, ckpt_path=job.checkpoint, weights_only=True)
        unvalidated = trainer.global_step % settings.trainer.validate_every and module.validated != trainer.global_step
        if checkpoints.owed or unvalidated:
            trainer.validate(module, datamodule=data, verbose=False)
    _test(module, data, trainer)
    weights = full_tensors(weights_of(network))
    heartbeat.doing("scoring the translations")
    if ranks.rank == 0:
        finish(job, module, weights, loggers, early.reason)


def _configured(settings: CallbackSettings) -> list[Callback]:
    """Return the callbacks that the config enables."""
    stop = settings.early_stopping
    return [EarlyStopping(stop.monitor, stop.patience, stop.min_delta)] if stop.patience else []


def _print_run(
    rank_info: RankInfo, job: RunSpec, prepared: Prepared, settings: RunSettings, network: Network
) -> Precision:
    """Print the run's devices, size, precision and folder, and load the weights of `init_from`."""
    report: Callable[[object], None] = print if rank_info.rank == 0 else lambda text: None
    device = device_of(settings.trainer)
    if rank_info.local_rank == 0:
        print(f"cluster: {rank_info}, {describe_backend(rank_info, device)}")
    precision = choose_precision(settings.trainer.precision, device, job.timings)
    report(f"model: {sum(parameter.numel() for parameter in network.parameters()):,} parameters")
    if settings.init_from and not job.checkpoint:
        report(load_matching_weights(network, prepared.tokenizer, Path(settings.init_from)))
    report(precision)
    report(f"folder: {job.folder}")
    return precision


def _stop_signal(job: RunSpec, module: TrainingModule) -> Callable[[], int]:
    """Return a function for the pending stop signal, or 0. Reaching `until` counts as SIGTERM."""
    until = job.until
    if until is None:
        return pending_signal
    return lambda: pending_signal() or (signal.SIGTERM if module.global_step >= until else 0)


def build_memory_check(
    rank_info: RankInfo, module: TrainingModule, planned_corpus: PlannedCorpus, precision: Precision
) -> MemoryCheck:
    """Return the memory check of a run whose settings the module has already applied to its network."""
    settings = module.settings
    kind = device_of(settings.trainer)
    device = torch.device(kind, rank_info.local_rank) if kind == "cuda" else torch.device(kind)
    autocast = torch.autocast(kind, torch.bfloat16, enabled=precision.lightning == "bf16-mixed")
    copies = copies_of(settings.trainer, rank_info.world)
    return MemoryCheck(
        module.network, planned_corpus, settings.label_smoothing, rank_info.ranks, device, autocast, copies
    )


def _data(ranks: Ranks, feed: PlannedCorpus, prepared: Prepared, settings: RunSettings) -> RunData:
    accelerated = device_of(settings.trainer) == "cuda"
    workers = settings.trainer.workers if settings.trainer.workers is not None else 2 * accelerated
    return RunData(
        prepared,
        feed.layout,
        settings.data,
        seed=settings.seed,
        ranks=ranks,
        loading={"pin_memory": accelerated, **worker_options(workers)},
        even=settings.trainer.strategy == "fsdp2",
    )


def _test(module: TrainingModule, data: RunData, trainer: Trainer) -> None:
    """Load the final weights into the network and score them."""
    trainer.strategy.barrier()  # so that all ranks see the files of rank 0
    fill_shares(module.network, final_weights(module.settings.trainer, Path(trainer.default_root_dir) / CHECKPOINTS))
    trainer.test(module, datamodule=data, verbose=False)
