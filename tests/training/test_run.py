from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sacrebleu
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.prepare import prepare
from tfm_blocks.errors import ConfigError, TfmError
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs.average import step_files
from tfm_blocks.training.check import checked
from tfm_blocks.training.run import train, wandb_config
from tfm_blocks.training.settings import read_run
from tfm_blocks.translation.translator import Translator

ROOT = Path(__file__).parents[2]
STEADY = ["schedule.peak=1e-3", "schedule.warmup=1", "trainer.validate_sentences=2"]


def run(composed: Composed, folder: Path) -> int:
    return train(composed, checked(composed), folder)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "weights.safetensors")


def trained(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """Without keys' biases: softmax cancels them, so their gradient is rounding noise, which Adam enlarges."""
    if name.endswith(".qkv.bias"):
        query, _, value = tensors[name].chunk(3)
        return torch.cat([query, value])
    return tensors[name].chunk(2)[1] if name.endswith(".kv.bias") else tensors[name]


def test_a_run_leaves_a_folder_that_translates_and_says_what_to_type_next(
    small: Callable[..., Composed], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composed = small()
    assert run(composed, tmp_path) == 0
    folder = tmp_path / "run"
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


def test_the_last_step_is_validated_and_the_best_weights_are_kept(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    run(small(), tmp_path)
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    validated = {int(row["step"]): float(row["val/loss"]) for row in rows if row["val/loss"]}
    assert sorted(validated) == [4, 6]
    best = torch.load(tmp_path / "run" / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["global_step"] == min(validated, key=lambda step: validated[step])
    for name, tensor in weights(tmp_path / "run").items():
        assert torch.equal(best["state_dict"][f"network.{name}"], tensor)


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


def test_devices_and_the_cap_on_a_batch_do_not_change_the_weights(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    for overrides in (
        [],
        ["data.batch_tokens=150"],
        ["trainer.devices=2", "data.batch_tokens=150"],
    ):
        run(small("data.max_length=50", *STEADY, *overrides), tmp_path)
    first, *others = (weights(tmp_path / name) for name in ("run", "run-2", "run-3"))
    for other in others:
        for name in first:
            torch.testing.assert_close(trained(name, other), trained(name, first), rtol=0, atol=1e-6)
    logged = []
    for name in ("run", "run-3"):
        with (tmp_path / name / "metrics.csv").open(newline="") as file:
            logged.append([(row["step"], row["train/loss"], row["val/loss"]) for row in csv.DictReader(file)])
    assert [row[0] for row in logged[0]] == [row[0] for row in logged[1]]
    for one, other in zip(*logged, strict=True):
        assert [float(value or 0) for value in one] == pytest.approx([float(value or 0) for value in other], abs=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_divergence_ends_with_status_3_and_is_written_down(
    small: Callable[..., Composed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    load_plugins(["faulty"])
    fault = "++model.graph.bad={block: faulty, harm: poison, sound: 3, after: src_pos}"
    with pytest.raises(TfmError, match="diverged after 3 steps") as caught:
        run(small("plugins=[faulty]", fault, f"trainer.devices={devices}"), tmp_path)
    assert caught.value.exit_status == 3
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "diverged"
    assert not (tmp_path / "run" / "weights.safetensors").exists()


@pytest.mark.parametrize("harm", ["error", "end"])
def test_a_rank_that_breaks_does_not_leave_the_other_waiting(
    small: Callable[..., Composed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    load_plugins(["faulty"])
    fault = f"++model.graph.bad={{block: faulty, harm: {harm}, sound: 3, after: src_pos}}"
    begun = time.perf_counter()
    with pytest.raises(Exception, match="the last rank broke" if harm == "error" else "ended with SIGKILL"):
        run(small("plugins=[faulty]", fault, "trainer.devices=2"), tmp_path)
    assert time.perf_counter() - begun < 60
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_a_wrong_setting_is_told_with_its_file_and_line_before_anything_is_written(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    composed = small()
    composed.mapping["optimizer"]["eps"] = -1.0
    composed.sources.add_file(
        "conf/optimizer/adam.yaml", (CONF / "optimizer" / "adam.yaml").read_text(), ("optimizer",)
    )
    with pytest.raises(ConfigError, match=r"optimizer.eps: must be at least 0(?s:.*)adam.yaml:4"):
        run(composed, tmp_path)
    assert not list(tmp_path.glob("run*"))


def test_a_model_that_reads_other_inputs_is_refused_with_a_reason(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    image = "++model.inputs={img: B P 16, src: B S, tgt: B T}"
    picture = "++model.graph.picture={block: layernorm, in: img, after: encoder}"
    joined = "++model.graph.decoder.layer.look={block: attention, kv: picture, before: ffn}"
    with pytest.raises(ConfigError, match="inputs must be src and tgt, but are"):
        run(small(image, picture, joined), tmp_path)


def test_swept_knobs_are_flat_and_the_graph_does_not_take_the_name_model(small: Callable[..., Composed]) -> None:
    config = wandb_config(small("heads=4").mapping)
    assert (config["heads"], config["layers"]) == (4, 1)
    assert "graph" in config["graph"] and "model" not in config


@pytest.mark.parametrize(("devices", "number"), [(1, signal.SIGTERM), (2, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_run_that_is_told_to_end_ends_and_says_so(tmp_path: Path, devices: int, number: signal.Signals) -> None:
    command = [
        sys.executable, str(ROOT / "train.py"), "layers=1", "d_model=16", "d_ff=16", "heads=2", "vocab=300",
        "data.train=500", "data.val=10", "data.test=10", "trainer.steps=1000000", "trainer.validate_every=5",
        "trainer.validate_sentences=0", "logger=csv", "trainer.accelerator=cpu", f"trainer.devices={devices}", f"name={tmp_path.name}",
    ]  # fmt: skip
    environment = {**os.environ, "TFM_BLOCKS_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment)
    checkpoint = tmp_path / "runs" / tmp_path.name / "checkpoints" / "last.ckpt"
    for _ in range(600):
        if checkpoint.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(timeout=40) == 128 + number
    status = json.loads((checkpoint.parents[1] / "status.json").read_text())
    assert status == {"state": "stopped", "reason": number.name}


def test_with_wandb_each_validation_pictures_the_attention_of_the_same_two_sentences(
    small: Callable[..., Composed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(small("logger=wandb", "data.val=200"), tmp_path)  # validates after steps 4 and 6
    for sentence in (1, 2):
        paths = list((tmp_path / "run" / "wandb").rglob(f"images/attention/{sentence}_*.png"))
        assert len(paths) == 2 and len({Image.open(path).size for path in paths}) == 1
    assert "sizes do not match" not in caplog.text  # what W&B says where it would show pictures wrongly


def test_the_mean_of_the_last_weights_can_be_tested_by_beam_search_and_left_in_the_folder(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    search = "trainer.test_beam=3", "trainer.test_alpha=5"
    run(small("trainer.average=2", "trainer.validate_every=2", "schedule.peak=1e-2", *search), tmp_path)
    folder = tmp_path / "run"
    last = [load_file(path) for path in step_files(folder / "checkpoints")[-2:]]
    for name, tensor in weights(folder).items():
        torch.testing.assert_close(tensor, (last[0][name] + last[1][name]) / 2, rtol=0, atol=1e-7)
    settings = read_run(yaml.safe_load((folder / "config.yaml").read_text()))
    test = prepare(settings.data, 300, settings.seed).test
    outputs = Translator.load(folder).translate(list(test.sources), beam=3, alpha=5.0)
    scores = json.loads((folder / "status.json").read_text())["scores"]
    assert scores["test/chrf"] == pytest.approx(sacrebleu.corpus_chrf(outputs, [list(test.references)]).score)
