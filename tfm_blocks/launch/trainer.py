"""Build the Lightning Trainer of a run."""

from __future__ import annotations

import logging
import warnings

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console

from tfm_blocks.distributed.cluster import RankInfo
from tfm_blocks.distributed.rendezvous import cluster_environment
from tfm_blocks.distributed.signals import install_handlers
from tfm_blocks.launch.devices import device_of
from tfm_blocks.launch.precision import Precision
from tfm_blocks.launch.run_spec import RunSpec
from tfm_blocks.runs.folder import CHECKPOINTS
from tfm_blocks.tracking.lightning_loggers import LightningLogger
from tfm_blocks.training.callbacks import BestWeights, LogAttention, ShowProgress
from tfm_blocks.training.checkpoints import CheckpointFiles
from tfm_blocks.training.ema import MovingAverage
from tfm_blocks.training.fsdp2 import FSDP2Strategy, WholeWhileScored
from tfm_blocks.training.heartbeat import Heartbeat
from tfm_blocks.training.settings import TrainerSettings


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


def build_trainer(
    rank_info: RankInfo,
    job: RunSpec,
    settings: TrainerSettings,
    precision: Precision,
    loggers: list[LightningLogger],
    callbacks: list[Callback],
    heartbeat: Heartbeat,
) -> Trainer:
    image_loggers = [logger for logger in loggers if logger.shows_pictures]
    callbacks = [
        *callbacks,
        *([LogAttention(image_loggers)] if image_loggers else []),
        BestWeights(job.folder / CHECKPOINTS, settings.keep_last),
        WholeWhileScored(),
        *([ShowProgress(Console(), heartbeat)] if rank_info.rank == 0 else []),
        *([MovingAverage(settings.ema)] if settings.ema else []),
    ]
    return Trainer(
        accelerator="gpu" if device_of(settings) == "cuda" else "cpu",
        devices=rank_info.devices,
        num_nodes=rank_info.nodes,
        strategy=_strategy(settings, rank_info.world),
        plugins=[cluster_environment(rank_info), CheckpointFiles(settings.checkpoint_keep)],
        precision=precision.lightning,
        logger=loggers or False,
        callbacks=callbacks,
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
        default_root_dir=job.folder,
    )


def _strategy(settings: TrainerSettings, world: int) -> Strategy | str:
    """Return the strategy for `world` ranks.

    DDP does not broadcast buffers, which are constants: that would hang if ranks validate unequal numbers of batches.
    """
    if world == 1:
        return "auto"
    return FSDP2Strategy(world) if settings.strategy == "fsdp2" else DDPStrategy(broadcast_buffers=False)


def quiet_lightning() -> None:
    """Silence Lightning's advice about workers, devices and loggers, which this package chooses."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
