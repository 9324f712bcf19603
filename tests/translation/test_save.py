"""A network trained in a custom loop becomes a run folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import yaml

import tfm_blocks as tfm
from tfm_blocks.cli import main
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.launch.init_from import load_matching_weights
from tfm_blocks.launch.run_spec import read_saved_run
from tfm_blocks.network.matching import weights_of
from tfm_blocks.runs.files import read_json
from tfm_blocks.translation.translator import Translator

SENTENCES = ["zwei Kinder spielen davor", "ein kleines Haus steht am Fluss", ""]


def test_a_saved_network_translates_as_before_in_python_and_on_the_command_line(
    translator: Translator, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tfm.save(translator.network, tmp_path / "runs" / "mine", tokenizer=translator.tokenizer)
    loaded = tfm.load(folder)
    own, restored = weights_of(translator.network), weights_of(loaded.network)
    assert own.keys() == restored.keys() and all(torch.equal(own[name], restored[name]) for name in own)
    expected = translator.translate(SENTENCES)
    assert loaded.translate(SENTENCES) == expected and expected[0]
    for name, lines in (("src", SENTENCES[:2]), ("ref", expected[:2])):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(sys, "stdin", (tmp_path / "src").open())
    main(["translate", str(folder)])
    assert capsys.readouterr().out.splitlines() == expected[:2]
    main(["evaluate", str(folder), "--src", str(tmp_path / "src"), "--ref", str(tmp_path / "ref")])
    assert "│ BLEU │ 100.00 │" in " ".join(capsys.readouterr().out.split())
    monkeypatch.chdir(tmp_path)
    main(["runs"])
    assert "saved" in capsys.readouterr().out


def test_a_saved_folder_records_only_known_facts(translator: Translator, tmp_path: Path) -> None:
    folder = tfm.save(translator.network, tmp_path / "mine", tokenizer=translator.tokenizer)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml", "model.json", "status.json", "tokenizer.json", "weights.safetensors",
    ]  # fmt: skip
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config.keys() == {"name", "vocab", "plugins", "model"} and config["vocab"] == translator.tokenizer.size
    assert config["model"] == read_json(folder / "model.json")["model"]
    assert read_json(folder / "status.json")["state"] == "saved"
    with pytest.raises(RunError, match=r"run.json"):
        read_saved_run(folder)


def test_another_run_starts_with_the_weights_of_a_saved_network(translator: Translator, tmp_path: Path) -> None:
    folder = tfm.save(translator.network, tmp_path / "mine", tokenizer=translator.tokenizer)
    network = tfm.build("tiny", layers=2, d_model=32, d_ff=64, vocab=translator.tokenizer.size, seed=9)
    start = load_matching_weights(network, translator.tokenizer, folder)
    assert not start.new and not start.unused
    assert all(torch.equal(one, weights_of(network)[name]) for name, one in weights_of(translator.network).items())


def test_a_model_that_could_not_be_loaded_again_is_refused_before_writing(
    translator: Translator, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer: has 26\d subwords, but the model has a vocabulary of"):
        tfm.save(translator.network, tmp_path / "other", tokenizer=Tokenizer.train(["ein Haus"] * 3, 300))
    broken = tfm.build("tiny", layers=1, d_model=32, d_ff=64, vocab=translator.tokenizer.size)
    with torch.no_grad():
        next(broken.parameters())[0, 0] = float("nan")
    with pytest.raises(RunError, match="does not hold finite numbers"):
        tfm.save(broken, tmp_path / "broken", tokenizer=translator.tokenizer)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_left_as_it_is(translator: Translator, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "weights.safetensors").write_text("precious")
    with pytest.raises(RunError, match="mine: exists already, and nothing is overwritten\n  help: choose another name"):
        tfm.save(translator.network, tmp_path / "mine", tokenizer=translator.tokenizer)
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["precious"]
