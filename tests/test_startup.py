"""Commands that compute nothing answer at once, since nothing heavy is imported for them."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "train --help": ["train.py", "--help"],
    "train --cfg job": ["train.py", "--cfg", "job"],
    "tfm --help": ["-m", "tfm_blocks", "--help"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_start_up_imports_nothing_heavy(command):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "argparse" in imported
    assert imported.isdisjoint({"torch", "lightning", "wandb", "torchmetrics", "numpy", "tokenizers", "matplotlib"})


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_start_up_takes_less_than_half_a_second(command):
    def once():
        begin = time.perf_counter()
        subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, check=True)
        return time.perf_counter() - begin

    assert statistics.median(once() for _ in range(5)) < 0.5


def test_importing_the_package_imports_no_torch():
    code = "import sys, tfm_blocks; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
