"""A stored run folder still loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tfm_blocks as tfm

HERE = Path(__file__).parent


def test_a_stored_run_translates_as_recorded():
    folder = HERE / "format_1"
    stored = json.loads((folder / "translated.json").read_text("utf-8"))
    assert stored
    assert dict(zip(stored, tfm.load(folder).translate(list(stored)), strict=True)) == stored


@pytest.mark.grid
def test_loading_needs_neither_hydra_nor_lightning():
    code = f"import sys, tfm_blocks; tfm_blocks.load({str(HERE / 'format_1')!r}); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE.parents[1], capture_output=True, text=True, check=True)
    assert "'torch'" in done.stdout
    assert not any(f"'{name}'" in done.stdout for name in ("hydra", "omegaconf", "lightning", "wandb"))
