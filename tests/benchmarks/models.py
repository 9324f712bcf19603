"""All shipped models at tiny size, trained on dates for the same number of steps: parameters, cost, speed, accuracy.

    python tests/benchmarks/models.py [--only NAME …] [--steps 850] [--seed 1] [KEY=VALUE …]

Each is a run of train.py in a folder runs/models-NAME-sSEED, and a row of the table that is printed at the end; a run
that is done already is not trained again. Multiply-adds are those of one pair of 32 tokens each, tokens/s the median of
target tokens in training, exact match that of greedy output on the test dates. base and big are tiny at this size;
encoder_only predicts no target, and two_sources needs a text with two.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path

from tfm_blocks.network.build import check_model, network_without_values
from tfm_blocks.network.cost import axis_lengths, multiply_adds
from tfm_blocks.runs.folder import MODEL, STATUS, WEIGHTS, read_json

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"base", "big", "encoder_only", "two_sources"}
NAMES = sorted({path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")} - LEFT_OUT)
SIZES = {"d_model": 128, "d_ff": 256, "heads": 4, "layers": 4, "dropout": 0.1, "vocab": 10000}
OTHER_LAYERS = {"local_global": 2}  # pairs of layers
LENGTH = 32
SPEED = "train/tokens_per_second"
COLUMNS = ("model", "parameters", "multiply-adds", "tokens/s", "exact match", "validation loss")


def train(name: str, options: argparse.Namespace) -> Path:
    """The folder of the finished run. Raises CalledProcessError where training ends otherwise."""
    folder = ROOT / "runs" / f"models-{name}-s{options.seed}"
    if not (folder / WEIGHTS).is_file():
        sizes = {**SIZES, "layers": OTHER_LAYERS.get(name, SIZES["layers"])}
        given = [f"{key}={value}" for key, value in sizes.items()]
        given += [f"trainer.steps={options.steps}", f"seed={options.seed}", "logger=csv", f"name={folder.name}"]
        command = [sys.executable, str(ROOT / "train.py"), f"model={name}", *given, *options.overrides]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def row(name: str, folder: Path) -> tuple[str, ...]:
    """What the finished run shows."""
    spec = check_model(read_json(folder / MODEL)["model"])
    network = network_without_values(spec)
    parameters = sum(one.numel() for one in network.parameters())
    cost = sum(multiply_adds(network, axis_lengths(spec, {}, LENGTH)).values())
    status = read_json(folder / STATUS)
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    pace = statistics.median(float(one[SPEED]) for one in rows if one.get(SPEED))
    losses = [float(one["val/loss"]) for one in rows if one.get("val/loss")]
    match = 100 * float(status["scores"]["test/exact_match"])
    return name, f"{parameters:,}", f"{cost:,}", f"{pace:,.0f}", f"{match:.1f} %", f"{min(losses):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=NAMES, default=NAMES)
    parser.add_argument("--steps", type=int, default=850)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further keys of train.py")
    options = parser.parse_args()
    rows = []
    for name in options.only:
        rows.append(row(name, train(name, options)))
        print(json.dumps(dict(zip(COLUMNS, rows[-1], strict=True))), flush=True)
    print("\n| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for one in rows:
        print("| " + " | ".join(one) + " |")


if __name__ == "__main__":
    main()
