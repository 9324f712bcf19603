"""Commands that compute nothing answer at once, since nothing heavy is imported for them."""

import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "train --help": ["train.py", "--help"],
    "train --cfg job": ["train.py", "--cfg", "job"],
    "tfm --help": ["-m", "tfm_blocks", "--help"],
    "tfm train --help": ["-m", "tfm_blocks", "train", "--help"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_start_up_imports_nothing_heavy(command):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "argparse" in imported
    assert imported.isdisjoint(
        {"torch", "lightning", "wandb", "torchmetrics", "numpy", "tokenizers", "matplotlib", "pydantic"}
    )


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_start_up_takes_less_than_half_a_second_of_a_processor(command):
    def spent():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def once():
        begin = spent()
        subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, check=True)
        return spent() - begin

    assert statistics.median(once() for _ in range(5)) < 0.5


def test_importing_the_package_imports_no_torch():
    code = "import sys, tfm_blocks; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
