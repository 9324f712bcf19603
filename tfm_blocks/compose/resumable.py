"""The keys that a resume may change."""

from __future__ import annotations

RESUMABLE_KEYS = (
    "trainer.steps",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.cluster",
    "trainer.strategy",
    "trainer.accelerator",
    "trainer.workers",
    "trainer.patience_nan",
    "trainer.log_every",
    "trainer.checkpoint_every",
    "trainer.checkpoint_minutes",
    "trainer.checkpoint_keep",
    "trainer.checkpoint_at",
    "trainer.average",
    "data.batch_tokens",
    "callbacks.early_stopping.monitor",
    "callbacks.early_stopping.patience",
    "callbacks.early_stopping.min_delta",
)  # none of them changes the weight updates, except for rounding; devices and batch_tokens change draws of dropout
_DECIDING = ("trainer.steps", "trainer.average", "callbacks.")  # they decide which weights are the final ones
EQUAL_WEIGHTS = tuple(key for key in RESUMABLE_KEYS if not key.startswith(_DECIDING))
