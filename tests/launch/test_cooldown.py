"""A decay that branches off the stable part of a run equals the run that had this schedule from its first step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import composed_small
from tests.launch.test_resume import begin, expect_same, go_on, handlers, state  # noqa: F401  handlers: a fixture
from tests.stopping import train_part
from tfm_blocks.cli import main
from tfm_blocks.compose.command_line import compose_arguments
from tfm_blocks.compose.run import read_cooldown
from tfm_blocks.distributed.signals import exit_on_signals
from tfm_blocks.errors import TfmError
from tfm_blocks.exchange.folder import PublishedFile
from tfm_blocks.launch.check import CheckedRun, check_request
from tfm_blocks.launch.job import train
from tfm_blocks.runs.checkpoints import list_checkpoints
from tfm_blocks.runs.saved_run import SavedRun

TRAINED = ["dropout=0.3", "trainer.validate_every=3", "trainer.validate_sentences=2", "trainer.log_every=1"]
CONSTANT = ["schedule=constant", "schedule.warmup=0.25", "trainer.steps=12", "trainer.checkpoint_at=[4,6]", *TRAINED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with the run `constant`, and a run `wsd` whose schedule decays in the last 2 of 8 steps."""
    folder = tmp_path_factory.mktemp("cooldown")
    with pytest.MonkeyPatch.context() as patch:
        small = composed_small(folder, patch)
        wsd = ["schedule=wsd", "schedule.warmup=3", "trainer.steps=8", "schedule.decay=2"]
        for name, overrides in (("constant", CONSTANT), ("wsd", [*TRAINED, *wsd])):
            composed = small(*overrides)
            composed.mapping["name"] = name
            begin(composed, folder)
        yield folder


def branch(parent: Path, step: int, *overrides: str) -> Path:
    """Run `python train.py cooldown=PARENT@STEP …` in this process."""
    exit_on_signals()
    run, point = checked_branch(parent, step, *overrides)
    return train(run, parent.parent, branch=point)


def checked_branch(parent: Path, step: int, *overrides: str) -> tuple[CheckedRun, Any]:
    """Return the run that `python train.py cooldown=PARENT@STEP …` requests, and its parent and step."""
    return check_request(compose_arguments([f"cooldown={parent}@{step}", *overrides]))


@pytest.mark.grid
def test_a_branch_keeps_the_record_of_an_imported_model(folder: Path) -> None:
    shutil.copytree(folder / "constant", folder / "imported")
    PublishedFile("gpt2", {"config.json": "{}"}).write(folder / "imported")
    run = branch(folder / "imported", 6, "schedule.decay=2")
    assert PublishedFile.read_or_empty(run).texts == {"config.json": "{}"}


@pytest.mark.grid
def test_a_branch_equals_the_run_with_its_schedule_from_the_first_step(folder: Path) -> None:
    before = (folder / "constant" / "weights.safetensors").read_bytes()
    run = branch(folder / "constant", 6, "schedule.decay=2")
    assert run == folder / "constant-cooldown6"
    expect_same(run, folder / "wsd")
    configs = [yaml.safe_load((one / "config.yaml").read_text()) for one in (run, folder / "wsd")]
    assert configs[0] == configs[1] | {"name": run.name}
    assert (folder / "constant" / "weights.safetensors").read_bytes() == before
    fraction = branch(folder / "constant", 6, "schedule.decay=0.25", "name=fraction")  # 2 of 8 steps
    expect_same(fraction, folder / "wsd")


@pytest.mark.grid
def test_a_killed_branch_resumes_to_the_same_weights(folder: Path) -> None:
    """Without its newest checkpoint, the run goes back to a step whose rows and weights exist already, as after SIGKILL."""
    checked, point = checked_branch(folder / "constant", 6, "schedule.decay=2", "name=killed")
    train_part(7, checked, folder, branch=point)
    run = folder / "killed"
    newest, older = list_checkpoints(run / "checkpoints")
    assert (newest.step, older.step) == (7, 6)
    (run / "checkpoints" / newest.file).write_bytes(b"part")
    go_on(run)
    assert state(run) == "done"
    expect_same(run, folder / "wsd")


@pytest.mark.grid
def test_a_restarted_branch_needs_no_checkpoint_of_its_parent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = folder / "pruned"
    shutil.copytree(folder / "constant", parent)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    checked, point = checked_branch(parent, 6, "schedule.decay=2", "name=restarted")
    train_part(7, checked, folder, branch=point)
    shutil.rmtree(parent / "checkpoints")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    expect_same(branch(parent, 6, "schedule.decay=2", "name=restarted"), folder / "wsd")


@pytest.mark.grid
def test_a_branch_off_a_run_with_wsd_may_decay_later_or_to_another_floor(folder: Path) -> None:
    run = branch(folder / "wsd", 6, "schedule.floor=0.5", "schedule.shape=linear", "name=floor")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["schedule"]["decay"] == 2 and config["trainer"]["steps"] == 8
    rates = [row["train/lr"] for row in _rows(run)]
    peak = config["schedule"]["peak"]
    assert rates[-3:] == pytest.approx([peak, peak * (0.5 + 0.5 * 2 / 3), peak * (0.5 + 0.5 / 3)])


