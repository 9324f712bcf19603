"""Measure the resident memory and the speed of a training run, or of a translation, from start to end.

    python tests/benchmarks/steady_run.py train --until 1500 experiment=multi30k data.dir=PATH logger=csv
    python tests/benchmarks/steady_run.py translate --until 20000 runs/NAME FILE

The first command runs `python train.py` with the remaining arguments and stops it after N steps (`--until N`). A row
counts the target tokens and the time of optimizer steps, without validations. The second command runs
`tfm translate RUN` with the arguments after FILE, and repeats the lines of FILE as its input. A row counts lines.
A row has the resident size, its maximum so far, and the speed since the previous row, by wall time and by CPU time.
Alongside other work, only the speed by CPU time is meaningful, with OMP_NUM_THREADS=1. The command or the environment
sets the sizes of caches: ONEDNN_PRIMITIVE_CACHE_CAPACITY=1024 LRU_CACHE_CAPACITY=1024 are the sizes of torch itself.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import threading
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tfm_blocks.data.files import read_lines
from tfm_blocks.launch.process_settings import set_library_defaults

ROOT = Path(__file__).parents[2]
TICKS = os.sysconf("SC_CLK_TCK")  # read the ticks per second of CPU time


def show(label: str, process: int, amount: float, wall: float, cpu: float) -> None:
    """Print one row about `process`."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    now, peak = (int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    speeds = f"{amount / wall:8,.1f} a second {amount / cpu:8,.1f} a processor second"
    print(f"{label:>12}: {now:6,.0f} MiB, at most {peak:6,.0f} MiB, {speeds}", flush=True)


def train(overrides: list[str], until: int, every: int) -> None:
    """Run train.py in this process, with a timer around its training step."""
    set_library_defaults()
    from tfm_blocks.training.module import TrainingModule

    training_step = TrainingModule.training_step
    sums = [0.0, 0.0, 0.0]

    def timed(module: TrainingModule, step: Any) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        training_step(module, step)
        amounts = (step.tokens, time.perf_counter() - wall, time.process_time() - cpu)
        sums[:] = (total + new for total, new in zip(sums, amounts, strict=True))
        if module.global_step % every == 0:
            show(f"{module.global_step:,} steps", os.getpid(), *sums)
            sums[:] = 0.0, 0.0, 0.0
        if module.global_step >= until:
            os._exit(0)

    TrainingModule.training_step = timed  # type: ignore[method-assign]
    sys.argv = [str(ROOT / "train.py"), *overrides]
    runpy.run_path(sys.argv[0], run_name="__main__")


def translate(run: str, path: Path, options: list[str], until: int, every: int) -> None:
    """Run `tfm translate` in a separate process and measure it from this process."""
    command = [sys.executable, "-m", "tfm_blocks", "translate", run, *options]
    text = [f"{line}\n".encode() for line in read_lines(path, "FILE")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        feeder = threading.Thread(target=write_lines, args=(process.stdin, islice(cycle(text), until)))
        feeder.start()
        wall, cpu = time.perf_counter(), 0.0
        for count, _ in enumerate(process.stdout, 1):
            if count % every == 0:
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                now, used = time.perf_counter(), (int(fields[11]) + int(fields[12])) / TICKS
                show(f"{count:,} lines", process.pid, every, now - wall, used - cpu)
                wall, cpu = now, used
        feeder.join()


def write_lines(stdin: Any, lines: Any) -> None:
    stdin.writelines(lines)
    stdin.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["train", "translate"])
    parser.add_argument("--until", type=int, help="steps (1500) or lines (20000)")
    parser.add_argument("--every", type=int, help="steps (500) or lines (2000)")
    arguments, rest = parser.parse_known_args()
    if arguments.mode == "train":
        train(rest, arguments.until or 1500, arguments.every or 500)
    else:
        translate(rest[0], Path(rest[1]), rest[2:], arguments.until or 20_000, arguments.every or 2000)
