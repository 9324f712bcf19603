"""`tfm average`: the mean of the last kept weights, in a separate folder."""

import json
from pathlib import Path

import pytest
import torch

import tfm_blocks as tfm
from tests.runs.test_model import KNOBS
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import RunError
from tfm_blocks.exchange.folder import PublishedFile
from tfm_blocks.network.matching import weights_of
from tfm_blocks.runs.checkpoints import average
from tfm_blocks.runs.folder import step_file
from tfm_blocks.runs.model import read_network, write_model, write_tensors
from tfm_blocks.runs.saved_run import SavedRun


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    write_model(folder, compose_model("tiny", [f"{name}={value}" for name, value in KNOBS.items()]).model, [])
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.yaml").write_text("name: run\nobjective: {sentinels: 2}\n")
    (folder / "published.json").write_text('{"family": "gpt2", "texts": {"config.json": "{}"}}')
    for seed in (1, 2, 3):
        weights = weights_of(tfm.build("tiny", **KNOBS, seed=seed))
        write_tensors(step_file(folder / "checkpoints", 100 * seed), weights)
    return folder


def test_the_last_validations_are_averaged_and_the_run_does_not_change(run):
    before = {path.name for path in run.iterdir()}
    folder = average(run, 2)
    two, three = (dict(tfm.build("tiny", **KNOBS, seed=seed).named_parameters()) for seed in (2, 3))
    for name, parameter in read_network(folder).named_parameters():
        torch.testing.assert_close(parameter, (two[name] + three[name]) / 2, rtol=0, atol=1e-7)
    assert folder.name == "run-average2" and {path.name for path in run.iterdir()} == before
    assert len(json.loads((folder / "status.json").read_text())["of"]) == 2
    assert average(run, 2).name == "run-average2-2"


def test_the_average_has_the_config_and_the_record_of_an_imported_model(run):
    main(["average", str(run), "--last", "2"])
    folder = run.parent / "run-average2"
    assert SavedRun(folder).config == {"name": "run-average2", "objective": {"sentinels": 2}}
    assert PublishedFile.read_or_empty(folder) == PublishedFile.read_or_empty(run) != PublishedFile("", {})


def test_the_folder_that_one_stands_in_has_its_name(run, monkeypatch):
    monkeypatch.chdir(run)
    folder = average(Path(), 2)
    assert folder == run.parent / "run-average2" and not [*run.glob("*average*")]
    of = json.loads((folder / "status.json").read_text())["of"]
    assert all(name.startswith("run/step-") for name in of)
    assert SavedRun(Path()).name == "run" == SavedRun(Path("checkpoints") / "..").name


def test_averaging_more_validations_than_exist_is_an_error(run):
    with pytest.raises(RunError, match="has the weights of 3 validations"):
        average(run, 4)


def test_averaging_a_model_that_was_not_trained_here_names_what_is_needed(run):
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(RunError, match="help: name a training run that has files in checkpoints/"):
        average(run, 2)


def test_averaging_weights_of_another_model_is_an_error(run):
    other = weights_of(tfm.build("tiny", **KNOBS | {"layers": 2}))
    write_tensors(step_file(run / "checkpoints", 200), other)
    with pytest.raises(RunError, match=r"step-00000200.safetensors: has other weights"):
        average(run, 2)
