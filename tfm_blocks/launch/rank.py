"""Train and score on each rank of a run. Rank 0 writes the results."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from rich.console import Console

from tfm_blocks.data.objectives import ReplacedTokenSettings
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import Prepared, prepare, with_saved_tokenizer
from tfm_blocks.devices import CPU, choose_device, pins_memory, rank_device
from tfm_blocks.distributed.accelerator import TorchAccelerator, TorchDDPStrategy
from tfm_blocks.distributed.cluster import RankInfo, torchrun_rank_info
from tfm_blocks.distributed.consistency import ExpectSameRun, fingerprint
from tfm_blocks.distributed.rendezvous import cluster_environment
from tfm_blocks.distributed.signals import StoppedError, defer_signals, install_handlers, pending_signal
from tfm_blocks.distributed.workers import worker_options
from tfm_blocks.errors import printable
from tfm_blocks.exchange.folder import inherit_record
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Spec
from tfm_blocks.launch.facts import open_loggers, record_facts
from tfm_blocks.launch.finalize import final_weights, finish
from tfm_blocks.launch.init_from import load_matching_weights
from tfm_blocks.launch.process_settings import freeze_loaded_objects, keep_freed_memory
from tfm_blocks.launch.run_spec import Precision, RunSpec
from tfm_blocks.network.build import build_network, read_model
from tfm_blocks.network.call import losses_of
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import fill, is_of_generator, saved_weights
from tfm_blocks.network.weights import attach_generator
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs.folder import CHECKPOINTS, METRICS
from tfm_blocks.runs.lock import hold
from tfm_blocks.runs.model import read_base
from tfm_blocks.tracking.lightning_loggers import LightningLogger
from tfm_blocks.training.callbacks import BestWeights, LogAttention, LogConfusion, MovingAverage, ShowProgress
from tfm_blocks.training.checkpoints import CheckpointFiles, Checkpoints, PreemptedError, preempted
from tfm_blocks.training.data import PlannedCorpus, plan_corpus
from tfm_blocks.training.data_module import RunData
from tfm_blocks.training.early_stopping import EarlyStopping, StoppedEarly
from tfm_blocks.training.fsdp2 import FSDP2Strategy, WholeWhileScored, fill_shares, full_tensors
from tfm_blocks.training.groups import assign, describe_group, group_rows
from tfm_blocks.training.heartbeat import Heartbeat
from tfm_blocks.training.memory_check import MemoryCheck, copies_of
from tfm_blocks.training.module import TrainingModule
from tfm_blocks.training.non_finite import SKIPPED, NonFiniteSteps
from tfm_blocks.training.settings import RunSettings, TrainerSettings, read_run

LIGHTNING = ("lightning", "lightning.fabric", "lightning.pytorch")  # its loggers
Callbacks = Sequence[Callback]


class RestoreSignalHandlers(Callback):
    """Replace the signal handlers that Lightning installs at each stage of the trainer.

    This also disables Lightning's exchange of SIGTERM in each step, which would wait for the device.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        install_handlers()
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        install_handlers()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        install_handlers()


def _strategy(settings: TrainerSettings, world: int, device: torch.device) -> Strategy:
    """Return the strategy for `world` ranks.

    DDP does not broadcast buffers, which are constants: that would hang if ranks validate unequal numbers of batches.
    """
    if world == 1:
        return SingleDeviceStrategy(device)
    return FSDP2Strategy(world) if settings.strategy == "fsdp2" else TorchDDPStrategy(broadcast_buffers=False)


def spawned_main(ranks: Ranks, job: RunSpec, callbacks: Callbacks = ()) -> None:
    """Entry point of a spawned rank; loads the data that the parent cached, and prints nothing twice."""
    try:
        load_plugins(job.config["plugins"], warn=lambda text: None)  # the parent printed the warnings
        settings = read_run(job.config)
        data = with_saved_tokenizer(settings.data, job.folder)
        prepared = prepare(data, job.start.vocab, tell=lambda text: None)
        spec = read_model(job.config["model"], Sources())
        train_rank(torchrun_rank_info(os.environ, "local"), job, settings, spec, prepared, callbacks)
    except StoppedError as error:
        raise preempted(error.number, job.command) from None
    except PreemptedError:
        if ranks.rank == 0:  # all ranks agreed to stop; rank 0 reports it after it closed its loggers
            raise


