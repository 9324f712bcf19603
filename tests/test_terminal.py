"""Output of commands if stdout is not UTF-8."""

import json
import os
import shutil

import pytest

from tests.conftest import SMALL
from tests.preloaded import run_python_bytes
from tests.run_folders import leave_run
from tests.test_train import ROOT
from tfm_blocks.compose.model import compose_model
from tfm_blocks.runs.model import write_model

NAME = "größe →"  # latin-1 has its letters but not its arrow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write two runs to compare and one to translate with, all with non-ASCII letters."""
    path = tmp_path_factory.mktemp("output")
    for number in (1, 2):
        run = leave_run(path / "runs" / f"{NAME} {number}", ["Haus"], ["Haus"], seed=number)
        write_model(run, compose_model("tiny").model, [])
    shutil.copytree(ROOT / "tests" / "runs" / "format_1", path / "run")
    (path / "begin.txt").write_text("für →\n", "utf-8")
    (path / "lines.txt").write_text("zwei Kinder\n", "utf-8")
    return path


def printed(folder, encoding, *arguments, program=("-m", "tfm_blocks"), lines="Haus\n"):
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "0"}
    done = run_python_bytes([*program, *arguments], folder, environment, input=lines.encode())
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr.decode()
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["show", "tiny"],
        ["compare", "runs"],
        ["runs"],
        ["evaluate", "run", "--src", "lines.txt", "--ref", "begin.txt"],
    ],
    ids=" ".join,
)
def test_text_for_people_prints_whatever_the_encoding(folder, arguments):
    text = printed(folder, "ascii", *arguments).decode("ascii")
    assert len(text) > 50


def test_letters_that_the_encoding_has_stay_and_the_others_are_escapes(folder):
    assert r"größe \u2192 1" in printed(folder, "latin-1", "runs").decode("latin-1")
    assert r"gr\xf6\xdfe \u2192 1" in printed(folder, "ascii", "runs").decode("ascii")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_translations_are_utf_8_whatever_the_encoding(folder, encoding):
    lines = printed(folder, encoding, "translate", "run", "--prefix", "begin.txt", lines="größe\n").decode("utf-8")
    assert lines.startswith("für →")


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "--json", "runs"],
        ["compare", "--csv", "runs"],
        ["compare", "--markdown", "runs"],
        ["runs", "--json"],
    ],
    ids=" ".join,
)
def test_data_are_utf_8_whatever_the_encoding(folder, arguments):
    text = printed(folder, "ascii", *arguments).decode("utf-8")
    assert f"{NAME} 1" in text
    assert "--json" not in arguments or json.loads(text)


@pytest.mark.grid
def test_blocks_the_schema_and_a_dashboard_are_utf_8(folder):
    markdown = printed(folder, "ascii", "blocks", "--markdown").decode("utf-8")
    assert markdown == (ROOT / "docs" / "blocks.md").read_text("utf-8")
    schema = printed(folder, "ascii", "schema").decode("utf-8")
    assert schema == (ROOT / "conf" / "model.schema.json").read_text("utf-8")
    assert NAME in printed(folder, "ascii", "dashboard", "sweep", "tiny", "heads=2,4", "--project", NAME).decode(
        "utf-8"
    )


@pytest.mark.slow
def test_trainings_and_sweeps_print_whatever_the_encoding(tmp_path):
    """The samples have dates such as "sábado, 3 de marzo"; rank 0 of the first run is a spawned process."""
    (tmp_path / "wörk").mkdir()
    own = [*SMALL, *(f"~data.patterns.{one}" for one in ("en", "de", "fr"))]
    for arguments in (["name=one", "trainer.devices=2"], ["-m", "seed=1,2", "sweep.name=two"]):
        said = printed(tmp_path / "wörk", "ascii", *own, *arguments, program=(str(ROOT / "train.py"),)).decode("ascii")
        assert r"\x" in said or r"\u" in said
