"""What a run costs beside the arithmetic: its start, a step, a validation and a checkpoint, here and in another checkout.

    python tests/benchmarks/run_costs.py [--before CHECKOUT] [--rounds 3] [KEY=VALUE …]

Each round is one run of train.py in each checkout, in turns, with what is given after the options; a round before them
fills the caches of the data. The start is from the beginning of the process to the beginning of the first step. A row
has the median over the rounds, of a step that over the steps after the third, and the ratio to the other checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WARM = 3  # steps that are not counted
PARTS = ("start", "step", "validation", "checkpoint")


def probe(overrides: list[str]) -> None:
    """In a process of its own: train.py of the working folder, with a clock around its parts."""
    begun = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + start_of_process()
    from lightning.pytorch import Trainer
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop

    from tfm_blocks.training.module import TrainingModule

    taken: defaultdict[str, list[float]] = defaultdict(list)

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            if name == "step" and not taken["start"]:
                taken["start"].append(time.time() - begun)
            begin = time.perf_counter()
            result = function(*arguments, **named)
            taken[name].append(time.perf_counter() - begin)
            return result

        return run

    TrainingModule.training_step = clocked("step", TrainingModule.training_step)  # type: ignore[method-assign]
    _EvaluationLoop.run = clocked("validation", _EvaluationLoop.run)  # type: ignore[method-assign]
    Trainer.save_checkpoint = clocked("checkpoint", Trainer.save_checkpoint)  # type: ignore[method-assign]
    sys.argv = ["train.py", *overrides]
    try:
        runpy.run_path("train.py", run_name="__main__")
    finally:
        Path(os.environ["TAKEN"]).write_text(json.dumps(taken))


def start_of_process() -> float:
    """Of this one, in seconds since the machine was started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def measure(checkout: Path, overrides: list[str]) -> dict[str, float]:
    """Seconds of each part of one run."""
    run = checkout / "runs" / f"costs-{os.getpid()}"
    taken = run.with_suffix(".json")
    environment = os.environ | {"PYTHONPATH": str(checkout), "TAKEN": str(taken)}
    command = [sys.executable, __file__, "--probe", *overrides, "logger=csv", f"name={run.name}"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    found = json.loads(taken.read_text())
    shutil.rmtree(run)
    taken.unlink()
    found["step"] = found["step"][WARM:]
    return {part: statistics.median(found[part]) for part in PARTS if found.get(part)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout, with which this one is compared")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further keys of train.py")
    options = parser.parse_args()
    checkouts = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(options.rounds + 1):
        for name, checkout in checkouts.items():
            rounds[name].append(measure(checkout, options.overrides))
    print(
        "| part | "
        + " | ".join(f"{name}, s" for name in checkouts)
        + " | ratio |\n"
        + "|---" * (len(checkouts) + 2)
        + "|"
    )
    for part in rounds["now"][0]:
        medians = [statistics.median(one[part] for one in taken[1:]) for taken in rounds.values() if part in taken[0]]
        ratio = f"{medians[0] / medians[1]:.2f}" if len(medians) > 1 else "–"
        print(f"| {part} | " + " | ".join(f"{median:.3f}" for median in medians) + f" | {ratio} |")


if __name__ == "__main__":
    probe(sys.argv[2:]) if sys.argv[1:2] == ["--probe"] else main()
