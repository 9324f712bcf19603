"""Compare the training speed of a head at scored positions only with a head at all positions, in tokens per second.

The task is multi-query associative recall with 8,192 tokens, length 64 and 4 pairs. Both sides alternate in one
process. They have the same network, batches and loss; only the positions differ.

    python tests/benchmarks/scored_positions.py [OVERRIDE…]
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from statistics import median

import torch

from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.composition import Composer
from tfm_blocks.compose.folders import config_folders
from tfm_blocks.compose.run import compose_job
from tfm_blocks.data.layout import Batch
from tfm_blocks.data.prepare import prepare
from tfm_blocks.launch.check import check_run
from tfm_blocks.network.build import build_network
from tfm_blocks.training.data import plan_corpus
from tfm_blocks.training.objective import Objective

TASK = ["experiment=probe/mqar", "data.vocab=8192", "data.train=512", "data.batch=64", "trainer.accelerator=cpu"]
ROUNDS = 7


def at_all_positions(batch: Batch) -> Batch:
    """Return the batch with a label at each position."""
    labels_BT = batch.labels_BT.where(batch.labels_BT != 0, torch.full_like(batch.labels_BT, 4))
    return replace(batch, labels_BT=labels_BT, kept_N=torch.arange(labels_BT.numel()))


def main() -> None:
    run = check_run(compose_job(parse_request([*TASK, *sys.argv[1:]]).texts, Composer(config_folders(None))))
    prepared = prepare(run.settings.data, run.composed.mapping["vocab"], tell=lambda text: None)
    network = build_network(run.spec, seed=1)
    planned_corpus, objective = plan_corpus(run.spec, prepared, run.settings.data), Objective(network, 0.0)
    scored = planned_corpus.layout.batch(prepared.train, range(run.settings.data.batch))
    sides = {"scored positions": scored, "all positions": at_all_positions(scored)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(1 + ROUNDS):
        for name, batch in sides.items():
            start = time.perf_counter()
            objective.loss(batch)[0].backward()
            seconds[name].append(time.perf_counter() - start)
            network.zero_grad()
    tokens = scored.labels_BT.numel()
    speeds = {name: tokens / median(values[1:]) for name, values in seconds.items()}  # skip the first round, a warm-up
    for name, speed in speeds.items():
        print(f"{name}: {speed:,.0f} input tokens/s, {len(sides[name].kept_N):,} of {tokens:,} positions")
    print(f"ratio: {speeds['scored positions'] / speeds['all positions']:.2f}")


if __name__ == "__main__":
    main()
