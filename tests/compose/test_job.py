"""The jobs of a sweep share compositions, and each has the config that Hydra composes for it alone."""

from pathlib import Path

import hydra
import pytest
from hydra import initialize_config_dir

from tfm_blocks.compose.composition import Composer, add_plus
from tfm_blocks.compose.folders import CONF, config_folders
from tfm_blocks.compose.run import compose_job, compose_run
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
    texts = [add_plus(text) for text in overrides]
    with initialize_config_dir(str(CONF), version_base=None):
        return compose_run(hydra.compose("train", texts, return_hydra_config=True))


@pytest.mark.parametrize(
    "jobs", [[JOBS[0], JOBS[2], JOBS[4], JOBS[7]], pytest.param(JOBS, marks=pytest.mark.grid)], ids=["some", "all"]
)
def test_a_job_has_the_config_and_the_locations_of_a_single_run(jobs):
    composer = Composer(config_folders(None))
    for overrides in reversed(jobs):
        compose_job(overrides, composer)
    for overrides in jobs:
        shared, alone = compose_job(overrides, composer), composed_alone(overrides)
        assert shared.mapping == alone.mapping and list(shared.mapping) == list(alone.mapping)
        assert shared.sources == alone.sources and shared.choices == alone.choices and shared.chain == alone.chain
        assert shared.with_vocab(77).mapping == alone.with_vocab(77).mapping


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("sede=1", "sede: no such key: sede=1\n  help: did you mean seed?"),
        ("trainer.stepz=3", "trainer.stepz: no such key: trainer.stepz=3\n  help: did you mean trainer.steps?"),
        ("data.batch_tokens.x=1", "data.batch_tokens.x: no such key: data.batch_tokens.x=1"),
        (
            "schedule.peak=1",
            "schedule.peak: no such key: schedule.peak=1\n  help: it is a setting of schedule=constant, cosine",
        ),
        ("objective.teacher=x", "help: it is a setting of objective=distil"),
        ("data.labels=[a,b]", "help: it is a setting of data=labels"),
        ("sweep.metric=val/bleu", "help: it is a setting of sweep=optuna"),
        ("ladder.sizes=2", "help: it is a setting of experiment=ladder"),
        ("trainer=3", "Config group override must be a string"),
    ],
)
def test_a_wrong_override_of_a_job_is_an_error_with_similar_keys_or_hydras_reason(wrong, message):
    composer = Composer(config_folders(None))
    composer.compose(["seed=1"])
    with pytest.raises(ConfigError) as caught:
        composer.compose(["seed=1", wrong])
    assert message in str(caught.value)


def test_a_folder_of_ones_own_has_its_groups(tmp_path: Path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "slow.yaml").write_text("name: adam\nbetas: [0.9, 0.98]\neps: 1e-9\nweight_decay: 0.5\n")
    composer = Composer(config_folders(tmp_path))
    for seed in (1, 2):
        composed = compose_job(["optimizer=slow", f"seed={seed}"], composer)
        assert composed.mapping["optimizer"]["weight_decay"] == 0.5 and composed.mapping["seed"] == seed
        assert composed.sources.written[("optimizer", "weight_decay")].file.endswith("slow.yaml")
