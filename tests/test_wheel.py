"""The wheel carries conf/: it works from any folder, without the checkout."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_train import SMALL
from tfm_blocks import __version__ as version

ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.grid


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return the interpreter of a new environment with the wheel and this environment's dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    own = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(own))
    return python


def run(python, cwd, *command):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([python, *command], cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_wheel_builds_a_model_from_any_folder(python, tmp_path):
    code = "import tfm_blocks as tfm; print(tfm.__file__); print(sum(p.numel() for p in tfm.build('tiny', vocab=9720).parameters()))"
    done = run(python, tmp_path, "-c", code)
    where, count = done.stdout.split()
    assert str(python.parent.parent) in where, "the installed package, not the checkout"
    assert count == "2569216"


def test_the_wheel_accepts_the_tested_versions_and_no_later_ones_of_packages_whose_private_parts_are_used(python):
    code = "from importlib.metadata import metadata as m; d = m('tfm-blocks'); print(*d.get_all('Requires-Dist'), *d.get_all('Classifier'), sep='\\n')"
    done = run(python, ROOT.parent, "-c", code)
    assert done.returncode == 0, done.stderr
    required = [Requirement(line) for line in done.stdout.splitlines() if " :: " not in line]
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for requirement in required:
        if requirement.name in pinned:
            assert pinned[requirement.name] in requirement.specifier, requirement
    later = {"torch": "2.14.0", "lightning": "2.7.0", "hydra-core": "1.4.0", "sacrebleu": "2.7.0"}
    bounds = {requirement.name: requirement.specifier for requirement in required}
    assert not [name for name, version in later.items() if version in bounds[name]]
    assert "Intended Audience :: Science/Research" in done.stdout


def test_the_installed_command_shows_a_model_from_any_folder(python, tmp_path):
    done = run(python, tmp_path, str(python.parent / "tfm"), "show", "base")
    assert done.returncode == 0, done.stderr
    assert "63,082,496 parameters" in done.stdout


def test_a_script_trains_from_any_folder(python, tmp_path, monkeypatch):
    monkeypatch.setenv("TFM_BLOCKS_CACHE", str(tmp_path / "cache"))
    done = run(
        python, tmp_path, "-c", f"import tfm_blocks as tfm; print(tfm.train('tiny', name='mine', overrides={SMALL}))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Run(folder=PosixPath('runs/mine'))\n")


SCRIPT = """
import tfm_blocks as tfm

network = tfm.build("tiny", layers=2, plugins=["mine"])
reveal_type(network)
run = tfm.train("tiny", layers=2, overrides=["trainer.steps=2"])
reveal_type(run.scores["test/loss"])
reveal_type(run.load(checkpoint=350).translate(["a"]))
reveal_type(tfm.save(network, "saved", tokenizer=tfm.Tokenizer.train(["a"], 300)))
tfm.train("tiny", overrides=2)
tfm.load("runs/mine", chekpoint=350)
tfm.trian("tiny")
"""
HEAVY = ("torch", "lightning", "tokenizers", "hydra", "omegaconf", "pydantic", "numpy", "wandb", "rich")


def test_a_type_checker_sees_the_types_of_the_package(python, tmp_path):
    """Types of large libraries are skipped, because they take a minute to read."""
    (tmp_path / "script.py").write_text(SCRIPT)
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in HEAVY)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n{skipped}")
    done = run(sys.executable, tmp_path, "-m", "mypy", "--python-executable", python, "script.py")
    messages = [
        line.partition(": ")[2] for line in done.stdout.splitlines() if "note: Revealed" in line or "error: " in line
    ]
    assert messages == [
        'note: Revealed type is "tfm_blocks.network.graph.Network"',
        'note: Revealed type is "float"',
        'note: Revealed type is "list[str]"',
        'note: Revealed type is "pathlib.Path"',
        'error: Argument "overrides" to "train" has incompatible type "int"; expected "Sequence[str]"  [arg-type]',
        'error: Unexpected keyword argument "chekpoint" for "load"; did you mean "checkpoint"?  [call-arg]',
        'error: Module has no attribute "trian"; maybe "train"?  [attr-defined]',
    ], done.stdout


@pytest.mark.slow
def test_the_installed_command_trains_a_sweep_from_any_folder(python, tmp_path, monkeypatch):
    monkeypatch.setenv("TFM_BLOCKS_CACHE", str(tmp_path / "cache"))
    tfm = str(python.parent / "tfm")
    done = run(python, tmp_path, tfm, "train", "-m", "heads=2,3", *SMALL)
    assert done.returncode == 2 and "D % heads == 0" in done.stderr and not (tmp_path / "runs").exists()
    done = run(python, tmp_path, tfm, "train", "-m", "heads=2,4", *SMALL)
    assert done.returncode == 0 and "sweep: 2 of 2 runs done" in done.stdout
    assert "chrF" in done.stdout.partition("sweep: 2 of 2 runs done")[2], "the tables of tfm compare"
    assert len([*tmp_path.glob("runs/*/*/weights.safetensors")]) == 2
    done = run(python, tmp_path, tfm, "report", "runs", "-o", "report.html")
    assert done.returncode == 0 and (tmp_path / "report.html").is_file(), done.stderr
    assert run(python, tmp_path, tfm, "--version").stdout == f"tfm-blocks {version}\n"
