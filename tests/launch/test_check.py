"""All that is wrong with a run is told together, before it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.check import checked
from tfm_blocks.launch.devices import processor_cores

ROOT = Path(__file__).parents[2]


def train(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_settings_devices_and_the_model_are_told_together_with_their_places(tmp_path: Path) -> None:
    wrong = ["optimizer.eps=-1", "trainer.devices=1000", "trainer.accelerator=cpu", "heads=7", "+data.batch_size=32"]
    done = train(tmp_path, *wrong)
    assert done.returncode == 2
    addresses = [line.split(": ")[1] for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert addresses[:3] == ["data.batch_size", "optimizer.eps", "trainer.devices"]
    assert all(address.startswith("model.graph.") for address in addresses[3:]) and addresses[3:]
    for place in (
        "command line: +data.batch_size=32",
        "conf/optimizer/adam.yaml:4",
        "conf/trainer/default.yaml:",
        "base.yaml:20",
    ):
        assert place in done.stderr
    assert done.stderr.count("\n  help: ") == len(addresses)
    assert not list(tmp_path.iterdir())


def test_a_file_of_ones_own_is_read_like_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    lines = ["# @package _global_", "optimizer:", "  lr: 3e-4", "data:", "  batch_size: 32"]
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("\n".join(lines))
    done = train(tmp_path, "--config-dir", "conf", "experiment=mine")
    assert done.returncode == 2
    assert "optimizer.lr: no such setting" in done.stderr and "mine.yaml:3" in done.stderr
    assert "schedule.peak" in done.stderr and "data.step_tokens" in done.stderr and "mine.yaml:5" in done.stderr


def test_more_processes_than_cores_are_refused(small: Callable[..., Composed]) -> None:
    cores = processor_cores()
    with pytest.raises(ConfigError, match=f"trainer.devices: is {cores + 1}, but this process may use {cores} "):
        checked(small(f"trainer.devices={cores + 1}"))
    assert checked(small(f"trainer.devices={cores}")).trainer.devices == cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a system that binds processes to cores")
def test_cores_are_those_that_the_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert processor_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_run_has_the_plug_ins_of_its_own_model(
    small: Callable[..., Composed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    node = "++model.graph.more={block: faulty, harm: end, sound: 9, after: src_pos}"
    assert checked(small("plugins=[faulty,math]")).plugins == []
    assert checked(small("plugins=[math,faulty]", node)).plugins == ["faulty"]


def test_a_wrong_plug_in_is_told_without_the_blocks_that_it_would_have_brought(small: Callable[..., Composed]) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(small("plugins=mine", "++model.graph.bad={block: theirs, after: src_pos}"))
    assert [problem.address for problem in caught.value.problems] == ["plugins"]
