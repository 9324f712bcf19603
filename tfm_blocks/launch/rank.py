"""What each of the processes of a run does: it trains, scores, and the first leaves the weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from multiprocessing import resource_tracker
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer

from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import Prepared, prepare
from tfm_blocks.distributed.cluster import RankInfo, torchrun_rank_info
from tfm_blocks.distributed.consistency import ExpectSameRun, fingerprint
from tfm_blocks.distributed.rendezvous import describe_backend
from tfm_blocks.distributed.signals import StoppedError, block_signals, defer_signals, pending_signal
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
from tfm_blocks.network.graph import Network
from tfm_blocks.network.modules import losses_of
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs.folder import CHECKPOINTS, METRICS
from tfm_blocks.runs.lock import hold
from tfm_blocks.runs.model import weights_of
from tfm_blocks.tracking.lightning_loggers import LightningLogger
from tfm_blocks.training.checkpoints import Checkpoints, PreemptedError, preempted
from tfm_blocks.training.data import PlannedCorpus, RunData, plan_corpus
from tfm_blocks.training.early_stopping import EarlyStopping
from tfm_blocks.training.fsdp2 import fill_shares, full_tensors
from tfm_blocks.training.heartbeat import Heartbeat
from tfm_blocks.training.memory_check import MemoryCheck, copies_of
from tfm_blocks.training.module import TrainingModule
from tfm_blocks.training.non_finite import SKIPPED, NonFiniteSteps
from tfm_blocks.training.settings import CallbackSettings, RunSettings, read_run
from tfm_blocks.training.stopped_early import StoppedEarly


def spawned_main(ranks: Ranks, job: RunSpec, callbacks: Sequence[Callback] = ()) -> None:
    """In a process of its own: reads from the cache what the first process prepared and reported."""
    try:
        settings = read_run(job.config)
        load_plugins(settings.plugins, warn=lambda text: None)  # the first process printed it
        prepared = prepare(settings.data, job.asked_vocab, tell=lambda text: None)
        spec = read_model(job.config["model"], Sources())
        train_rank(torchrun_rank_info(os.environ, "local"), job, settings, spec, prepared, callbacks)
    except StoppedError as error:
        raise preempted(error.number, job.command) from None
    except PreemptedError:
        if ranks.rank == 0:  # the others, which have agreed, leave it to tell so, after it has closed its loggers
            raise


def train_rank(
    rank_info: RankInfo,
    job: RunSpec,
    settings: RunSettings,
    spec: Spec,
    prepared: Prepared,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Trains, scores the best weights on the test set, else the validation set, and leaves them in the folder.

    `callbacks` are those of a caller in Python.
    """
    ranks = rank_info.ranks
    quiet_lightning()
    keep_freed_memory()
    with (
        hold(job.folder / CHECKPOINTS, wait=True) if ranks.rank == 0 else nullcontext(),
        Heartbeat("building the model", speaks=ranks.rank == 0) as heartbeat,
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
    precision = _introduce(rank_info, job, prepared, settings, network)
    planned_corpus = plan_corpus(network.spec, prepared, settings.data)
    skipped = job.folder / SKIPPED
    count = NonFiniteSteps(None if ranks.rank else skipped, prepared.train, settings.trainer.patience_nan)
    module = TrainingModule(network, prepared, settings, ranks, count, pending_signal)
    heartbeat.doing("trying the memory")
    peak = build_memory_check(rank_info, module, planned_corpus, precision).run(settings.seed)
    if ranks.rank == 0:
        print(peak)
    data = _data(ranks, planned_corpus, prepared, settings)
    logs = (job.folder / METRICS, skipped)
    asked = _asked(job, module)
    checkpoints = Checkpoints(job.folder / CHECKPOINTS, logs, settings.trainer, asked, job.command, job.until)
    common = ExpectSameRun(fingerprint(settings.seed, prepared, planned_corpus))
    early = StoppedEarly(callbacks, prolonged=job.prolonged)
    callbacks = [RestoreSignalHandlers(), checkpoints, common, early, *callbacks]
    trainer = build_trainer(rank_info, job, settings.trainer, precision, loggers, callbacks, heartbeat)
    with freeze_loaded_objects():
        with defer_signals():
            trainer.fit(module, datamodule=data, ckpt_path=job.checkpoint, weights_only=True)
        off = trainer.global_step % settings.trainer.validate_every and module.validated != trainer.global_step
        if checkpoints.owed or off:
            trainer.validate(module, datamodule=data, verbose=False)
    _test(module, data, trainer)
    weights = full_tensors(weights_of(network))
    heartbeat.doing("scoring the translations")
    if ranks.rank == 0:
        finish(job, module, weights, loggers, early.reason)


def _configured(settings: CallbackSettings) -> list[Callback]:
    """Return the callbacks that the config switches on."""
    stop = settings.early_stopping
    return [EarlyStopping(stop.monitor, stop.patience, stop.min_delta)] if stop.patience else []


def _introduce(
    rank_info: RankInfo, job: RunSpec, prepared: Prepared, settings: RunSettings, network: Network
) -> Precision:
    """Tells what is about to train, with another run's weights in the network where they are asked for."""
    tell: Callable[[object], None] = print if rank_info.rank == 0 else lambda text: None
    device = device_of(settings.trainer)
    if rank_info.local_rank == 0:
        print(f"cluster: {rank_info}, {describe_backend(rank_info, device)}")
    precision = choose_precision(settings.trainer.precision, device, job.timings)
    tell(f"model: {sum(one.numel() for one in network.parameters()):,} parameters")
    if settings.init_from and not job.checkpoint:
        tell(load_matching_weights(network, prepared.tokenizer, Path(settings.init_from)))
    tell(precision)
    tell(f"folder: {job.folder}")
    return precision


def _asked(job: RunSpec, module: TrainingModule) -> Callable[[], int]:
    """The signal that has come, or 0."""
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
    if workers:
        with block_signals():
            resource_tracker.ensure_running()
    return RunData(
        prepared,
        feed.layout,
        settings.data,
        seed=settings.seed,
        ranks=ranks,
        workers=workers,
        pinned=accelerated,
        even=settings.trainer.strategy == "fsdp2",
    )


def _test(module: TrainingModule, data: RunData, trainer: Trainer) -> None:
    """Fills in the weights that the run is to leave, and scores them."""
    trainer.strategy.barrier()  # what the first rank has written is there for all
    fill_shares(module.network, final_weights(module.settings.trainer, Path(trainer.default_root_dir) / CHECKPOINTS))
    trainer.test(module, datamodule=data, verbose=False)
