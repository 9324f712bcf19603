from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.layout import Sides
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import prepare
from tfm_blocks.distributed.cluster import torchrun_rank_info
from tfm_blocks.distributed.consistency import config_fingerprint, fingerprint
from tfm_blocks.distributed.processes import spawn_ranks
from tfm_blocks.errors import RunError
from tfm_blocks.launch.job import start_folder
from tfm_blocks.launch.rank import train_rank
from tfm_blocks.launch.run_spec import RunSpec, choose_precision
from tfm_blocks.network.build import check_model
from tfm_blocks.runs.records import Base, RunFile
from tfm_blocks.training.data import PlannedCorpus
from tfm_blocks.training.settings import read_run


def read_another(ranks: Ranks, job: RunSpec) -> None:
    """Entry point of two ranks; the second reads another text."""
    settings = read_run(job.config).data.model_copy(update={"train": 200 + ranks.rank})
    prepared = prepare(settings, job.start.vocab, tell=lambda text: None)
    spec = check_model(job.config["model"])
    train_rank(torchrun_rank_info(os.environ, "local"), job, read_run(job.config), spec, prepared)


@pytest.mark.grid
def test_ranks_with_different_texts_stop_before_the_first_step_with_the_difference(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    config = small("trainer.devices=2").mapping
    prepared = prepare(read_run(config).data, config["vocab"], tell=lambda text: None)
    config["vocab"] = prepared.tokenizer.size
    precision = choose_precision("fp32", "cpu")
    job = RunSpec(config, tmp_path / "run", RunFile(300, "x"), "python train.py resume=run", precision)
    job.folder.mkdir()
    start_folder(job, read_run(config), prepared, Base(), [])
    with pytest.raises(RunError, match="process 1 has another vocabulary than process 0"):
        spawn_ranks(read_another, 2, job)
    assert not list((job.folder / "checkpoints").iterdir())


def test_the_fingerprint_names_what_differs(
    small: Callable[..., Composed],
) -> None:
    def made(*overrides: str) -> dict[str, str]:
        config = small(*overrides).mapping
        settings = read_run(config)
        prepared = prepare(settings.data, config["vocab"], tell=lambda text: None)
        feed = PlannedCorpus(prepared.train, Sides(["src"]), settings.data)
        return {**config_fingerprint(config), **fingerprint(settings.seed, prepared, feed)}

    first, versions = made(), {"version of tfm-blocks", "version of torch"}
    held_out = {"text of val", "text of test"}
    assert first == made()
    for overrides, same in (
        (["data.batch_tokens=150"], {"vocabulary", "training text", "text of train", *held_out}),
        (["seed=2"], {"vocabulary", "text of train", *held_out}),
        (["data.max_length=20"], {"vocabulary", *held_out}),
        (["vocab=290"], set()),
    ):
        other = made(*overrides)
        assert {name for name in first if first[name] == other[name]} == same | versions
