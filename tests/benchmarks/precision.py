"""Time training steps in float32 and in bf16, alternating in one process. Print the choice of trainer.precision=auto.

    python tests/benchmarks/precision.py --steps 5 model=base heads=8 layers=6

Pass the arguments of `tfm train`. A step is one micro-batch of the run: forward, loss, backward and fused AdamW.
Print the choice of `auto`, and the median seconds of wall time and of CPU time.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from tfm_blocks.compose.run import compose_request, compose_run
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import prepare
from tfm_blocks.launch.run_spec import choose_precision
from tfm_blocks.network.build import build_network, check_model, network_without_values
from tfm_blocks.training.data import PlannedCorpus, plan_corpus
from tfm_blocks.training.objective import Objective
from tfm_blocks.training.settings import RunSettings, read_run

SIDES = ("fp32", "bf16")


def time_steps(
    settings: RunSettings, model: dict[str, object], corpus: PlannedCorpus, steps: int
) -> dict[str, list[list[float]]]:
    """Return the wall and CPU seconds of each step of each side."""
    network = build_network(check_model(model), seed=settings.seed).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    objective = Objective(network, settings.label_smoothing)
    plan = corpus.plan(seed=settings.seed, epoch=0)
    seconds: dict[str, list[list[float]]] = {name: [] for name in SIDES}
    for number in range(steps + 1):
        batch = corpus.batches(plan[number % len(plan)], Ranks())[0]
        for name in SIDES:
            wall, cpu = time.perf_counter(), time.process_time()
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16"):
                loss, _ = objective.loss(batch)
            (loss / len(batch.kept_N)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            seconds[name].append([time.perf_counter() - wall, time.process_time() - cpu])
    return {name: values[1:] for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    arguments, overrides = parser.parse_known_args()
    composed = compose_run(compose_request(overrides, None)[0])
    prepared = prepare(read_run(composed.mapping).data, composed.mapping["vocab"], tell=lambda text: None)
    composed = composed.with_vocab(prepared.tokenizer.size)
    settings = read_run(composed.mapping)
    network = network_without_values(check_model(composed.model))
    corpus = plan_corpus(network.spec, prepared, settings.data)
    print(choose_precision("auto", "cpu"))
    seconds = time_steps(settings, composed.model, corpus, arguments.steps)
    for index, kind in enumerate(("wall", "CPU")):
        fp32, bf16 = (median(step_seconds[index] for step_seconds in seconds[name]) for name in SIDES)
        print(f"step, {kind} time: fp32 {fp32:.3f} s, bf16 {bf16:.3f} s; fp32 / bf16 = {fp32 / bf16:.2f}")


if __name__ == "__main__":
    main()
