"""Runs and commands on a pretended accelerator: the texts of the CPU, and its weights and scores to rounding.

The CPU computes without its shortcuts: with them it draws different numbers for dropout. Kernels that torch chooses by
the layout of tensors may still round differently, so only runs on the device are compared bit for bit.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import pretend
from tests.conftest import SMALL
from tests.launch.test_resume import rows
from tfm_blocks.runs.checkpoints import list_checkpoints
from tfm_blocks.runs.row_results import read_losses

ROOT = Path(__file__).parent.parent
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
MAIN = """
import sys
if {plain}:
    from tests import pretend
    pretend.without_shortcuts()
"""
TRAIN = """
if __name__ == "__main__":  # a process of two imports this file
    from tfm_blocks.cli import main

    main(["train", *sys.argv[1:]])
"""
COMMANDS = """
from contextlib import nullcontext
from pathlib import Path
from starlette.testclient import TestClient
from tfm_blocks.cli import main
from tfm_blocks.serving import Limits
from tfm_blocks.serving.batcher import Batcher, Metrics
from tfm_blocks.serving.server import create_app
from tfm_blocks.translation.translator import Translator

Path("src").write_text("3 March 1987\\n1. Mai 2001\\n")
Path("ref").write_text("1987-03-03\\n2001-05-01\\n")
device = sys.argv[1]
for command in (
    "translate runs/run --beam 3 --nbest 2",
    "translate runs/run --sample --temperature 1 --top-k 20",
    "evaluate runs/run --src src --ref ref",
    "attention runs/run 1.Mai -o attention.html",
    "generate runs/decoder --tokens 8",
):
    with open("src") as sys.stdin:
        try:
            main([*command.split(), "--device", device])
        except SystemExit as end:
            assert not end.code, command
translator = Translator.load("runs/run", device=device)
with TestClient(create_app(Batcher(translator, Limits(), Metrics(), nullcontext), ["testserver"])) as client:
    print(client.post("/translate", json={"texts": ["3 March 1987"], "beam": 2}).json())
