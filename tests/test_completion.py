"""Completions in bash and zsh."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_startup import ROOT, expect_half_a_second

ASK = """
ask() {
    COMPREPLY=() COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9
    COMP_WORDS=($1)
    [[ "$1" == *' ' ]] && COMP_WORDS+=('')
    $(complete -p "${COMP_WORDS[0]}" | sed 's/.* -F \\([^ ]*\\) .*/\\1/') "${COMP_WORDS[0]}" 2>/dev/null
    printf '%s\\n' "${COMPREPLY[@]% }"
}
eval "$(tfm completion bash)"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the command tfm, a custom model, a run, and a sweep of one run."""
    (tmp_path / "tfm").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tfm_blocks "$@"\n')
    (tmp_path / "tfm").chmod(0o755)
    (tmp_path / "my_conf" / "model").mkdir(parents=True)
    (tmp_path / "my_conf" / "model" / "own_tiny.yaml").write_text(
        "# @package _global_\ndefaults: [tiny, _self_]\nwindow: 3\n"
    )
    for name in ("one", "sizes/heads2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "model.json").touch()
    (tmp_path / "runs" / "sizes" / "sweep.json").touch()
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def ask(folder: Path, *lines: str) -> list[list[str]]:
    """Return bash's completions of each line."""
    calls = "\n".join(f"ask '{line}'; echo ---" for line in lines)
    command = ["bash", "--norc", "-c", ASK + calls]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=True)
    return [[word for word in part.split("\n") if word] for part in done.stdout.split("---\n")[:-1]]


@pytest.mark.grid
def test_bash_completes_commands_options_models_and_run_folders(folder: Path) -> None:
    commands, options, models, own, runs = ask(
        folder, "tfm ", "tfm show --j", "tfm check pre", "tfm show --config-dir my_conf own", "tfm translate runs/"
    )
    assert {"train", "check", "show", "translate", "dashboard", "completion"} <= set(commands)
    assert (options, models, own) == (["--json"], ["prenorm"], ["own_tiny"])
    assert runs == ["runs/one", "runs/sizes/heads2"]


@pytest.mark.grid
def test_bash_completes_sweeps_and_runs_where_they_are_accepted(folder: Path) -> None:
    both = ["runs/one", "runs/sizes", "runs/sizes/heads2"]
    compared, reported, deleted, shown, named, against, checked = ask(
        folder, "tfm compare runs/", "tfm report runs/one runs/s", "tfm runs --delete runs/", "tfm show runs/", "tfm show ",
        "tfm evaluate runs/one --against runs/", "tfm check runs/",
    )  # fmt: skip
    assert (compared, reported, deleted) == (both, both[1:], both)
    assert shown == against == both[::2] and {"prenorm", *shown} <= set(named) and checked == []


@pytest.mark.parametrize(
    "start",
    ["tfm train", *(pytest.param(f"python {name}", marks=pytest.mark.grid) for name in ("train.py", "../x/train.py"))],
)
def test_bash_completes_groups_options_and_keys_of_a_run(folder: Path, start: str) -> None:
    completions = ask(
        folder, f"{start} opti", f"{start} model=restr", f"{start} model=base,pren", f"{start} schedule=linear schedule.p",
        f"{start} trainer.validate_", f"{start} model=restricted r", f"{start} --config-dir my_conf model=own_tiny win",
        f"{start} resume=runs/o", f"{start} debug=",
    )  # fmt: skip
    keys = [[word.rpartition("=")[2] if "=" in word[:-1] else word for word in words] for words in completions]
    assert set(keys[0]) == {"optimizer=", "optimizer."}
    assert keys[1] == ["restricted"] and keys[2] == ["base,prenorm"] and keys[3] == ["schedule.peak="]
    assert set(keys[4]) == {"trainer.validate_every=", "trainer.validate_sentences="}
    assert set(keys[5]) == {"r=", "resume="} and keys[6] == ["window="] and keys[7] == ["runs/one"]
    assert set(keys[8]) == {"fast", "overfit", "null"}


@pytest.mark.grid
def test_bash_completes_names_of_blocks_and_tasks_where_they_are_expected(folder: Path) -> None:
    position = "model.graph.encoder.layer.attn.position"
    completions = ask(
        folder, "tfm blocks restr", f"python train.py {position}=r", "tfm show prenorm model.args.norm=rms",
        "tfm check tiny model.graph.encoder.layer.attn.blo", "python train.py model.gr", "tfm probes pa",
    )  # fmt: skip
    words = [[word.rpartition("=")[2] if "=" in word[:-1] else word for word in words] for words in completions]
    assert words[0] == ["restricted_attention", "restricted_shared_attention", "restricted_global_attention"]
    assert set(words[1]) == {"rotary", "relative_bias", "relative_sinusoidal"}
    assert words[2:4] == [["rmsnorm"], ["model.graph.encoder.layer.attn.block="]]
    assert words[4] and all(word.startswith("model.graph.") for word in words[4])
    assert words[5] == ["parity"]


def test_python_with_another_script_keeps_the_completion_of_the_shell(folder: Path) -> None:
    assert ask(folder, "python other.py mod") == [[]]


@pytest.mark.skipif(not shutil.which("zsh"), reason="there is no zsh")
def test_zsh_gets_the_same(folder: Path) -> None:
    """Type Tab on a terminal."""
    script = 'autoload -Uz compinit; compinit -u; eval "$(tfm completion zsh)"; print $_comps[tfm] $_comps[python]'
    command = ["zsh", "-f", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment(folder) | {"ZDOTDIR": str(folder)}, capture_output=True, text=True)  # fmt: skip
    assert done.stdout.split() == ["_python_argcomplete", "_tfm_train_py"], done.stderr
    for line, whole in (("tfm check restr", "restricted"), ("python train.py model=restr", "model=restricted")):
        assert typed_into_zsh(folder, f"{script}\n", f"{line}\t", whole), line


def typed_into_zsh(folder: Path, begin: str, line: str, expected: str) -> bool:
    """Return True if the expected text appears within two minutes of the start."""
    process, terminal = pty.fork()
    if not process:
        os.chdir(folder)
        os.execvpe("zsh", ["zsh", "-f", "-i"], environment(folder) | {"TERM": "dumb", "ZDOTDIR": str(folder)})
    try:
        os.write(terminal, begin.encode())
        shown, end, typed = "", time.monotonic() + 300, False
        while expected not in shown and time.monotonic() < end:
            if select.select([terminal], [], [], 0.5)[0]:
                shown += os.read(terminal, 65_536).decode(errors="replace")
            if "_python_argcomplete _tfm_train_py" in shown and not typed:
                os.write(terminal, line.encode())
                typed = True
        return expected in shown
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("bash", "tfm show t"),
        ("zsh", "tfm train model.args.norm="),
        ("bash", "tfm "),
        ("bash", "tfm train model="),
        ("zsh", "tfm train trainer."),
        ("zsh", "tfm compare runs/"),
    ],
)
def test_an_answer_takes_less_than_half_a_second_of_a_processor(folder: Path, shell: str, line: str) -> None:
    """Run the process that the shell starts."""
    own = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": shell, "COMP_LINE": line, "COMP_POINT": str(len(line))}
    own |= {"IFS": "\013", "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "answer"), "COMP_TYPE": "9"}
    expect_half_a_second(["-m", "tfm_blocks"], cwd=folder, env=environment(folder) | own)
    assert (folder / "answer").read_text().strip("\013 ")
