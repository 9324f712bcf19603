"""A probe task of a plug-in, the class of docs/own-tasks.md, is used as a shipped one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sweep.launchers.conftest import cluster  # noqa: F401  a fixture
from tfm_blocks.cli import main
from tfm_blocks.compose.composition import Composer
from tfm_blocks.compose.folders import config_folders
from tfm_blocks.compose.run import compose_job
from tfm_blocks.data.probe_corpora import probe_corpora
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.check import CheckedRun, check_run
from tfm_blocks.probes.catalogue import TASKS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-tasks.md").read_text("utf-8")
FENCES = dict(re.findall(r"```(python|yaml)\n(.*?)```", PAGE, re.DOTALL))
SIZES = [
    "layers=1",
    "d_model=16",
    "heads=2",
    "data.train=40",
    "data.val=8",
    "data.test=8",
    "logger=csv",
    "schedule.warmup=1",
]
SHORT = ["experiment=probe/lite", *SIZES, "trainer.steps=2", "trainer.validate_every=2", "trainer.accelerator=cpu"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the current folder, which contains the plug-in and its config; its task is removed afterwards."""
    (tmp_path / "majority.py").write_text(FENCES["python"])
    (tmp_path / "my_conf" / "data").mkdir(parents=True)
    (tmp_path / "my_conf" / "data" / "majority.yaml").write_text(FENCES["yaml"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TFM_BLOCKS_CACHE", str(tmp_path / "cache"))
    before = dict(TASKS)
    sys.modules.pop("majority", None)
    yield tmp_path
    TASKS.clear()
    TASKS.update(before)
    sys.modules.pop("majority", None)


def checked(*overrides: str) -> CheckedRun:
    return check_run(compose_job([*SHORT, *overrides], Composer(config_folders(Path("my_conf")))))


def test_a_task_of_a_plug_in_has_its_vocabulary_sizes_settings_and_cache(folder: Path) -> None:
    run = checked("plugins=[majority,math]", "data=majority", "data.letters=5")
    assert run.settings.plugins == ["majority"]
    assert run.spec.sink.shape[-1] == run.composed.mapping["vocab"] == 4 + 6
    data = run.settings.data
    assert data.counts == {"train": 40, "val": 8, "test": 8} and data.lengths["test"] == (16, 24)  # type: ignore[union-attr]
    _, corpora = probe_corpora(data, lambda line: None)  # type: ignore[arg-type]
    for row in corpora["test"].rows(slice(None)):
        letters = row["src"].split()[:-1]
        assert row["tgt"] == min(letters, key=lambda letter: (-letters.count(letter), letter))
    assert corpora["test"].groups == ["16"] * 8 + ["24"] * 8
    assert checked("plugins=[majority]", "data=parity").settings.plugins == []


def test_an_unknown_task_and_an_unknown_size_name_the_fix(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.task: no task is called 'majority'(.|\n)*plugins=\[MODULE\]"):
        checked("data=majority")
    with pytest.raises(ConfigError, match=r"data\.size: the task majority has no size paper(.|\n)*data\.size=lite"):
        checked("plugins=[majority]", "data=majority", "data.size=paper")
    with pytest.raises(ConfigError, match=r"plugins: the module 'minority' cannot be imported"):
        checked("plugins=[minority]", "data=majority")


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("letters: int = 4", "letters: int", r"needs a default for letters"),
        ('"lite": Preset', '"large": Preset', r"needs presets"),
        ('    source: ClassVar = "an example"\n', "", r"needs a docstring and a source"),
        ('@task("majority")', '@task("parity")', r"task 'parity' is already registered by tfm_blocks\.probes\."),
        ('@task("majority")', '@task("my task")', r"needs a name of letters, digits and _"),
    ],
)
def test_an_incomplete_class_is_refused_when_it_is_imported(old: str, new: str, rule: str, folder: Path) -> None:
    assert old in FENCES["python"]
    (folder / "majority.py").write_text(FENCES["python"].replace(old, new, 1))
    with pytest.raises(ConfigError, match=rf"the module 'majority' fails when it is imported: TypeError: .*{rule}"):
        checked("plugins=[majority]", "data=majority")


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("", "", "pass"),
        ("(-counts[letter], letter)", "counts[letter]", "lite: train: the answer to .* but solve returns"),
        pytest.param("occurrences.argmax(axis=1)[:, None]", "9 + occurrences.argmax(axis=1)[:, None]", "lite: train: the token .* is not in the alphabet", marks=pytest.mark.grid),
        pytest.param("integers(rng, 0,", "integers(np.random.default_rng(), 0,", "the seed, the split and the lengths must determine", marks=pytest.mark.grid),
        pytest.param("integers(rng, 0,", "integers(np.random.default_rng(7), 0,", "train and val have equal examples", marks=pytest.mark.grid),
        pytest.param('ord("a") + letter)', 'ord("a"))', "the names of the alphabet must differ", marks=pytest.mark.grid),
        pytest.param("1 / self.letters", "self.letters", "chance must be from 0 to 1, but is 3", marks=pytest.mark.grid),
        ("letters = integers(", "letters = {}['x']; integers(", r"Majority of the plug-in majority fails: KeyError: 'x' \(majority.py:\d+\)"),
    ],
)  # fmt: skip
def test_the_test_of_a_plug_in_finds_wrong_tasks(
    old: str, new: str, rule: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "majority.py").write_text(FENCES["python"].replace(old, new, 1))
    if rule == "pass":
        main(["probes", "--test", "majority"])
    else:
        with pytest.raises(SystemExit, match="1"):
            main(["probes", "--test", "majority"])
    assert re.search(rf"^majority: .*{rule}", capsys.readouterr().out)


def test_a_task_that_fails_is_an_error_before_training(folder: Path) -> None:
    (folder / "majority.py").write_text(FENCES["python"].replace("return 1 / self.letters", "return {}['x']", 1))
    with pytest.raises(ConfigError, match=r"data.task: Majority of the plug-in majority fails: KeyError: 'x'"):
        checked("plugins=[majority]", "data=majority")


def test_a_plug_in_without_tasks_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["probes", "--test", "math"])
    assert "the module 'math' registers no task" in capsys.readouterr().err
    main(["probes", "majority", "--plugins", "majority"])
    assert capsys.readouterr().out.startswith("majority   an example\n\nPredict the most frequent letter")


@pytest.mark.grid
@pytest.mark.parametrize("launcher", [[], ["launcher=slurm"], ["trainer.devices=2"]])
def test_jobs_of_a_sweep_and_ranks_know_the_task(launcher: list[str], folder: Path, cluster: Path) -> None:  # noqa: F811
    task = ["--config-dir", "my_conf", "plugins=[majority]", "data=majority,parity", "sweep.name=two"]
    command = [str(ROOT / "train.py"), "-m", *task, *SHORT, *launcher]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    models = (folder / "runs" / "two").glob("data-*/model.json")
    plugins = {path.parent.name: json.loads(path.read_text())["plugins"] for path in models}
    assert plugins == {"data-majority": ["majority"], "data-parity": []}
    main(["compare", "runs/two", "--json"])
    resumed = ["resume=runs/two/data-majority", "plugins=[majority]", "trainer.steps=3"]
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *resumed], capture_output=True, text=True)
    assert "data: majority, lite: 40 train examples" in done.stdout, done.stderr
    assert "the learning rate of this run is 0 after step 2" in done.stderr, "the data and the model were read"
