"""One run, from a composed config to a folder that can translate."""

from __future__ import annotations

import logging
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.prepare import Prepared, prepare
from tfm_blocks.errors import TfmError
from tfm_blocks.network.build import build_network, check_model, network_without_values
from tfm_blocks.network.memory import keep_freed_memory
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs.average import mean_weights, step_files
from tfm_blocks.runs.folder import CHECKPOINTS, CONFIG, STATUS, TOKENIZER, claim_folder, write_json
from tfm_blocks.runs.model import fill, weights_of, write_model, write_weights
from tfm_blocks.training.callbacks import BEST, KeepWeights, LogAttention, ShowProgress, score_news
from tfm_blocks.training.check import check_lengths, device_of, placed
from tfm_blocks.training.data import RunData
from tfm_blocks.training.loggers import CsvLogger, RunLogger, WandbLogger
from tfm_blocks.training.metrics import exact_match_by_group
from tfm_blocks.training.module import DivergedError, TrainingModule
from tfm_blocks.training.precision import Precision, choose_precision
from tfm_blocks.training.processes import Ranks, run_together
from tfm_blocks.training.settings import RunSettings, TrainerSettings, WandbSettings, read_run
from tfm_blocks.training.signals import StoppedError
from tfm_blocks.translation.evaluate import metrics, score

METRICS = "metrics.csv"


@dataclass(frozen=True)
class Job:
    """A run that has its folder: plain data, from which any process can take part in it."""

    config: dict[str, Any]
    folder: Path
    asked_vocab: int


def train(composed: Composed, settings: RunSettings, root: Path = Path("runs")) -> int:
    """Trains a new run in a new folder below `root`; its last lines say what to type next. Returns 0.

    Raises ConfigError or DataError before anything is started, DivergedError where the loss is not finite; after that
    status.json says how it ended.
    """
    vocab = composed.mapping["vocab"]
    with placed(composed):
        prepared = prepare(settings.data, vocab, settings.seed)
    name = str(composed.mapping["name"])
    config = {**composed.with_vocab(prepared.tokenizer.size).mapping, "name": name}
    check_lengths(network_without_values(check_model(config["model"])), prepared, settings, composed)
    job = Job(config, claim_folder(root, name), vocab)
    start_folder(job, prepared)
    try:
        if settings.trainer.devices == 1:
            take_part(Ranks(), job, prepared)
        else:
            run_together(_take_part, settings.trainer.devices, job)
    except BaseException as error:
        write_json(job.folder / STATUS, {"state": _state(error), "reason": _reason(error)})
        raise
    return 0


def _state(error: BaseException) -> str:
    if isinstance(error, StoppedError):
        return "stopped"
    return "diverged" if isinstance(error, DivergedError) else "failed"


def _reason(error: BaseException) -> str:
    """The error in one line; of a process that failed, the last line of its traceback."""
    if isinstance(error, StoppedError):
        return signal.Signals(error.number).name
    if isinstance(error, TfmError):
        return error.problems[0].rule
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def start_folder(job: Job, prepared: Prepared) -> None:
    """Everything of a run folder that is known before the first step."""
    (job.folder / CONFIG).write_text(yaml.safe_dump(job.config, sort_keys=False, allow_unicode=True), "utf-8")
    write_model(job.folder, job.config["model"], job.config["plugins"])
    prepared.tokenizer.save(job.folder / TOKENIZER)
    (job.folder / CHECKPOINTS).mkdir()
    write_json(job.folder / STATUS, {"state": "running"})


def _take_part(ranks: Ranks, job: Job) -> None:
    """In a process of its own: reads from the cache what the first process prepared and reported."""
    settings = read_run(job.config)
    load_plugins(settings.plugins)
    prepared = prepare(settings.data, job.asked_vocab, settings.seed, tell=lambda text: None)
    take_part(ranks, job, prepared)


def take_part(ranks: Ranks, job: Job, prepared: Prepared) -> None:
    """Trains, scores the best weights on the test set, and leaves them in the folder."""
    _quiet_lightning()
    keep_freed_memory()
    settings = read_run(job.config)
    loggers = _loggers(job, settings) if ranks.rank == 0 else []
    exit_code = 1
    try:
        _fit_and_test(ranks, job, prepared, settings, loggers)
        exit_code = 0
    except TfmError as error:
        exit_code = error.exit_status
        raise
    finally:
        for logger in loggers:
            logger.close(exit_code)


