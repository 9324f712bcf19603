"""Time `tfm compare` and `tfm runs` on a thousand runs. Print the median CPU seconds of each command.

python tests/benchmarks/thousand_runs.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.run_folders import leave_thousand, printed


def cpu_seconds(*arguments: object) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        runs = leave_thousand(Path(name))
        for command in (["compare", runs], ["compare", runs, "--json"], ["runs", "--in", runs]):
            median = statistics.median(cpu_seconds(*command) for _ in range(rounds))
            print(f"tfm {command[0]} {' '.join(map(str, command[2:]))}: {median:.2f} s")
