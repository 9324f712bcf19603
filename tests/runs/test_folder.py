"""Errors for run folders that cannot be used yet."""

import json
from pathlib import Path

import pytest
import torch

import tfm_blocks as tfm
from tests.runs.test_model import KNOBS
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import RunError
from tfm_blocks.network.matching import weights_of
from tfm_blocks.runs.files import read_json, write_json
from tfm_blocks.runs.folder import expect_folder, step_file
from tfm_blocks.runs.lock import hold
from tfm_blocks.runs.model import read_network, write_model, write_tensors


@pytest.fixture
def unfinished(tmp_path):
    """Return a function that writes an unfinished run folder in a given state."""

    def write(status, kept):
        folder = tmp_path / "run"
        (folder / "checkpoints").mkdir(parents=True)
        write_model(folder, compose_model("tiny", [f"{name}={value}" for name, value in KNOBS.items()]).model, [])
        (folder / "tokenizer.json").write_text("{}")
        if status:
            (folder / "status.json").write_text(json.dumps(status))
        for step in kept:
            write_tensors(step_file(folder / "checkpoints", step), weights_of(tfm.build("tiny", **KNOBS)))
        return folder

    return write


@pytest.mark.parametrize(
    ("status", "kept", "messages"),
    [
        ({"state": "stopped", "reason": "SIGINT"}, [1000, 1425], ["was stopped early (SIGINT)", "tfm translate RUN --checkpoint last", "after step 1,425"]),
        ({"state": "stopped", "reason": "SIGTERM", "resume": "GO ON"}, [], ["was stopped early (SIGTERM)", "help: GO ON resumes it"]),
        ({"state": "preempted", "resume": "GO ON 'plugins=[a]'"}, [], ["can be resumed", "help: GO ON 'plugins=[a]' resumes it"]),
        ({"state": "failed", "resume": "GO ON"}, [], ["training failed", "help: GO ON resumes it"]),
        ({"state": "failed", "reason": "OSError: disk full"}, [425], ["training failed (OSError: disk full)", "tfm translate RUN --checkpoint last"]),
        ({"state": "diverged", "reason": "the loss is nan", "resume": "GO ON"}, [425], ["training diverged (the loss is nan)", "help: tfm translate RUN --checkpoint last"]),
        ({"state": "diverged", "resume": "GO ON"}, [], ["training diverged", "train a new run"]),
        ({"state": "running", "resume": "GO ON"}, [], ["training was killed", "help: GO ON resumes it"]),
        ({"state": "running"}, [425], ["training was killed", "help: tfm train resume=RUN resumes it, or: tfm translate RUN --checkpoint last"]),
        ({"state": "done"}, [], ["the training has finished, but the file is lost", "restore it"]),
        ({"state": "new in a later version"}, [], ["the training did not finish", "train a new run"]),
        ({"state": "failed", "reason": "x" * 9000}, [], ["training failed (xxx"]),
        (None, [], ["the training did not finish"]),
    ],
)  # fmt: skip
def test_the_error_of_a_run_without_weights_names_its_state_and_a_fix(unfinished, status, kept, messages):
    folder = unfinished(status, kept)
    with pytest.raises(RunError) as caught:
        tfm.load(folder)
    for text in messages:
        assert text.replace("RUN", str(folder)) in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [["translate"], ["evaluate", "--src", "x", "--ref", "x"], ["attention", "-o", "x.png", "a"]],
    ids=lambda command: command[0],
)
def test_every_command_that_loads_a_run_prints_the_same_error(unfinished, command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("a\n")
    folder = unfinished({"state": "stopped", "reason": "SIGINT"}, [425])
    with pytest.raises(SystemExit) as left:
        main([command[0], str(folder), *command[1:]])
    assert left.value.code == 1
    assert f"tfm translate {folder} --checkpoint last" in capsys.readouterr().err


def test_the_weights_of_a_validation_can_be_loaded_before_the_end(unfinished):
    folder = unfinished({"state": "preempted"}, [3, 12])
    write_tensors(folder / "checkpoints" / "best.safetensors", weights_of(tfm.build("tiny", seed=5, **KNOBS)))
    for which, seed in (("best", 5), ("last", 1), ("12", 1), (12, 1)):
        expected = weights_of(tfm.build("tiny", seed=seed, **KNOBS))
        weights = weights_of(read_network(folder, checkpoint=which))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items()), which
    for missing in ("7", 7):
        with pytest.raises(RunError, match=r"has no weights '7'\n  help: it has 3, 12, last, best"):
            read_network(folder, checkpoint=missing)


def test_a_finished_run_that_trains_longer_names_the_step_of_its_weights(unfinished, capsys):
    folder = unfinished({"state": "running"}, [3])
    write_tensors(folder / "weights.safetensors", weights_of(tfm.build("tiny", **KNOBS)))
    with hold(folder):
        read_network(folder)
    assert (
        "warning" in (stderr := capsys.readouterr().err) and "still running; its weights are from before that" in stderr
    )


@pytest.mark.parametrize("name", ["nowhere", "a" * 5000], ids=["missing", "too long"])
def test_an_impossible_folder_name_is_an_error_and_is_shortened(name):
    with pytest.raises(RunError, match="there is no such run folder") as caught:
        expect_folder(Path(name))
    assert len(str(caught.value)) < 400


def test_bytes_of_the_command_line_that_are_not_utf_8_are_saved(tmp_path):
    """Python decodes such bytes as lone surrogates."""
    said = {"commands": [b"data.dir=/B\xfccher".decode("utf-8", "surrogateescape"), "Bücher"]}
    write_json(tmp_path / "run.json", said)
    assert read_json(tmp_path / "run.json") == said and "Bücher" in (tmp_path / "run.json").read_text("utf-8")


@pytest.mark.parametrize(
    "command",
    ["view SWEEP -o page.html", "show SWEEP", "translate SWEEP", "average SWEEP", "evaluate SWEEP --text text.txt",
     "train resume=SWEEP", "train cooldown=SWEEP@3"],
)  # fmt: skip
def test_the_folder_of_a_sweep_is_not_a_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a\n")
    write_json(tmp_path / "sweep.json", {"jobs": []})
    with pytest.raises(SystemExit):
        main(command.replace("SWEEP", str(tmp_path)).split())
    message = capsys.readouterr().err
    assert f"error: {tmp_path}: is the folder of a sweep, not of a run" in message
    assert f"help: name one of its runs: tfm runs --in {tmp_path} lists them" in message
