"""Mutated model files: each is accepted and runs, or is refused with an error, and reading it has no side effects."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import run_python

ROOT = Path(__file__).parent.parent


def fuzzed(count, seed):
    """Run the fuzz in a separate process, because an audit hook cannot be removed."""
    done = run_python(["-m", "tests.fuzz", str(count), str(seed)], ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def sound(report):
    wrong = {kind: report[kind][:3] for kind in ("events", "tracebacks", "faulty") if report[kind]}
    assert not wrong
    assert report["accepted"] and report["refused"] and report["run"]


@pytest.mark.grid
def test_mutated_models_are_refused_in_a_sentence_or_run():
    sound(fuzzed(150, seed=2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_mutated_models_are_refused_in_a_sentence_or_run_at_length(seed):
    report = fuzzed(2500, seed)
    sound(report)
    assert not report["slow"]


@pytest.mark.grid
def test_the_audit_hook_detects_the_forbidden_events():
    """Without its events the fuzz could not fail."""
    program = """
import os, socket, subprocess, sys
from tests.fuzz import Watch
watch = Watch()
watch.on = True
exec("1")
import colorsys
open(os.devnull, "w").close()
subprocess.run(["true"])
socket.socket().close()
watch.on = False
heard = {one.split()[0] for one in watch.events}
assert {"exec", "import", "open", "subprocess.Popen", "socket.__new__"} <= heard, heard
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
