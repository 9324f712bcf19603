"""The jobs of a sweep share compositions, and each has the config that Hydra composes for it alone."""

from pathlib import Path

import hydra
import pytest
from hydra import initialize_config_dir
from hydra.errors import HydraException

from tfm_blocks.compose import job
from tfm_blocks.compose.composition import add_plus, compose_config
from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.job import JobComposer
from tfm_blocks.compose.run import compose_run
from tfm_blocks.errors import ConfigError

JOBS = [
    ["seed=1"],
    ["seed=2", "schedule.warmup=9", "heads=2"],
    ["model=prenorm", "seed=3", "layers=1", "model.args.scores=sparsemax"],
    ["model=prenorm", "seed=4", "model.graph.extra={block: norm, after: src_pos}", "model.graph.extra.block=rms_norm"],
    ["logger=[csv,tensorboard]", "data=text", "data.dir=/my texts", "data.train.src=a.txt", "data.train.tgt=b.txt"],
    ["experiment=probe/lite", "data=parity", "mixer=lstm", "trainer.steps=60", "data.train_lengths=[3,4]"],
    ["experiment=probe/lite", "data=parity", "mixer=attention", "trainer.steps=70"],
    ["~callbacks.early_stopping.min_delta", "seed=5"],
    ["+trainer.unknown=5", "plugins=[math]", "name=null"],
    ["debug=fast", "trainer.steps=7", "optimizer=adamw", "optimizer.betas=[0.5,0.6]"],
]


def composed_alone(overrides):
    return compose_run(compose_config([add_plus(text) for text in overrides], None, hydra=True))


def test_a_job_has_the_config_and_the_locations_of_a_single_run():
    composer = JobComposer(None)
    for overrides in reversed(JOBS):
        composer.compose(overrides)
    for overrides in JOBS:
        shared, alone = composer.compose(overrides), composed_alone(overrides)
        assert shared.mapping == alone.mapping and list(shared.mapping) == list(alone.mapping)
        assert shared.sources == alone.sources and shared.choices == alone.choices and shared.chain == alone.chain
        assert shared.with_vocab(77).mapping == alone.with_vocab(77).mapping


@pytest.mark.parametrize("wrong", ["sede=1", "trainer.stepz=3", "data.batch_tokens.x=1"])
def test_a_wrong_override_has_hydras_error(wrong):
    with pytest.raises((HydraException, ValueError)) as alone, initialize_config_dir(str(CONF), version_base=None):
        hydra.compose("train", ["seed=1", wrong])
    composer = JobComposer(None)
    composer.compose(["seed=1"])
    with pytest.raises(type(alone.value)) as shared:
        composer.compose(["seed=1", wrong])
    assert str(shared.value) == str(alone.value)


def test_a_number_as_an_option_is_an_error_with_hydras_reason():
    with pytest.raises(ConfigError, match="Config group override must be a string"):
        JobComposer(None).compose(["seed=1", "trainer=3"])


def test_jobs_that_differ_in_values_are_composed_by_hydra_once(monkeypatch):
    composed = []

    def compose(overrides, *rest, **named):
        composed.append(overrides)
        return compose_config(overrides, *rest, **named)

    monkeypatch.setattr(job, "compose_config", compose)
    composer = JobComposer(None)
    for seed in range(20):
        for model in ("tiny", "prenorm"):
            composer.compose([f"model={model}", f"seed={seed}"])
    assert composed == [("model=tiny",), ("model=prenorm",)]


def test_a_folder_of_ones_own_has_its_groups(tmp_path: Path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "slow.yaml").write_text("name: adam\nbetas: [0.9, 0.98]\neps: 1e-9\nweight_decay: 0.5\n")
    composer = JobComposer(tmp_path)
    for seed in (1, 2):
        composed = composer.compose(["optimizer=slow", f"seed={seed}"])
        assert composed.mapping["optimizer"]["weight_decay"] == 0.5 and composed.mapping["seed"] == seed
        assert composed.sources.written[("optimizer", "weight_decay")].file.endswith("slow.yaml")
