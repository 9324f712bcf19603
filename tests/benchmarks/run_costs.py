"""What a run costs beside the arithmetic: its start, a step, a validation and a checkpoint, here and in another checkout.

    python tests/benchmarks/run_costs.py [--before CHECKOUT] [--rounds 3] [KEY=VALUE …]

Each round is one run of train.py in each checkout, with what is given after the options; a round before them fills the
caches of the data. The runs of a round take turns: one waits while the other does a step, since the speed of a machine
changes within seconds. The start is from the first import to the beginning of the first step, which is slower than the
others where nothing was tried before it. A row has the median over the rounds, of a step that over the steps after the
third, and the ratio to the other checkout.
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
WARM = 3  # steps that are not counted
PARTS = ("start", "first step", "step", "validation", "checkpoint")
NAME = f"costs-{os.getpid()}"


def probe(overrides: list[str]) -> None:
    """In a process of its own: train.py of the working folder, with a clock around its parts."""
    take, give = (int(os.environ[name]) for name in ("TAKE", "GIVE"))
    os.read(take, 1)
    begun = time.perf_counter()
    from lightning.pytorch import Trainer
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop

    from tfm_blocks.training.module import TrainingModule

    taken: defaultdict[str, list[float]] = defaultdict(list)

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            if name == "step":
                taken["start"] = taken["start"] or [time.perf_counter() - begun]
                with suppress(BrokenPipeError):  # the other has ended
                    os.write(give, b"!")
                os.read(take, 1)
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


def measure(checkouts: Mapping[str, Path], overrides: list[str]) -> dict[str, dict[str, float]]:
    """Seconds of each part of a run in each of one or two checkouts."""
    ends = [os.pipe() for _ in checkouts]  # in each the turn comes to one run
    os.write(ends[0][1], b"!")
    runs = [
        start(checkout, overrides, ends[place][0], ends[(place + 1) % len(ends)][1])
        for place, checkout in enumerate(checkouts.values())
    ]
    for end in [end for pair in ends for end in pair]:
        os.close(end)
    texts = [run.communicate()[0] for run in runs]
    if any(run.returncode for run in runs):
        sys.exit("".join(texts))
    return {name: collect(checkout) for name, checkout in checkouts.items()}


def start(checkout: Path, overrides: list[str], take: int, give: int) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(checkout), "TAKEN": str(taken_of(checkout))}
    environment |= {"TAKE": str(take), "GIVE": str(give)}
    command = [sys.executable, __file__, "--probe", *overrides, "logger=csv", f"name={NAME}"]
    return subprocess.Popen(
        command,
        cwd=checkout,
        env=environment,
        pass_fds=(take, give),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def collect(checkout: Path) -> dict[str, float]:
    """The medians of one run, of which nothing else stays."""
    found = json.loads(taken_of(checkout).read_text())
    shutil.rmtree(checkout / "runs" / NAME)
    taken_of(checkout).unlink()
    found["first step"], found["step"] = found["step"][:1], found["step"][WARM:]
    return {part: statistics.median(found[part]) for part in PARTS if found.get(part)}


def taken_of(checkout: Path) -> Path:
    return checkout / "runs" / f"{NAME}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout, with which this one is compared")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further keys of train.py")
    options = parser.parse_args()
    checkouts = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(options.rounds + 1):
        for name, taken in measure(checkouts, options.overrides).items():
            rounds[name].append(taken)
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
