"""Damaged and hostile files of run and sweep folders: commands print errors, and other runs stay unchanged."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest

from tests import damage
from tests.conftest import save
from tests.damage import Fuzz, fuzz, leave_runs
from tfm_blocks.cli import main
from tfm_blocks.errors import is_utf8, printable

HOSTILE = "\x1b]0;title\x07\x1b[2J\r\u202eevil\u2066\x9b31m\x7f [red]x[/red] :smile:"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Write three runs in a folder, one of them in a sweep."""
    with pytest.MonkeyPatch.context() as patch:
        yield leave_runs(tmp_path_factory.mktemp("damage"), patch)


@pytest.fixture(scope="module")
def fuzzer(runs):
    return Fuzz(runs, Random(1))


def tokenizer_with(**settings):
    def change(text):
        record = json.loads(text)
        record["model"] |= settings.pop("model", {})
        return json.dumps(record | settings)

    return change


def without(*keys):
    """Return the YAML text without these root keys."""

    def change(text):
        parts = text.replace("\n", "\n\0").split("\0")
        kept, dropped = [], False
        for line in parts:
            dropped = line.split(":")[0] in keys if line[:1].strip() and line[0] not in "-#" else dropped
            kept += [] if dropped else [line]
        return "".join(kept)

    return change


ENDLESS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
FIXED = {
    "nested config": ("victim/config.yaml", "a: " + "[" * 50_000),
    "nested config of blocks": ("victim/config.yaml", "- " * 50_000),
    "config that doubles 30 times": (
        "victim/config.yaml",
        "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(30)),
    ),
    "config without trainer": ("victim/config.yaml", without("trainer")),
    "config without data": ("victim/config.yaml", without("data")),
    "config without plugins": ("victim/config.yaml", without("plugins")),
    "nested run.json": ("victim/run.json", '{"a":' * 50_000),
    "deep run.json": ("victim/run.json", '{"facts":' * 500 + "1" + "}" * 500),
    "choices of another type": ("victim/run.json", '{"choices": 5}'),
    "commands of another type": ("victim/run.json", '{"commands": 5}'),
    "commands that are a float": ("victim/run.json", lambda text: json.dumps(json.loads(text) | {"commands": 1e308})),
    "scores of another type": ("victim/status.json", '{"scores": "x"}'),
    "steps of another type": ("victim/status.json", '{"state": "done", "steps": "x", "scores": {"val/loss": []}}'),
    "steps beyond 64 bits": ("victim/status.json", '{"state": "done", "steps": 1' + "0" * 400 + "}"),
    "state of another type": ("victim/status.json", '{"state": ["done"], "reason": {}, "resume": 3}'),
    "jobs without a name": ("sweep/sweep.json", '{"jobs": [{"config": "x"}, {"name": 5}, {"name": "a\\u0000"}, {"name": "\\ud800"}]}'),
    "latest.json with other types": ("victim/checkpoints/latest.json", '{"checkpoints": [{"file": 1, "step": "x"}]}'),
    "latest.json that leads elsewhere": (
        "victim/checkpoints/latest.json",
        '{"checkpoints": [{"file": "../../x", "step": 1, "bytes": 1, "sha256": "x"}]}',
    ),
    "latest.json with a text": ("victim/checkpoints/latest.json", '{"checkpoints": "x"}'),
    "prefix that makes the tokenizers library panic": (
        "victim/tokenizer.json",
        tokenizer_with(model={"continuing_subword_prefix": "éé"}),
    ),
    "pattern that takes for ever": ("victim/tokenizer.json", tokenizer_with(pre_tokenizer=ENDLESS)),
    "blank row of metrics": ("victim/metrics.csv", lambda text: text.replace("\n", "\n\n", 1)),
    "row of metrics without a step": ("victim/metrics.csv", lambda text: text + ",1,2\r\n"),
    "row of metrics of an endless step": ("victim/metrics.csv", lambda text: text + "1e300,1\r\n"),
    "empty metrics": ("victim/metrics.csv", ""),
}  # fmt: skip


SHOWN = (  # the others are of the same files and kinds
    "nested config",
    "config that doubles 30 times",
    "config without trainer",
    "nested run.json",
    "choices of another type",
    "scores of another type",
    "steps beyond 64 bits",
    "jobs without a name",
    "latest.json with other types",
    "latest.json that leads elsewhere",
    "prefix that makes the tokenizers library panic",
    "row of metrics without a step",
    "empty metrics",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHOWN else pytest.mark.grid) for name in FIXED]
)
def test_a_known_damage_gives_a_sentence_and_changes_no_other_run(fuzzer, name):
    where, change = FIXED[name]
    path = fuzzer.runs / where
    fuzzer.kinds, fuzzer.tracebacks = {}, []
    path.write_text(change(fuzzer.files[path].decode()) if callable(change) else change)
    fuzzer.once(path, name)
    assert not fuzzer.kinds, fuzzer.tracebacks[0]