@dataclass(frozen=True)
class _Rank:
    """One rank of a run, the network that it trains, and what it prints; `leads` is True for rank 0."""

    info: RankInfo
    job: RunSpec
    settings: RunSettings
    prepared: Prepared
    network: Network
    heartbeat: Heartbeat

    @property
    def device(self) -> torch.device:
        return rank_device(choose_device(self.settings.trainer.accelerator), self.info.local_rank)

    @property
    def leads(self) -> bool:
        return self.info.rank == 0

    def fit_and_test(self, loggers: list[LightningLogger], callbacks: Callbacks) -> None:
        """Train, load the final weights, and score them; rank 0 writes the results."""
        settings, prepared, ranks, folder = self.settings, self.prepared, self.info.ranks, self.job.folder
        precision = self.print_run()
        planned_corpus = plan_corpus(self.network.spec, prepared, settings.data, settings.objective)
        skipped = folder / SKIPPED
        non_finite = NonFiniteSteps(skipped if self.leads else None, prepared.train, settings.trainer.patience_nan)
        module = TrainingModule(self.network, prepared, settings, ranks, non_finite, pending_signal)
        data = _data(ranks, planned_corpus, prepared, settings)  # its fork server starts during the memory check
        self.heartbeat.doing("checking the memory")
        self.report(build_memory_check(self.info, module, planned_corpus, precision).run(settings.seed))
        until, logs = self.job.until, (folder / METRICS, skipped)

        def stop() -> int:
            """Return the pending stop signal, or 0. Reaching `until` counts as SIGTERM."""
            return pending_signal() or (signal.SIGTERM if until is not None and module.global_step >= until else 0)

        checkpoints = Checkpoints(folder / CHECKPOINTS, logs, settings.trainer, stop, self.job.command, self.job.until)
        same_run = ExpectSameRun(fingerprint(settings.seed, prepared, planned_corpus, settings.objective))
        early = StoppedEarly(callbacks, prolonged=self.job.prolonged)
        trainer = self.build_trainer(precision, loggers, [checkpoints, same_run, early, *callbacks])
        with freeze_loaded_objects():
            with defer_signals():
                trainer.fit(module, datamodule=data, ckpt_path=self.job.checkpoint, weights_only=True)
            every, step = settings.trainer.validate_every, trainer.global_step
            if checkpoints.validation_interrupted or (step % every and module.validated != step):
                trainer.validate(module, datamodule=data, verbose=False)
        trainer.strategy.barrier()  # so that all ranks see the files of rank 0
        fill_shares(self.network, final_weights(settings.trainer, folder / CHECKPOINTS, trainer.global_step))
        trainer.test(module, datamodule=data, verbose=False)
        weights = full_tensors(saved_weights(self.network))
        self.heartbeat.doing("scoring the translations")
        if self.leads:
            finish(self.job, module, weights, loggers, early.reason)

    def report(self, text: object) -> None:
        if self.leads:
            print(printable(str(text)))

    def print_run(self) -> Precision:
        """Print the run's devices, size, precision and folder, and load the weights of `init_from`."""
        settings, device = self.settings, self.device.type
        if self.info.local_rank == 0:
            backend = f"{torch.distributed.get_default_backend_for_device(device)} on " if self.info.world > 1 else ""
            print(f"cluster: {self.info}, {backend}{device}")
        precision = self.job.precision
        named = list(self.network.named_parameters())
        parameters = [parameter for name, parameter in named if not is_of_generator(self.network, name)]
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        total = sum(parameter.numel() for parameter in parameters)
        self.report(f"model: {total:,} parameters" + f", {trained:,} of them trained" * (trained < total))
        if self.network.replacer:
            own = sum(parameter.numel() for name, parameter in named if is_of_generator(self.network, name))
            self.report(f"generator: {own:,} parameters, besides the embeddings, which it shares with the model")
        if self.network.spec.adapted:
            fill(self.network, read_base(self.network, self.job.folder))
            self.report(f"base: {settings.init_from}")
            if self.leads and not self.job.checkpoint:
                inherit_record(Path(settings.init_from or ""), self.job.folder)
        elif settings.init_from and not self.job.checkpoint:
            self.report(load_matching_weights(self.network, self.prepared.tokenizer, Path(settings.init_from)))
            if self.leads:
                inherit_record(Path(settings.init_from), self.job.folder)
        rows = group_rows(assign(settings.optimizer, self.network))
        for row in rows if len({row["group"] for row in rows}) > 1 else ():
            self.report(describe_group(row))
        self.report(precision)
        self.report(f"folder: {self.job.folder}")
        return precision

    def build_trainer(self, precision: Precision, loggers: list[LightningLogger], callbacks: list[Callback]) -> Trainer:
        """Return Lightning's Trainer with all callbacks of the run."""
        info, settings = self.info, self.settings.trainer
        image_loggers = [logger for logger in loggers if logger.shows_pictures]
        return Trainer(
            accelerator=CPU if self.device.type == CPU else TorchAccelerator(),
            devices=info.devices,
            num_nodes=info.nodes,
            strategy=_strategy(settings, info.world, self.device),
            plugins=[
                cluster_environment(info),
                CheckpointFiles(settings.checkpoint_keep, settings.checkpoint_at),
                *([MixedPrecision("bf16-mixed", self.device.type)] if precision.name == "bf16" else []),
            ],
            logger=loggers or False,
            callbacks=[
                RestoreSignalHandlers(),
                *callbacks,
                *([LogAttention(image_loggers), LogConfusion(image_loggers)] if image_loggers else []),
                BestWeights(self.job.folder / CHECKPOINTS, settings.keep_last, settings.average),
                WholeWhileScored(),
                *([ShowProgress(Console(), self.heartbeat)] if self.leads else []),
                *([MovingAverage(settings.ema)] if settings.ema else []),
            ],
            max_steps=settings.steps,
            max_epochs=-1,
            val_check_interval=settings.validate_every,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            log_every_n_steps=settings.log_every,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=self.job.folder,
        )


