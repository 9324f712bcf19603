from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import LEARNING, OBJECTIVES, SMALL, taught
from tests.preloaded import run_python
from tests.training.test_module import feed_of, make
from tfm_blocks.cli.train import _run_training
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import prepare
from tfm_blocks.errors import ConfigError, RunError, TfmError
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.facts import logged_config, reason_of
from tfm_blocks.launch.job import train
from tfm_blocks.metric_schema import columns, find_key
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs.checkpoints import newest_intact, read_checkpoint
from tfm_blocks.runs.folder import step_file, step_files
from tfm_blocks.runs.metrics import read_metric_names, read_rows
from tfm_blocks.training.settings import read_run
from tfm_blocks.translation.translator import Translator

ROOT = Path(__file__).parents[2]
STEADY = ["schedule.peak=1e-3", "schedule.warmup=1", "trainer.validate_sentences=2"]


def run(composed: Composed, folder: Path) -> Path:
    return train(check_run(composed), folder)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "weights.safetensors")


def trained(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """Return a weight without the keys' biases: softmax cancels them, so their gradient is rounding noise, which Adam amplifies."""
    if name.endswith(".qkv.bias"):
        query, _, value = tensors[name].chunk(3)
        return torch.cat([query, value])
    return tensors[name].chunk(2)[1] if name.endswith(".kv.bias") else tensors[name]


def test_a_run_writes_a_folder_that_translates_and_prints_the_next_command(
    small: Callable[..., Composed], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composed = small()
    folder = run(composed, tmp_path)
    assert folder == tmp_path / "run"
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"next: echo 'your text' | tfm translate {folder}"
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["steps"]) == ("done", 6)
    assert set(status["exact_match_by_group"]) == {"en", "de", "fr", "es", "it"}
    assert 0 < status["scores"]["test/loss"] < 10
    bleu = status["translation"][0]
    assert bleu["value"] == pytest.approx(status["scores"]["test/bleu"]) and "tok:13a" in bleu["signature"]
    assert any(line.startswith("TER: ") and "version" in line for line in said)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    translator = Translator.load(folder)
    assert config["vocab"] == translator.tokenizer.size <= 300
    assert len(translator.translate(["3 March 1987", "am 3. Mai 1987"])) == 2
    choices = json.loads((folder / "run.json").read_text())["choices"]
    assert (choices["model"], choices["data"], choices["schedule"]) == ("tiny", "dates", "inverse_sqrt")


def test_a_run_logs_what_the_contract_says_and_nothing_else(small: Callable[..., Composed], tmp_path: Path) -> None:
    """Use a block that adds a loss, and a corpus in groups."""
    experts = "++model.graph.decoder.layer.ffn={block: moe, experts: 2, d_ff: 8, balance: 1.0}"
    run(small(experts, "trainer.test_beam=1"), tmp_path)
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    expected = columns(["decoder.0.ffn"], ["en", "de", "fr", "es", "it"])
    assert read_metric_names(tmp_path / "run" / "metrics.csv") == ["step", *expected]
    blank = {name for name in expected if not any(name in row for row in rows)}
    assert not blank - {f"val/exact_match/{group}" for group in ("en", "de", "fr", "es", "it")}  # four are translated
    for name in expected:
        values = [row[name] for row in rows if name in row]
        assert all(0 <= value <= 1 for value in values) or not find_key(name).unit.endswith("0 to 1")
    with pytest.raises(KeyError):
        find_key("train/unheard")


@pytest.mark.grid
def test_the_last_step_is_validated_and_the_best_weights_are_kept(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    run(small(), tmp_path)
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    validated = {int(row["step"]): row["val/loss"] for row in rows if "val/loss" in row}
    assert sorted(validated) == [4, 6]
    best = step_file(tmp_path / "run" / "checkpoints", min(validated, key=lambda step: validated[step]))
    for name, tensor in weights(tmp_path / "run").items():
        assert torch.equal(load_file(best)[name], tensor)


@pytest.mark.grid
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    for overrides in (["dropout=0.2"], ["dropout=0.2"], ["dropout=0.2", "seed=2"]):
        run(small(*overrides), tmp_path)
    first, again, other = (weights(tmp_path / name) for name in ("run", "run-2", "run-3"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(
        torch.equal(first[name], other[name]) for name in first if name.endswith("weight") and "norm" not in name
    )


CAP = 1000  # tokens of a micro-batch, enough for a whole step
GRID = [(1, CAP, {1}), (1, CAP // 4, {3, 4}), (2, CAP // 2, {1}), (2, CAP // 4, {2})]


def micro_batches(composed: Composed, devices: int) -> set[int]:
    """Return the numbers of micro-batches that a rank reads in a step."""
    plan = feed_of(make(composed)[1]).plan(seed=1, epoch=0)
    return {len(step.share(Ranks(rank, devices))) for step in islice(plan, 6) for rank in range(devices)}


@pytest.mark.parametrize(
    "grid",
    [
        pytest.param([*GRID[:2], GRID[3]], marks=pytest.mark.grid),
        pytest.param([*GRID, *GRID], marks=pytest.mark.slow),
    ],
)
def test_devices_and_the_cap_on_a_batch_do_not_change_the_weights(
    small: Callable[..., Composed], tmp_path: Path, grid: list[tuple[int, int, set[int]]]
) -> None:
    """Equal settings give equal bits: the slow grid has each setting twice."""
    for devices, cap, parts in grid:
        composed = small("data.max_length=50", *STEADY, f"trainer.devices={devices}", f"data.batch_tokens={cap}")
        assert micro_batches(composed, devices) == parts
        run(composed, tmp_path)
    folders = [tmp_path / (f"run-{number}" if number > 1 else "run") for number in range(1, len(grid) + 1)]
    first, *others = map(weights, folders)
    for other in others:
        for name in first:
            torch.testing.assert_close(trained(name, other), trained(name, first), rtol=0, atol=1e-6)
    for one, again in zip(folders, folders[len(GRID) :], strict=False):
        assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(one).items())
    logged = [read_rows(folder / "metrics.csv") for folder in (folders[0], folders[2])]
    for one, other in zip(*logged, strict=True):
        values = [[row.get(name, 0) for name in ("step", "train/loss", "val/loss")] for row in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("options", LEARNING.values(), ids=LEARNING)
def test_two_processes_change_the_weights_with_each_optimizer_as_one_does(
    small: Callable[..., Composed], tmp_path: Path, options: list[str]
) -> None:
    settings = ["data.max_length=50", *STEADY, "trainer.precision=fp32", f"data.batch_tokens={CAP // 4}", *options]
    run(small(*settings), tmp_path)
    one = weights(tmp_path / "run")
    for number, strategy in enumerate(("ddp", "fsdp2"), 2):
        composed = small(*settings, "trainer.devices=2", f"trainer.strategy={strategy}")
        if strategy == "fsdp2" and "optimizer=adafactor" in options:
            with pytest.raises(ConfigError, match="adafactor cannot divide its state among processes"):
                run(composed, tmp_path)
            continue
        run(composed, tmp_path)
        other = weights(tmp_path / f"run-{number}")
        for name in one:
            torch.testing.assert_close(trained(name, other), trained(name, one), rtol=0, atol=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_devices_and_the_cap_do_not_change_the_weights_of_each_objective(
    small: Callable[..., Composed], tmp_path: Path, objective: list[str]
) -> None:
    objective = taught(small, tmp_path, objective)
    for devices, cap in ((1, CAP), (1, CAP // 4), (2, CAP // 4)):
        caps = f"trainer.devices={devices}", f"data.batch_tokens={cap}"
        run(small("data.max_length=50", *STEADY, "trainer.precision=fp32", *objective, *caps), tmp_path)
    first, *others = (weights(tmp_path / name) for name in ("run", "run-2", "run-3"))
    for other in others:
        for name in first:
            torch.testing.assert_close(trained(name, other), trained(name, first), rtol=0, atol=1e-5)


SCALARS = [
    "model=rezero",
    "++model.graph.decoder.layer.cross.kv={block: weighted_sum, in: encoder.*}",
    "++model.graph.norm={block: scalenorm, before: logits}",  # in the head, of which each chunk of positions is a pass
]


@pytest.mark.grid
@pytest.mark.parametrize(
    "options",
    [
        ["trainer.precision=fp32"],
        pytest.param(["trainer.precision=bf16"], marks=pytest.mark.slow),
        pytest.param(SCALARS, marks=pytest.mark.grid, id="scalar parameters"),
    ],
)
def test_fsdp2_gives_the_weights_and_checkpoints_of_ddp(
    small: Callable[..., Composed], tmp_path: Path, options: list[str]
) -> None:
    for strategy in ("ddp", "fsdp2"):
        overrides = ["trainer.devices=2", "trainer.clip=0.5", "data.batch_tokens=300", *STEADY]
        run(small(f"trainer.strategy={strategy}", *overrides, *options), tmp_path)
    one, other = (weights(tmp_path / name) for name in ("run", "run-2"))
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(trained(name, other), trained(name, one), rtol=0, atol=1e-6)
    states = [read_checkpoint(tmp_path / name / "checkpoints" / "step-00000006.ckpt") for name in ("run", "run-2")]
    assert states[0].keys() == states[1].keys()
    for part in ("state_dict", "optimizer_states"):
        (kept, structure), (shared, other_structure) = (
            torch.utils._pytree.tree_flatten(state[part]) for state in states
        )
        assert structure == other_structure and [getattr(leaf, "shape", ()) for leaf in kept] == [
            getattr(leaf, "shape", ()) for leaf in shared
        ]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_divergence_ends_with_status_3_and_is_recorded(
    small: Callable[..., Composed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    """With two devices, only the second has a non-finite loss."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    load_plugins(["faulty"])
    fault = "++model.graph.bad={block: faulty, harm: poison, sound: 0, steps: 2-5-6-, after: src_pos}"
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(TfmError, match="diverged after 4 steps") as caught:
        run(
            small("plugins=[faulty]", fault, "trainer.patience_nan=2", f"trainer.devices={devices}", "logger=wandb"),
            tmp_path,
        )
    assert caught.value.exit_status == 3
    folder = tmp_path / "run"
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "diverged"
    assert "not finite" in status["reason"]
    assert not (folder / "weights.safetensors").exists()
    assert load_file(folder / "checkpoints" / "best.safetensors").keys()
    skipped = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
    assert {line["step"] for line in skipped} == {2, 5, 6}
    assert wandb_exit_code(folder) == 3
    (alert,) = [one["alert"] for part in records(folder) for one in part if one["type"] == "alert"]
    assert alert["level"] == "ERROR" and alert["title"] == "run diverged" and "not finite" in alert["text"]


def records(run: Path) -> list[list[dict[str, Any]]]:
    """Return the records of each part of an offline W&B run, read by W&B."""
    parts = []
    for part in sorted((run / "wandb").glob("offline-run-*")):
        done = run_python(["-m", "wandb", "leet", "inspect", "--json", part])
        done.check_returncode()
        parts.append([json.loads(line) for line in done.stdout.splitlines()])
    return parts


def wandb_exit_code(folder: Path) -> int:
    """Return the exit code of the last part of an offline run: W&B shows 0 as finished and others as failed."""
    return int(wandb_summary(folder)["exit_code"])


def wandb_summary(folder: Path) -> dict[str, Any]:
    """Return the last part of an offline run, read by W&B."""
    part = max((folder / "wandb").glob("offline-run-*"))
    done = run_python(["-m", "wandb", "leet", "inspect", "--summary", "--json", part])
    assert done.returncode == 0, (done.stderr, [(one.name, one.stat().st_size) for one in part.iterdir()])
    return dict(json.loads(done.stdout))


@pytest.mark.grid
@pytest.mark.parametrize("harm", ["error", "end"])
def test_a_failing_rank_ends_the_other(
    small: Callable[..., Composed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    load_plugins(["faulty"])
    fault = f"++model.graph.bad={{block: faulty, harm: {harm}, sound: 3, after: src_pos}}"
    with pytest.raises(Exception, match="the last rank broke" if harm == "error" else "ended with SIGKILL"):
        run(small("plugins=[faulty]", fault, "trainer.devices=2"), tmp_path)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_a_model_that_reads_other_inputs_is_refused_with_a_reason(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    image = "++model.inputs={img: B P 16, src: B S, tgt: B T}"
    picture = "++model.graph.picture={block: layernorm, in: img, after: encoder}"
    joined = "++model.graph.decoder.layer.look={block: attention, kv: picture, before: ffn}"
    with pytest.raises(ConfigError, match=r"model\.inputs\.img: is an input of vectors, but training reads text"):
        run(small(image, picture, joined), tmp_path)


def test_swept_knobs_are_flat_keys_of_the_logged_config(small: Callable[..., Composed]) -> None:
    config = logged_config(small("heads=4").mapping, "tiny")
    assert (config["heads"], config["layers"]) == (4, 1)
    assert "graph" in config["graph"] and config["model"] == "tiny"


@pytest.mark.parametrize(
    ("devices", "number"), [(1, signal.SIGINT), pytest.param(2, signal.SIGTERM, marks=pytest.mark.grid)]
)
def test_a_signal_ends_the_run_with_status_75_and_the_resume_command(
    tmp_path: Path, devices: int, number: signal.Signals
) -> None:
    command = [
        sys.executable, str(ROOT / "train.py"), "layers=1", "d_model=16", "d_ff=16", "heads=2", "vocab=300",
        "data.train=500", "data.val=10", "data.test=10", "trainer.steps=1000000", "trainer.validate_every=5",
        "trainer.validate_sentences=0", "logger=csv", "trainer.accelerator=cpu", f"trainer.devices={devices}", f"name={tmp_path.name}",
    ]  # fmt: skip
    environment = {**os.environ, "TFM_BLOCKS_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    checkpoint = tmp_path / "runs" / tmp_path.name / "checkpoints" / "latest.json"
    for _ in range(3000):  # a busy machine starts slowly
        if checkpoint.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(timeout=300) == 75
    assert process.stderr is not None
    run = checkpoint.parents[1]
    command = f"python train.py resume=runs/{run.name}"
    assert process.stderr.read() == f"the run was stopped by {number.name}\nresume: {command}\n"
    status = json.loads((run / "status.json").read_text())
    assert status == {"state": "preempted", "reason": f"the run was stopped by {number.name}", "resume": command}
    assert newest_intact(checkpoint.parent) is not None


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_without_a_test_set_a_run_ends_with_scores_of_its_weights_on_the_validation_set(
    small: Callable[..., Composed], tmp_path: Path, capsys: pytest.CaptureFixture[str], devices: int
) -> None:
    search = "trainer.test_beam=3", "trainer.test_alpha=5"
    run(small("data.test=null", "trainer.average=2", *search, f"trainer.devices={devices}"), tmp_path)
    folder = tmp_path / "run"
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["scored_on"]) == ("done", "val")
    assert not any(name.startswith("test/") for name in status["scores"])
    val = prepare(read_run(yaml.safe_load((folder / "config.yaml").read_text())).data, 300).val
    outputs = Translator.load(folder).translate(list(val.text["src"]), beam=3, alpha=5.0)
    chrf = sacrebleu.corpus_chrf(outputs, [list(val.text["tgt"])]).score
    assert status["scores"]["val/chrf"] == pytest.approx(chrf)
    assert {one["name"]: one["value"] for one in status["translation"]}["chrF"] == pytest.approx(chrf)
    assert set(status["exact_match_by_group"]) == {"en", "de", "fr", "es", "it"}
    if devices == 1:
        assert any(line.startswith("val: loss") for line in capsys.readouterr().out.splitlines())
    validated = [row["step"] for row in read_rows(folder / "metrics.csv") if "val/loss" in row]
    assert validated == [4, 6], "the final scores, of another search, are not in the curve"


def test_a_run_prints_its_trained_parameters_without_frozen_groups(
    small: Callable[..., Composed], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = "+optimizer.groups.frozen={where: {node: encoder}, train: false}"
    short = "trainer.steps=1", "trainer.validate_sentences=0", "schedule.warmup=1"
    folder = run(small("optimizer=adamw", group, *short), tmp_path)
    sizes = {name: tensor.numel() for name, tensor in weights(folder).items()}
    trained = sum(size for name, size in sizes.items() if not name.startswith("encoder."))
    assert f"model: {sum(sizes.values()):,} parameters, {trained:,} of them trained" in capsys.readouterr().out


@pytest.mark.grid
def test_own_text_needs_no_test_set(small: Callable[..., Composed], tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / f"{split}.src").write_text("a red house\na blue boat\n" * 20)
        (tmp_path / f"{split}.tgt").write_text("ein rotes Haus\nein blaues Boot\n" * 20)
    files = [f"data.{split}={{src: {split}.src, tgt: {split}.tgt}}" for split in ("train", "val")]
    run(small("data=text", f"data.dir={tmp_path}", *files, "data.test=null", "vocab=280"), tmp_path)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["scored_on"], status["exact_match_by_group"]) == ("val", {})


def test_runs_of_different_seeds_read_the_same_text(small: Callable[..., Composed]) -> None:
    one, two = (prepare(check_run(small(f"seed={seed}")).settings.data, 300) for seed in (1, 2))
    assert list(one.test.text["tgt"]) == list(two.test.text["tgt"])
    for data, other in ((one, two), (two, one)):
        assert not set(data.train.text["tgt"]) & set(other.test.text["tgt"])


@pytest.mark.grid
def test_averaged_weights_are_tested_by_beam_search_and_saved(small: Callable[..., Composed], tmp_path: Path) -> None:
    search = "trainer.test_beam=3", "trainer.test_patient=true", "trainer.test_alpha=5"
    run(small("trainer.average=2", "trainer.validate_every=2", "schedule.peak=1e-2", *search), tmp_path)
    folder = tmp_path / "run"
    last = [load_file(path) for path in step_files(folder / "checkpoints")[-2:]]
    for name, tensor in weights(folder).items():
        torch.testing.assert_close(tensor, (last[0][name] + last[1][name]) / 2, rtol=0, atol=1e-7)
    settings = read_run(yaml.safe_load((folder / "config.yaml").read_text()))
    test = prepare(settings.data, 300).test
    assert test is not None
    outputs = Translator.load(folder).translate(list(test.text["src"]), beam=3, patient=True, alpha=5.0)
    scores = json.loads((folder / "status.json").read_text())["scores"]
    assert scores["test/chrf"] == pytest.approx(sacrebleu.corpus_chrf(outputs, [list(test.text["tgt"])]).score)


class FillDisk(Callback):
    """Make metrics.csv a full device from the first step on."""

    def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
        path = Path(trainer.default_root_dir) / "metrics.csv"
        path.unlink()
        path.symlink_to("/dev/full")


def test_a_full_disk_ends_the_run_with_one_sentence_and_the_state_failed(
    small: Callable[..., Composed], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composed = small()
    assert _run_training(lambda: len(str(train(check_run(composed), tmp_path, callbacks=[FillDisk()])))) == 1
    said = capsys.readouterr().err
    sentence = f"error: {tmp_path}/run/metrics.csv: cannot be used: No space left on device"
    assert sentence in said and "Traceback" not in said
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", "cannot be used: No space left on device")


def test_the_reason_of_a_closed_pipe_is_a_sentence() -> None:
    assert reason_of(BrokenPipeError()) == reason_of(BrokenPipeError(32, "Broken pipe")) == "standard output was closed"


def test_the_final_state_overwrites_status_json_on_a_full_disk(small: Callable[..., Composed], tmp_path: Path) -> None:
    class Block(FillDisk):
        def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
            super().on_train_batch_start(trainer)
            (Path(trainer.default_root_dir) / "status.json.part").mkdir()

    with pytest.raises(RunError):
        train(check_run(small()), tmp_path, callbacks=[Block()])
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_an_unwritable_runs_folder_is_an_error_of_one_sentence(
    small: Callable[..., Composed], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composed = small()
    (tmp_path / "runs").write_text("")
    assert _run_training(lambda: len(str(train(check_run(composed), tmp_path / "runs")))) == 1
    said = capsys.readouterr().err
    assert f"error: {tmp_path}/runs: cannot be used: File exists" in said and "Traceback" not in said


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
MAY_MOUNT = os.system("unshare -m mount --bind /tmp /tmp 2>/dev/null") == 0


@pytest.mark.grid
@pytest.mark.skipif(not MAY_MOUNT, reason="mounts a folder read-only, since permissions do not bind root")
def test_runs_on_a_read_only_file_system_give_one_sentence_and_do_not_change(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    composed, root = small(), tmp_path / "runs"
    run = train(check_run(composed), root)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for words, place in ([f"resume={run}", "trainer.steps=8"], f"{run}/lock.json"), (SMALL, "runs/"):
        command = ["unshare", "-m", "sh", "-c", READ_ONLY, str(root), sys.executable, str(ROOT / "train.py"), *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert f"error: {place}" in done.stderr and "cannot be used: Read-only file system" in done.stderr
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
