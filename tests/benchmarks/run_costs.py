"""Measure the costs of a run besides the arithmetic (start, step, validation, checkpoint) in this and another checkout.

    python tests/benchmarks/run_costs.py [--before CHECKOUT] [--rounds 3] [KEY=VALUE …]

In each round, run train.py once in each checkout, with the overrides KEY=VALUE and `logger=csv`. A round before the measured rounds
fills the data caches. The runs of a round take turns, because the speed of a machine changes within seconds: a run
waits while the other run does a step. The start lasts from the first import to the beginning of the first step. The
first step is slower than later steps if no trial preceded it. A row has the median over the rounds and the ratio to the
other checkout. For a step, the value of a round is the median over the steps after the third.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WARM_UP = 3  # exclude these first steps
PARTS = ("start", "first step", "step", "validation", "checkpoint")
NAME = f"costs-{os.getpid()}"


def probe(overrides: list[str]) -> None:
    """Run train.py of the working folder in this process, with a timer around its parts.

    Each side runs `probe` in its own process.
    """
    own_turn, next_turn = (int(os.environ[name]) for name in ("OWN_TURN", "NEXT_TURN"))
    os.read(own_turn, 1)
    start = time.perf_counter()
    from lightning.pytorch import Trainer
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop

    from tfm_blocks.training.module import TrainingModule

    seconds: defaultdict[str, list[float]] = defaultdict(list)

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            if name == "step":
                seconds["start"] = seconds["start"] or [time.perf_counter() - start]
                with suppress(BrokenPipeError):  # ignore that the other run exited
                    os.write(next_turn, b"!")
                os.read(own_turn, 1)
            part_start = time.perf_counter()
            result = function(*arguments, **keywords)
            seconds[name].append(time.perf_counter() - part_start)
            return result

        return run

    TrainingModule.training_step = clocked("step", TrainingModule.training_step)  # type: ignore[method-assign]
    _EvaluationLoop.run = clocked("validation", _EvaluationLoop.run)  # type: ignore[method-assign]
    Trainer.save_checkpoint = clocked("checkpoint", Trainer.save_checkpoint)  # type: ignore[method-assign]
    sys.argv = ["train.py", *overrides]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as ended:
        if ended.code:  # the error was printed
            raise
    Path(os.environ["SECONDS_FILE"]).write_text(json.dumps(seconds))


def measure(checkouts: Mapping[str, Path], overrides: list[str]) -> dict[str, dict[str, float]]:
    """Return the seconds of each part of a run, for each of one or two checkouts."""
    pipes = [os.pipe() for _ in checkouts]  # write a byte to a pipe to start the turn of its run
    os.write(pipes[0][1], b"!")
    runs = [
        start_run(checkout, overrides, pipes[index][0], pipes[(index + 1) % len(pipes)][1])
        for index, checkout in enumerate(checkouts.values())
    ]
    for end in [end for pipe in pipes for end in pipe]:
        os.close(end)
    texts = [run.communicate()[0] for run in runs]
    if any(run.returncode for run in runs):
        sys.exit("".join(texts))
    return {name: collect(checkout) for name, checkout in checkouts.items()}


def start_run(checkout: Path, overrides: list[str], own_turn: int, next_turn: int) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(checkout), "SECONDS_FILE": str(seconds_file(checkout))}
    environment |= {"OWN_TURN": str(own_turn), "NEXT_TURN": str(next_turn)}
    command = [sys.executable, __file__, "--probe", *overrides, "logger=csv", f"name={NAME}"]
    return subprocess.Popen(
        command,
        cwd=checkout,
        env=environment,
        pass_fds=(own_turn, next_turn),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def collect(checkout: Path) -> dict[str, float]:
    """Return the medians of one run and delete the run."""
    seconds = json.loads(seconds_file(checkout).read_text())
    shutil.rmtree(checkout / "runs" / NAME)
    seconds_file(checkout).unlink()
    seconds["first step"], seconds["step"] = seconds["step"][:1], seconds["step"][WARM_UP:]
    return {part: statistics.median(seconds[part]) for part in PARTS if seconds.get(part)}


def seconds_file(checkout: Path) -> Path:
    return checkout / "runs" / f"{NAME}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="compare this checkout with another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="pass these keys to train.py")
    options = parser.parse_args()
    checkouts = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(options.rounds + 1):
        for name, costs in measure(checkouts, options.overrides).items():
            rounds[name].append(costs)
    print(
        "| part | "
        + " | ".join(f"{name}, s" for name in checkouts)
        + " | ratio |\n"
        + "|---" * (len(checkouts) + 2)
        + "|"
    )
    for part in rounds["now"][0]:
        medians = [
            statistics.median(costs[part] for costs in values[1:]) for values in rounds.values() if part in values[0]
        ]
        ratio = f"{medians[0] / medians[1]:.2f}" if len(medians) > 1 else "–"
        print(f"| {part} | " + " | ".join(f"{median:.3f}" for median in medians) + f" | {ratio} |")


if __name__ == "__main__":
    probe(sys.argv[2:]) if sys.argv[1:2] == ["--probe"] else main()