def _fit_and_test(ranks: Ranks, job: Job, prepared: Prepared, settings: RunSettings, loggers: list[RunLogger]) -> None:
    tell = print if ranks.rank == 0 else lambda text: None
    precision = choose_precision(settings.trainer.precision, device_of(settings.trainer))
    network = build_network(check_model(job.config["model"]), seed=settings.seed)
    tell(f"model: {sum(one.numel() for one in network.parameters()):,} parameters")
    tell(precision)
    tell(f"folder: {job.folder}")
    module = TrainingModule(network, prepared, settings, ranks)
    data = RunData(prepared, settings.data, seed=settings.seed, ranks=ranks)
    trainer = _trainer(ranks, job, settings.trainer, precision, loggers)
    begun = time.perf_counter()
    trainer.fit(module, datamodule=data)
    if trainer.global_step % settings.trainer.validate_every:
        trainer.validate(module, datamodule=data, verbose=False)
    seconds = time.perf_counter() - begun
    if settings.trainer.average:
        fill(network, mean_weights(step_files(job.folder / CHECKPOINTS)[-settings.trainer.average :]))
    else:
        module.load_state_dict(torch.load(job.folder / CHECKPOINTS / BEST, weights_only=True)["state_dict"])
    trainer.test(module, datamodule=data, verbose=False)
    if ranks.rank == 0:
        _finish(job, module, seconds, loggers)


def _trainer(
    ranks: Ranks, job: Job, settings: TrainerSettings, precision: Precision, loggers: list[RunLogger]
) -> Trainer:
    callbacks = [
        KeepWeights(job.folder / CHECKPOINTS, settings.keep_last),
        *([ShowProgress(Console())] if ranks.rank == 0 else []),
        *(LogAttention(logger) for logger in loggers if isinstance(logger, WandbLogger)),
    ]
    # Buffers are constants; their exchange in each forward would hang where ranks validate unequal numbers of batches.
    strategy = DDPStrategy(broadcast_buffers=False) if ranks.world > 1 else "auto"
    return Trainer(
        accelerator="gpu" if device_of(settings) == "cuda" else "cpu",
        devices=ranks.world,
        strategy=strategy,
        plugins=[LightningEnvironment()],
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


def _loggers(job: Job, settings: RunSettings) -> list[RunLogger]:
    loggers: list[RunLogger] = [CsvLogger(job.folder / METRICS)]
    if isinstance(settings.logger, WandbSettings):
        loggers.append(WandbLogger(settings.logger, job.folder, wandb_config(job.config)))
    return loggers


def wandb_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its knobs flat at the root. The graph is called so, since a sweep may set a key `model`."""
    return {"graph" if key == "model" else key: value for key, value in config.items()}


def _finish(job: Job, module: TrainingModule, seconds: float, loggers: list[RunLogger]) -> None:
    """The weights last of all but the status: a folder with weights is a whole one."""
    corpus = module.prepared.test
    asked = metrics(module.settings.trainer.bleu, tokenised=False)
    translations = score(module.outputs, corpus.references, asked)
    record = {
        "state": "done",
        "steps": module.settings.trainer.steps,
        "seconds": round(seconds, 1),
        "scores": module.latest,
        "exact_match_by_group": exact_match_by_group(module.outputs, corpus.references, corpus.groups),
        "translation": [asdict(one) for one in translations],
    }
    write_weights(job.folder, weights_of(module.network))
    write_json(job.folder / STATUS, record)
    for logger in loggers:
        logger.log_summary({f"test/{one.name}": asdict(one) for one in translations})
    for line in _summary(job, record):
        print(line)


def _summary(job: Job, record: Mapping[str, Any]) -> Iterator[str]:
    yield f"done: {record['steps']} steps in {record['seconds']:.0f} s"
    yield score_news(record["scores"], "test")
    if record["exact_match_by_group"]:
        yield "exact: " + ", ".join(f"{group} {share:.1%}" for group, share in record["exact_match_by_group"].items())
    for one in record["translation"]:
        yield f"{one['name']}: {one['value']:.2f} ± {one['interval']:.2f}   {one['signature']}"
    plugins = "".join(f" --plugins {module}" for module in job.config["plugins"])
    yield f"folder: {job.folder}   weights.safetensors {METRICS} status.json {CHECKPOINTS}/"
    yield f"next: echo 'your text' | tfm translate {job.folder}{plugins}"


def _quiet_lightning() -> None:
    """It advises on what is decided here: workers, devices, loggers."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