def train_rank(
    rank_info: RankInfo, job: RunSpec, settings: RunSettings, spec: Spec, prepared: Prepared, callbacks: Callbacks = ()
) -> None:
    """Train, score the final weights on the test set or else the validation set, and write them to the folder.

    `callbacks` come from a caller in Python.
    """
    for name in LIGHTNING:  # silence advice about workers, devices and loggers, which this package chooses
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    keep_freed_memory()
    with (
        hold(job.folder / CHECKPOINTS, wait=True) if rank_info.rank == 0 else nullcontext(),
        Heartbeat("building the model", enabled=rank_info.rank == 0) as heartbeat,
    ):
        network = build_network(spec, seed=settings.seed)
        if isinstance(settings.objective, ReplacedTokenSettings):
            generator = read_model(settings.objective.generator, Sources())
            attach_generator(network, build_network(generator, seed=settings.seed + 1))
        rank = _Rank(rank_info, job, settings, prepared, network, heartbeat)
        if (early := settings.callbacks.early_stopping).patience:
            callbacks = [EarlyStopping(early.monitor, early.patience, early.min_delta), *callbacks]
        if not rank.leads:
            rank.fit_and_test([], callbacks)
            return
        heartbeat.doing("opening the loggers")
        facts = record_facts(job, settings, network, rank_info)
        losses = settings.losses.names_with(losses_of(network.spec), settings.objective)
        with open_loggers(job, settings, prepared, facts, losses) as loggers:
            rank.fit_and_test(loggers, callbacks)
            heartbeat.doing("closing the loggers")


def build_memory_check(
    rank_info: RankInfo, module: TrainingModule, planned_corpus: PlannedCorpus, precision: Precision
) -> MemoryCheck:
    """Return the memory check of a run whose settings the module has already applied to its network."""
    settings = module.settings
    device = rank_device(choose_device(settings.trainer.accelerator), rank_info.local_rank)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision.name == "bf16")
    copies = copies_of(settings, module.network, rank_info.world)
    return MemoryCheck(module.network, planned_corpus, module.objective, rank_info.ranks, device, autocast, copies)


def _data(ranks: Ranks, feed: PlannedCorpus, prepared: Prepared, settings: RunSettings) -> RunData:
    kind = choose_device(settings.trainer.accelerator)
    workers = settings.trainer.workers if settings.trainer.workers is not None else 2 * (kind != CPU)
    loading = {"pin_memory": pins_memory(kind), **worker_options(workers)}
    even = settings.trainer.strategy == "fsdp2"
    options: dict[str, Any] = {"seed": settings.seed, "ranks": ranks, "loading": loading, "even": even}
    return RunData(prepared, feed.layout, settings.data, **options)
