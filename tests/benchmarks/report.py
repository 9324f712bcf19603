"""Time `tfm report` on many runs in this checkout and in another checkout, with an empty cache and with a full cache.

    python tests/benchmarks/report.py [--before CHECKOUT] [--runs 100] [--models 5] [--lines 1000] [--rounds 1]

Create synthetic runs. Each has a tiny untrained model and translations of 12 words a line, of which up to 30 % are
replaced. A row has the medians over the rounds of wall seconds and of CPU seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import tfm_blocks as tfm  # noqa: E402
from tests.conftest import WORDS, save  # noqa: E402
from tests.run_folders import garbled, leave_run  # noqa: E402
from tfm_blocks.data.tokenizer import Tokenizer  # noqa: E402
from tfm_blocks.runs.row_results import read_translations, write_translations  # noqa: E402
from tfm_blocks.translation.translator import Translator  # noqa: E402

SEEDS = 1_000_000  # exceed the number of seeds of every model


def write_runs(folder: Path, runs: int, models: int, lines: int) -> None:
    random = Random(1)
    references = [" ".join(random.choices(WORDS, k=12)) for _ in range(lines)]
    tokenizer = Tokenizer.train(references, 300)
    knobs = {"layers": 2, "d_model": 32, "d_ff": 64, "vocab": tokenizer.size}
    translator = Translator(tfm.build("tiny", seed=1, **knobs).eval(), tokenizer)
    template = leave_run(folder / "made", references, references)
    status, translations = (template / "status.json").read_text(), read_translations(template)
    for number in range(runs):
        model, seed = number % models, number // models
        run = folder / "runs" / f"model{model}-{seed}"
        run.parent.mkdir(exist_ok=True)
        save(translator, run)
        leave_run(run, references[:1], references[:1], seed=seed, changed={"heads": model + 2}, loss=1 + model / 10)
        outputs = garbled(references, 0.2 + 0.1 * model / models, SEEDS * model + seed)
        pairs = zip(translations, outputs, strict=True)
        write_translations(run, [type(row)(row.source, output, row.reference) for row, output in pairs])
        (run / "status.json").write_text(status)


def seconds(checkout: Path, folder: Path, cache: Path) -> tuple[float, float]:
    """Return the wall and CPU seconds of one report."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "TFM_BLOCKS_CACHE": str(cache)}
    command = [sys.executable, "-m", "tfm_blocks", "report", str(folder / "runs"), "--baseline", "model0-0"]
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "-o", str(folder / "report.html")], check=True, env=environment, cwd=checkout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="compare this checkout with another checkout")
    for name, default in (("runs", 100), ("models", 5), ("lines", 1000), ("rounds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    checkouts = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    measurements: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_runs(folder, options.runs, options.models, options.lines)
        for number in range(options.rounds):
            for version, checkout in checkouts.items():
                cache = folder / f"cache-{version}-{number}"
                for state in ("empty", "full"):
                    measurements.setdefault((version, state), []).append(seconds(checkout, folder, cache))
    print("| checkout | cache | wall, s | CPU, s |\n|---|---|---|---|")
    for (version, state), pairs in measurements.items():
        wall, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"| {version} | {state} | {wall:.1f} | {cpu:.1f} |")


if __name__ == "__main__":
    main()
