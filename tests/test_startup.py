"""Commands that compute nothing start fast, because they import no large library."""

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


HYDRA = f"import hydra; hydra.initialize_config_dir({str(ROOT / 'conf')!r}, version_base=None); hydra.compose('train')"


def expect_half_a_second(arguments, **options):
    """Check the CPU time of a Python command, for a CPU on which Hydra takes a quarter of a second to compose the config."""

    def take(arguments):
        begin = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], **options, capture_output=True, check=True)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime

    pairs = [(take(arguments), take(["-c", HYDRA])) for _ in range(3)]
    assert statistics.median(ours / alone for ours, alone in pairs) < 2


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


@pytest.mark.grid
@pytest.mark.parametrize("command", COMMANDS)
def test_start_up_takes_less_than_half_a_second_of_a_processor(command):
    expect_half_a_second(COMMANDS[command], cwd=ROOT)


def test_importing_the_package_imports_no_torch():
    code = "import sys, tfm_blocks; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
