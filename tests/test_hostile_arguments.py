"""Arguments with control characters or with bytes that are not UTF-8: each command prints one sentence."""

import sys
from pathlib import Path

import pytest

from tests.conftest import save
from tfm_blocks.cli import main
from tfm_blocks.errors import printable

BYTES = "a\udcff"  # Python's form of the bytes a\xff
ESCAPE = "a\x1b[31m\r\u202eb"


@pytest.fixture
def folder(translator, tmp_path, monkeypatch):
    """Change to a working folder with the runs `run` and BYTES."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tfm"])  # Hydra's options change it
    save(translator, tmp_path / "run")
    save(translator, tmp_path / BYTES)
    return tmp_path


def refused(words, status, capsys):
    """Return the message of a command that exits with `status`."""
    with pytest.raises(SystemExit) as left:
        main(words)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert left.value.code == status and text == printable(text)
    assert text.count("error:") == 1
    return text


@pytest.mark.parametrize(
    "words",
    [
        ["attention", "run", BYTES, "-o", "x.html"],
        ["attention", "run", "Haus", "--target", BYTES, "-o", "x.html"],
        ["report", "run", "--sentence", BYTES, "-o", "x.html"],
    ],
)
def test_text_that_is_not_utf8_is_refused(words, folder, capsys):
    assert r"must be UTF-8 text, but is 'a\udcff'" in refused(words, 2, capsys)


@pytest.mark.parametrize("text", [BYTES, "\ud800"])
def test_python_refuses_text_with_a_lone_surrogate(text, translator):
    with pytest.raises(ValueError, match="the texts of sentence 2 must be valid Unicode, but number 1 is"):
        translator.translate(["Haus", text])


@pytest.mark.parametrize(
    "words",
    [
        ["translate", BYTES],
        ["eject", BYTES, "-o", "model.py", "--weights", "model.pt"],
        ["export", BYTES, "--to", "huggingface", "-o", "new"],
        ["export", "run", "--to", "onnx", "-o", f"{BYTES}new"],
        ["export", "run", "--to", "ctranslate2", "-o", f"{BYTES}new"],
        ["train", f"resume={BYTES}"],
    ],
)
def test_a_path_that_libraries_cannot_open_is_refused(words, folder, capsys):
    assert "is not a path in UTF-8" in refused(words, 1, capsys)
    assert not Path(f"{BYTES}new").exists()


@pytest.mark.parametrize(
    "words",
    [["runs", f"--{ESCAPE}"], ["check", f"{ESCAPE}=1"], ["train", "--cfg", ESCAPE], ["train", "--info", ESCAPE]],
)
def test_options_and_values_are_printed_without_control_characters(words, folder, capsys):
    assert r"a\x1b[31m\r\u202eb" in refused(words, 2, capsys)


def test_errors_of_hydra_are_printed_without_control_characters(folder, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--cfg", "job", "--package", ESCAPE])
    assert capsys.readouterr().err == f"package '{printable(ESCAPE)}' not found in config\n"


@pytest.mark.parametrize("host", [BYTES, ESCAPE, "a..b", "9" * 5000])
def test_a_host_that_is_not_a_name_is_refused(host, folder, capsys):
    assert "--host, --port: cannot be used: " in refused(["serve", "run", "--host", host], 2, capsys)


def test_overrides_may_stand_on_both_sides_of_an_option(folder, capsys):
    main(["train", "heads=2", "--cfg", "job", f"name='{ESCAPE}'"])
    printed = capsys.readouterr()
    assert "heads: 2" in printed.out and printed.out == printable(printed.out)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["a b", "it's", "a,[b]", "a=b", BYTES])
def test_any_folder_can_be_the_config_folder(name, folder, capsys):
    (folder / name / "model").mkdir(parents=True)
    (folder / name / "model" / "mine.yaml").write_text("# @package _global_\ndefaults: [tiny, _self_]\nlayers: 1\n")
    main(["check", "mine", "--config-dir", name])
    main(["train", "model=mine", "--config-dir", name, "--cfg", "job"])
    printed = capsys.readouterr()
    assert "mine: fine" in printed.out and "layers: 1" in printed.out


@pytest.mark.grid
@pytest.mark.parametrize("path", [".", "/dev/full", "missing/model.pt"])
def test_weights_that_cannot_be_written_give_one_sentence(path, folder, capsys):
    assert f"{path}: cannot be written: " in refused(["eject", "run", "-o", "model.py", "--weights", path], 1, capsys)
