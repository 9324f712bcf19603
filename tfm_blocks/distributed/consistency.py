"""What all ranks of a run, and a run that goes on, must have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tfm_blocks import __version__
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.errors import Problem, RunError
from tfm_blocks.training.data import PlannedCorpus
from tfm_blocks.training.gather import gather_json

Fingerprint = Mapping[str, str]


def asked_fingerprint(config: Mapping[str, Any]) -> Fingerprint:
    """What a process was told to do, before any other has told it: a hash of its config, and what it would do it by."""
    return {
        "version of tfm-blocks": __version__,
        "version of torch": torch.__version__,
        "config": _hash(json.dumps(config, sort_keys=True, default=str).encode()),
    }


def fingerprint(seed: int, prepared: Prepared, feed: PlannedCorpus) -> Fingerprint:
    """Hashes of the vocabulary, and of the order in which the first epoch reads the training text."""
    plan = feed.plan(seed=seed, epoch=0)
    arrays = (plan.rows_N, plan.bounds_K1, plan.order_K, plan.widths_NC, plan.labels_N)
    return {
        "vocabulary": _hash(prepared.tokenizer.text.encode()),
        "training text": _hash(b"".join(array.tobytes() for array in arrays)),
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def expect_same(fingerprints: Sequence[Fingerprint]) -> None:
    """Raises RunError for what is not the same on every rank."""
    first = fingerprints[0]
    for rank, other in enumerate(fingerprints):
        for what, found in other.items():
            if found != first[what]:
                rule = f"process {rank} has another {what} than process 0, so they would train different models"
                help = "give all the same command line, conf/, files, TFM_BLOCKS_CACHE and versions"
                raise RunError(Problem("trainer.devices", rule, help=help))


def compare_ranks(fingerprint: Fingerprint) -> None:
    """Raises RunError, on every rank, where one has another fingerprint than the first."""
    expect_same(gather_json(fingerprint))


class ExpectSameRun(Callback):
    """Before the first step all ranks compare what they are about to read."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            compare_ranks(self.fingerprint)
