"""Train and score on each rank of a run. Rank 0 writes the results."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

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
from tfm_blocks.errors import file_error, printable
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
from tfm_blocks.report.screen import Screen
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
from tfm_blocks.training.groups import assign, count_trained, describe_group, group_rows
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

    on_test_start = on_validation_start


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
        prepared = prepare(with_saved_tokenizer(settings.data, job.folder), job.start.vocab, tell=lambda text: None)
        spec = read_model(job.config["model"], Sources())
        train_rank(torchrun_rank_info(os.environ, "local"), job, settings, spec, prepared, callbacks)
    except StoppedError as error:
        raise preempted(error.number, job.command) from None
    except OSError as error:
        raise file_error(error, str(job.folder)) or error from None
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
        settings, prepared, network, job, ranks = self.settings, self.prepared, self.network, self.job, self.info.ranks
        folder = job.folder
        self.print_run()
        planned_corpus = plan_corpus(network.spec, prepared, settings.data, settings.objective)
        skipped = folder / SKIPPED
        non_finite = NonFiniteSteps(skipped if self.leads else None, prepared.train, settings.trainer.patience_nan)
        module = TrainingModule(network, prepared, settings, ranks, non_finite, pending_signal)
        data = _data(ranks, planned_corpus, prepared, settings)  # its fork server starts during the memory check
        self.heartbeat.doing("checking the memory")
        self.report(build_memory_check(self.info, module, planned_corpus, job.precision).run(settings.seed))

        logs = folder / METRICS, skipped
        checkpoints = Checkpoints(folder / CHECKPOINTS, logs, settings.trainer, pending_signal, job.command)
        hashes = prepared, planned_corpus, settings.objective
        same_run = [ExpectSameRun(fingerprint(settings.seed, *hashes))] if self.info.world > 1 else []
        early = StoppedEarly(callbacks, prolonged=job.prolonged)
        trainer = self.build_trainer(loggers, [checkpoints, *same_run, early, *callbacks])
        with freeze_loaded_objects():
            with defer_signals():
                trainer.fit(module, datamodule=data, ckpt_path=job.checkpoint, weights_only=True)
            if number := pending_signal():  # received after the last agreement of the ranks
                raise StoppedError(number, is_second=False)
            every, step = settings.trainer.validate_every, trainer.global_step
            if checkpoints.validation_interrupted or (step % every and module.validated != step):
                trainer.validate(module, datamodule=data, verbose=False)
        trainer.strategy.barrier()  # so that all ranks see the files of rank 0
        fill_shares(network, final_weights(settings.trainer, folder / CHECKPOINTS, trainer.global_step))
        trainer.test(module, datamodule=data, verbose=False)
        saved = full_tensors(saved_weights(network))
        weights = {name: weight for name, weight in saved.items() if not is_of_generator(network, name)}
        self.heartbeat.doing("scoring the translations")
        if self.leads:
            finish(job, module, weights, loggers, early.reason)

    def report(self, text: object) -> None:
        if self.leads:
            print(printable(str(text)))

    def print_run(self) -> None:
        """Print the run's devices, size, precision and folder, and load the weights of `init_from`."""
        settings, network, job, device = self.settings, self.network, self.job, self.device.type
        if self.info.local_rank == 0:
            backend = f"{torch.distributed.get_default_backend_for_device(device)} on " if self.info.world > 1 else ""
            print(f"cluster: {self.info}, {backend}{device}")
        learned = assign(settings.optimizer, network)
        own = [one for one in learned if not is_of_generator(network, one.weight.name)]
        trained, total = count_trained(own), sum(one.weight.size for one in own)
        self.report(f"model: {total:,} parameters" + f", {trained:,} of them trained" * (trained < total))
        if network.replacer:
            rest = sum(one.weight.size for one in learned) - total
            self.report(f"generator: {rest:,} parameters, besides the embeddings, which it shares with the model")
        source = Path(settings.init_from) if settings.init_from and not job.checkpoint else None
        if network.spec.adapted:
            fill(network, read_base(network, job.folder))
            self.report(f"base: {settings.init_from}")
        elif source:
            self.report(load_matching_weights(network, self.prepared.tokenizer, source))
        if source and self.leads:
            inherit_record(source, job.folder)
        rows = group_rows(learned)
        for row in rows if len({row["group"] for row in rows}) > 1 else ():
            self.report(describe_group(row))
        self.report(job.precision)
        self.report(f"folder: {job.folder}")

    def build_trainer(self, loggers: list[LightningLogger], callbacks: list[Callback]) -> Trainer:
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
                *([MixedPrecision("bf16-mixed", self.device.type)] if self.job.precision.name == "bf16" else []),
            ],
            logger=loggers or False,
            callbacks=[
                RestoreSignalHandlers(),
                *callbacks,
                *([LogAttention(image_loggers), LogConfusion(image_loggers)] if image_loggers else []),
                BestWeights(self.job.folder / CHECKPOINTS, settings.keep_last, settings.average),
                WholeWhileScored(),
                *([ShowProgress(Screen(), self.heartbeat)] if self.leads else []),
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
    return RunData(prepared, feed.layout, settings.data, seed=settings.seed, ranks=ranks, loading=loading, even=even)
