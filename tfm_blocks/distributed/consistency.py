"""Check that all ranks of a run, and a resumed run, have the same config, versions, vocabulary and text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tfm_blocks.data.objectives import NEXT_TOKEN, DistilSettings, ObjectiveSettings
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.errors import Problem, RunError
from tfm_blocks.runs.model import hash_weights
from tfm_blocks.training.data import PlannedCorpus
from tfm_blocks.training.gather import gather_json
from tfm_blocks.version import __version__

Fingerprint = Mapping[str, str]
TEACHER = "teacher"


def config_fingerprint(config: Mapping[str, Any]) -> Fingerprint:
    """Return a hash of the config and the versions of the libraries, before the ranks exchange anything."""
    return {
        "version of tfm-blocks": __version__,
        "version of torch": torch.__version__,
        "config": _hash(json.dumps(config, sort_keys=True, default=str).encode()),
    }


def fingerprint(
    seed: int, prepared: Prepared, planned_corpus: PlannedCorpus, objective: ObjectiveSettings = NEXT_TOKEN
) -> Fingerprint:
    """Return hashes of the vocabulary, the plan of the first epoch (the training text), and the ids of each split.

    With a teacher, a hash of its weights is among them.
    """
    plan, source = planned_corpus.plan(seed=seed, epoch=0), prepared.tokenizer.source
    arrays = (plan.rows_N, plan.bounds_K1, plan.order_K, plan.widths_NC, plan.labels_N)
    return {
        "vocabulary": _hash(prepared.tokenizer.text.encode()),
        **({"vocabulary of sources": _hash(source.text.encode())} if source else {}),
        "training text": _hash(b"".join(array.tobytes() for array in arrays)),
        "text of train": prepared.train.sha256,
        "text of val": prepared.val.sha256,
        "text of test": prepared.test.sha256 if prepared.test is not None else "",
        **({TEACHER: hash_weights(Path(objective.teacher))} if isinstance(objective, DistilSettings) else {}),
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def expect_same(fingerprints: Sequence[Fingerprint]) -> None:
    """Raise RunError if a rank has a different fingerprint than rank 0."""
    first = fingerprints[0]
    for rank, other in enumerate(fingerprints):
        for name, value in other.items():
            if value != first.get(name):
                rule = f"process {rank} has another {name} than process 0, so they would train different models"
                help = "use the same command line, conf/, files, TFM_BLOCKS_CACHE and versions on all nodes"
                raise RunError(Problem("trainer.devices", rule, help=help))


class ExpectSameRun(Callback):
    """Compare the fingerprints of all ranks before the first step."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        expect_same(gather_json(self.fingerprint))
