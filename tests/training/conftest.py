from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.run import compose_run

SMALL = [
    "d_model=16", "d_ff=24", "heads=2", "layers=1", "vocab=300", "dropout=0",
    "data.train=200", "data.val=20", "data.test=10", "data.step_tokens=240", "data.max_length=60",
    "trainer.steps=6", "trainer.validate_every=4", "trainer.log_every=2", "trainer.validate_sentences=4",
    "trainer.clip=null", "trainer.accelerator=cpu", "trainer.precision=fp32", "logger=csv", "schedule=inverse_sqrt", "schedule.warmup=2",
]  # fmt: skip


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Composed]:
    """A run of seconds, with overrides on top; its cache is the test's own."""
    monkeypatch.setenv("TFM_BLOCKS_CACHE", str(tmp_path / "cache"))

    def composed(*overrides: str) -> Composed:
        given = {text.partition("=")[0]: text for text in (*SMALL, *overrides)}
        with initialize_config_dir(str(CONF.resolve()), version_base=None):
            config: Any = compose("train", list(given.values()), return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        run = compose_run(config)
        run.mapping["name"] = "run"
        return run

    return composed
