"""Compare the training steps of models, alternating in one process.

    python tests/benchmarks/models.py --tokens 2048 \\
        --model base --model base 'model.quantize.all={where: {role: matrix}, weights: ternary}'

A step is forward, loss, backward and fused Adam, in float32, on random ids. Give overrides after the name of a model.
Print the median time of a step of each model and its ratio to the first model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.scaling.real_step import RealStep, batching_of
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import check_model


def step_of(model: str, overrides: list[str], config_dir: Path | None, tokens: int) -> RealStep:
    composed = compose_model(model, overrides, config_dir)
    spec = check_model(composed.model, composed.sources)
    return RealStep(spec, batching_of(spec, max(1, tokens // batching_of(spec, 1).row_tokens)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", action="append", required=True, metavar=("NAME", "OVERRIDE"))
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("--tokens", type=int, default=2048, help="set the tokens of a batch, over all inputs")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    steps = [step_of(name, overrides, options.config_dir, options.tokens) for name, *overrides in options.model]
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(options.rounds):
        for step, measured in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            step.run()
            measured.append(time.perf_counter() - start)
    medians = [statistics.median(measured) for measured in seconds]
    for model, step, median in zip(options.model, steps, medians, strict=True):
        weights = sum(parameter.numel() for parameter in step.network.parameters())
        print(f"{' '.join(model)}: {weights:,} parameters, {1000 * median:,.1f} ms, {median / medians[0]:.2f}")