"""
STEADY = "optimizer.eps=1e-6"  # so that Adam does not divide a gradient that is only rounding by its own size
DROPS = [STEADY, "dropout=0.1", "trainer.checkpoint_every=2", "trainer.clip=0.5"]
FAULTY = "++model.graph.bad={block: faulty, harm: poison, sound: 0, steps: 3-, after: src_pos}"
RUNS = {
    "adam": ["optimizer=adam", "trainer.average=2", "trainer.validate_every=3", *DROPS],
    "adamw": ["optimizer=adamw", "trainer.ema=0.9", *DROPS],
    "skipped": ["plugins=[faulty]", FAULTY, *DROPS],
    "bf16": ["trainer.precision=bf16", "trainer.activation_checkpointing=true", *DROPS],
    "decoder": ["model=decoder_only", "layers=2", *DROPS],
}


def start(folder: Path, code: str, *arguments: str, device: str, devices: int = 1) -> subprocess.Popen[str]:
    """Start Python code in the folder, on a machine with pretended accelerators or without an accelerator."""
    folder.mkdir(exist_ok=True)
    path = [
        str(ROOT),
        str(ROOT / "tests"),
        *([str(pretend.backend_folder(folder / "backend"))] if device == "pretend" else []),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TFM_BLOCKS_CACHE": str(folder / "cache")}
    environment["PRETEND_DEVICES"] = str(devices)
    file = folder / "main.py"
    file.write_text(MAIN.format(plain=device == "cpu") + code)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([sys.executable, str(file), *arguments], cwd=folder, env=environment, text=True, **pipes)  # type: ignore[call-overload]


def end(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def overrides(device: str, *more: str) -> list[str]:
    texts = (*SMALL, f"trainer.accelerator={device}", "name=run", *more)
    return list({text.partition("=")[0]: text for text in texts}.values())


def content(run: Path) -> dict[str, object]:
    """Return what a run computed: its files, without times and speeds."""
    files = ("weights.safetensors", "losses.csv", "translations.jsonl")
    skipped = run / "skipped.jsonl"
    return {name: (run / name).read_bytes() for name in files} | {
        "metrics": rows(run),
        "skipped": skipped.read_text() if skipped.exists() else "",
        "scores": json.loads((run / "status.json").read_text())["scores"]["test/loss"],
    }


def expect_alike(run: Path, other: Path) -> None:
    """Expect equal texts and steps; weights within 1e-4, losses and scores to a relative 1e-5."""
    for name in ("translations.jsonl", "skipped.jsonl"):
        assert (run / name).exists() == (other / name).exists()
        assert not (run / name).exists() or (run / name).read_text() == (other / name).read_text()
    weights, others = load_file(run / "weights.safetensors"), load_file(other / "weights.safetensors")
    torch.testing.assert_close(weights, others, rtol=0, atol=1e-4)
    own_rows, other_rows = rows(run), rows(other)
    assert own_rows and own_rows == [pytest.approx(row, rel=1e-5, abs=1e-5) for row in other_rows]
    assert read_losses(run) == pytest.approx(read_losses(other), rel=1e-5, abs=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_the_device_agrees_with_the_cpu_and_is_the_same_after_a_kill(name: str, tmp_path: Path) -> None:
    """The block that poisons a step counts its calls from the start of the process, so that run is not killed."""
    folders = {place: tmp_path / place for place in ("cpu", "pretend", "killed")}
    places = ["pretend"] if name == "bf16" else ["pretend", "cpu"]  # autocast rounds other operations on the CPU
    whole = [start(folders[place], TRAIN, *overrides(place, *RUNS[name]), device=place) for place in places]
    outputs = [end(process) for process in whole]
    assert "memory: " in outputs[0]
    run = folders["pretend"] / "runs" / "run"
    expected = content(run)
    if name != "bf16":
        expect_alike(run, folders["cpu"] / "runs" / "run")
    assert json.loads((run / "run.json").read_text())["facts"]["hardware"]["device"] == "pretend"
    if name == "skipped":
        assert expected["skipped"]
        return
    run = folders["killed"] / "runs" / "run"
    killed = start(folders["killed"], TRAIN, *overrides("pretend", *RUNS[name]), device="pretend")
    while not list_checkpoints(run / "checkpoints") or list_checkpoints(run / "checkpoints")[0].step < 2:
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    end(start(folders["killed"], TRAIN, "resume=runs/run", device="pretend"))
    assert content(run) == expected


@pytest.mark.grid
def test_two_devices_train_as_two_processes_of_the_cpu(tmp_path: Path) -> None:
    """The processes exchange gradients, sums and scores; both have validation, averaging and checkpoints."""
    options = [*DROPS, "trainer.devices=2", "trainer.average=2", "trainer.validate_every=3"]
    folders = {place: tmp_path / place for place in ("cpu", "pretend")}
    both = [
        start(folder, TRAIN, *overrides(place, *options), device=place, devices=2) for place, folder in folders.items()
    ]
    outputs = [end(process) for process in both]
    assert "rank 0 of 2, gloo on cpu" in outputs[0] and "rank 0 of 2, host on pretend" in outputs[1]
    cpu, device = (folder / "runs" / "run" for folder in folders.values())
    expect_alike(device, cpu)
    assert len(list_checkpoints(device / "checkpoints")) == len(list_checkpoints(cpu / "checkpoints")) > 1


@pytest.mark.grid
def test_commands_on_the_device_print_the_texts_and_scores_of_the_cpu(tmp_path: Path) -> None:
    end(start(tmp_path, TRAIN, *overrides("cpu"), device="cpu"))
    end(start(tmp_path, TRAIN, *overrides("cpu", "model=decoder_only", "name=decoder"), device="cpu"))
    outputs, pages = [], []
    for device in ("cpu", "pretend"):
        outputs.append(end(start(tmp_path, COMMANDS, device, device=device)))
        pages.append((tmp_path / "attention.html").read_text())
    for cpu, device in (outputs, pages):  # kernels that torch chooses by the layout of tensors round differently
        assert NUMBER.sub("", cpu) == NUMBER.sub("", device)
        numbers = [float(number) for number in NUMBER.findall(device)]
        assert [float(number) for number in NUMBER.findall(cpu)] == pytest.approx(numbers, rel=1e-5, abs=1e-5)
    assert "'outputs': " in outputs[0]
