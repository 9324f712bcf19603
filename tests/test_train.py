"""`python train.py`, as people type it."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SMALL = [
    "d_model=16", "d_ff=16", "layers=1", "vocab=300", "data.train=200", "data.val=10", "data.test=10",
    "trainer.steps=2", "trainer.validate_sentences=2", "logger=csv",
]  # fmt: skip


def train(folder, *arguments):
    environment = {**os.environ, "TFM_BLOCKS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "train.py", *arguments, *SMALL]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_each_job_of_a_sweep_has_a_process_and_a_folder_and_one_failure_leaves_the_others(tmp_path):
    done = train(tmp_path, "-m", "heads=3,2,4")
    assert done.returncode == 2, done.stderr
    assert "D % heads == 0" in done.stderr and "Traceback" not in done.stderr
    states = {
        json.loads((folder / "model.json").read_text())["model"]["args"]["heads"]: json.loads(
            (folder / "status.json").read_text()
        )["state"]
        for folder in (tmp_path / "runs").iterdir()
        if folder.is_dir()
    }
    assert states == {2: "done", 4: "done"}
    assert "sweep: 2 of 3 runs done" in done.stdout and "failed with exit status 2: heads=3 " in done.stdout


def test_a_second_run_of_the_same_name_gets_a_folder_of_its_own_and_the_first_is_left_alone(tmp_path):
    assert [train(tmp_path, "name=x").returncode for _ in range(2)] == [0, 0]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"x", "x-2"}
    one, two = ((tmp_path / "runs" / name / "weights.safetensors").read_bytes() for name in ("x", "x-2"))
    assert one == two