def _rows(run: Path) -> list[dict[str, float]]:
    from tfm_blocks.runs.metrics import read_rows

    return [row for row in read_rows(run / "metrics.csv") if "train/lr" in row]


@pytest.mark.grid
def test_a_branch_knows_its_parent(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = branch(folder / "constant", 4, "schedule.decay=1", "name=known")
    parent = f"{folder / 'constant'}@4"
    assert json.loads((run / "run.json").read_text())["parent"] == parent
    assert SavedRun(run).choices["schedule"] == "wsd"
    capsys.readouterr()
    main(["show", str(run)])
    assert f"branched off {parent}" in capsys.readouterr().out
    main(["compare", str(run), str(folder / "wsd"), "--markdown"])
    assert "branched off" in (table := capsys.readouterr().out) and parent in table


def test_checkpoints_of_chosen_steps_are_kept(folder: Path) -> None:
    steps = [checkpoint.step for checkpoint in list_checkpoints(folder / "constant" / "checkpoints")]
    assert steps == [12, 9, 6, 4]


@pytest.mark.parametrize(
    ("run", "step", "overrides", "message"),
    [
        ("constant", 5, [], "has no checkpoint after step 5, but after 4, 6, 9, 12"),
        ("wsd", 8, [], "begins after the warm-up, at step 3 and ends at step 6, but the step is 8"),
        ("constant", 6, ["trainer.steps=9"], "trainer.steps: cannot be set: a cooldown ends after"),
        ("constant", 6, ["d_model=32"], "d_model: a cooldown keeps its original value: d_model=32"),
        ("constant", 6, ["data.train=9"], "data.train: a cooldown keeps its original value: data.train=9"),
        (
            "constant",
            6,
            ["schedule.decay=0"],
            "schedule.decay: must be steps, a fraction of the run, or tokens, but is 0",
        ),
        (
            "constant",
            6,
            ["schedule.shape=square"],
            "schedule.shape: must be one of linear, cosine, 1-sqrt, exponential",
        ),
        ("constant", 6, ["name=a/b"], "name: must be a folder's name"),
        ("constant", 6, ["resume=runs/a"], "cooldown: starts a new run, and resume= continues another one"),
        ("none", 6, [], "there is no such run folder"),
    ],
)
def test_a_wrong_branch_is_an_error_and_nothing_starts(
    folder: Path, run: str, step: int, overrides: list[str], message: str
) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(TfmError) as caught:
        branch(folder / run, step, *overrides)
    assert message in str(caught.value)
    assert sorted(folder.iterdir()) == before


@pytest.mark.grid
def test_a_branch_with_fewer_validations_may_average_fewer(folder: Path) -> None:
    """The branch off step 4 ends after step 6, so it has two of the four validations of its parent."""
    config = folder / "averaged" / "config.yaml"
    shutil.copytree(folder / "constant", config.parent)
    content = yaml.safe_load(config.read_text())
    content["trainer"] |= {"average": 4, "keep_last": 4}
    config.write_text(yaml.safe_dump(content, sort_keys=False))
    command = [f"cooldown={config.parent}@4", "schedule.decay=2"]
    with pytest.raises(TfmError, match=r"write trainer\.average=2"):
        check_request(compose_arguments(command))
    assert check_request(compose_arguments([*command, "trainer.average=2"]))[0].settings.trainer.average == 2


@pytest.mark.grid
def test_a_schedule_without_a_stable_part_and_changed_text_are_errors(folder: Path) -> None:
    for name in ("noam", "text"):
        shutil.copytree(folder / "constant", folder / name)
    config = folder / "noam" / "config.yaml"
    content = yaml.safe_load(config.read_text())
    config.write_text(
        yaml.safe_dump(content | {"schedule": {"name": "noam", "d_model": 16, "warmup": 3, "scale": 0.1}})
    )
    with pytest.raises(TfmError, match="has schedule=noam, which has no stable part"):
        branch(folder / "noam", 6)
    record = folder / "text" / "run.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {"text": content["text"] | {"training text": "other"}}))
    before = sorted(folder.iterdir())
    with pytest.raises(TfmError, match="the training text changed since the run began"):
        branch(folder / "text", 6)
    assert sorted(folder.iterdir()) == before


def test_a_damaged_checkpoint_leaves_no_folder(folder: Path) -> None:
    shutil.copytree(folder / "constant", folder / "damaged")
    file = folder / "damaged" / "checkpoints" / list_checkpoints(folder / "damaged" / "checkpoints")[-1].file
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    before = sorted(folder.iterdir())
    with pytest.raises(TfmError, match=r"is damaged: (.|\n)*choose another step: 6, 9, 12"):
        branch(folder / "damaged", 4)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("text", ["runs/a", "runs/a@", "@5", "runs/a@x", "5"])
def test_cooldown_must_be_a_run_and_a_step(text: str) -> None:
    config = compose_arguments([f"cooldown='{text}'"])
    with pytest.raises(TfmError, match="cooldown: must be a run folder and a step, but is"):
        read_cooldown(config)