@pytest.mark.grid
def test_a_named_pipe_in_place_of_a_file_does_not_block(fuzzer):
    fuzzer.kinds, fuzzer.tracebacks = {}, []
    for path in [one for one in fuzzer.files if one.suffix in (".json", ".yaml", ".csv", ".jsonl")]:
        path.unlink()
        os.mkfifo(path)
        fuzzer.once(path, "a pipe")
    assert not fuzzer.kinds, fuzzer.tracebacks[0]


@pytest.mark.parametrize("limit", ["CPU_SECONDS", "WALL_SECONDS"])
def test_a_command_that_does_not_end_is_found(fuzzer, monkeypatch, limit):
    def work():
        end = time.monotonic() + 600
        while time.monotonic() < end:
            if limit == "WALL_SECONDS":
                time.sleep(1)

    fuzzer.kinds = {}
    monkeypatch.setattr(damage, limit, 1)
    fuzzer.guard("endless", work)
    assert "TimeoutError" in str(fuzzer.kinds)


@pytest.mark.grid
def test_random_damages_give_a_sentence_and_change_no_other_run(runs):
    report = fuzz(runs, 40, seed=1)
    assert report["damages"] == 40 and report["commands"] > 120
    assert not report["kinds"], report["tracebacks"][0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_random_damages_give_a_sentence_and_change_no_other_run(runs, seed):
    report = fuzz(runs, 500, seed)
    assert not report["kinds"], report["tracebacks"][0]


def hostile(root):
    """Write a run and a sweep with control characters in every name and text, in a separate folder."""
    run = root / f"a{HOSTILE.replace('/', '')}"
    for folder in (run, root / f"sweep{HOSTILE.replace('/', '')}" / "job"):
        folder.mkdir(parents=True)
        facts = {HOSTILE: HOSTILE, "versions": {"torch": HOSTILE}}
        record = {
            "choices": {"model": HOSTILE, "data": HOSTILE},
            "commands": [HOSTILE],
            "text": {"vocabulary": HOSTILE},
        }
        (folder / "run.json").write_text(
            json.dumps(record | {"facts": facts, "changes": [{"resumed": HOSTILE, "a": HOSTILE}]})
        )
        scores = {
            "translation": [{"name": "BLEU", "value": 1, "interval": 1, "signature": HOSTILE}],
            "scored_on": HOSTILE,
        }
        scores |= {
            "scores": {f"{HOSTILE}/{HOSTILE}": 1.0},
            "best": {HOSTILE: {"value": 1, "step": 1}},
            "test_set": {"sha256": HOSTILE},
        }
        (folder / "status.json").write_text(
            json.dumps({"state": HOSTILE, "reason": HOSTILE, "resume": HOSTILE, **scores})
        )
        (folder / "config.yaml").write_text(json.dumps({HOSTILE: HOSTILE, "seed": folder.name}))
    jobs = [
        {"name": "job"},
        {"name": HOSTILE.replace("/", ""), "overrides": [HOSTILE], "state": HOSTILE, "reason": HOSTILE},
    ]
    (folder.parent / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    return run


@pytest.mark.parametrize(
    "command",
    [
        "runs --in ROOT", "runs --json --in ROOT", "runs --state x --in ROOT", "runs --delete RUN", "runs --delete RUN/x",
        "compare ROOT", "compare --json ROOT", "compare --csv ROOT", "compare --markdown ROOT", "compare ROOT --baseline x", "compare RUN/x",
        "show RUN", "show RUN --json", "average RUN", "translate RUN", "translate RUN --checkpoint best", "train resume=RUN",
    ],
)  # fmt: skip
def test_no_control_character_of_a_run_folder_reaches_the_terminal(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    run = str(hostile(tmp_path / "runs"))
    words = [word.replace("ROOT", "runs").replace("RUN", run) for word in command.split()]
    if words[0] == "train":
        words[1] = "resume='" + words[1].removeprefix("resume=") + "'"
    with suppress(SystemExit):
        main(words)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert text and text == printable(text)


@pytest.mark.grid
@pytest.mark.parametrize("name", [HOSTILE.replace("/", ""), "a\udcff\rb"])
def test_commands_that_load_a_run_print_and_write_its_name_without_control_characters(
    name, translator, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    save(translator, run := tmp_path / name)
    save(translator, tmp_path / "other")
    commands = [
        ["figure", name, "-o", "model.svg"], ["diff", "other", name, "-o", "diff.svg"], ["diff", "other", name, "-o", "diff.tex"],
        ["view", name, "-o", f"{name}/page.html"], ["eject", name, "-o", "model.py"], ["eject", name, "-o", f"{name}/model.py"],
    ]  # fmt: skip
    if is_utf8(name):
        (run / "lines").write_text("zwei Kinder spielen\n")
        lines = ["--src", str(run / "lines"), "--ref", str(run / "lines"), "--max-tokens", "2"]
        commands += [["attention", name, "Haus", "-o", f"{name}/attention.html"], ["evaluate", name, *lines]]
    for words in commands:
        main(words)
        printed = capsys.readouterr()
        assert (text := printed.out + printed.err) == printable(text), words
    for file in ("model.svg", "diff.svg"):
        ElementTree.parse(file)
    written = Path("model.py").read_text("utf-8")
    assert written == printable(written)
