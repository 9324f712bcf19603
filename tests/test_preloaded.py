"""A preloaded process is as isolated from the tests, and from the next process, as a new process."""

import os
import subprocess

import pytest

from tests.preloaded import run_python, run_python_bytes


@pytest.mark.grid
def test_a_process_has_its_own_arguments_folder_environment_and_streams(tmp_path):
    code = "import os, sys; print(sys.argv, os.getcwd(), os.environ); print(sys.stdin.read(), file=sys.stderr)"
    done = run_python_bytes(["-c", code, "x"], tmp_path, {"ONLY": "this"}, input=b"typed")
    assert done.returncode == 0 and done.stderr == b"typed\n"
    assert done.stdout.decode() == f"['-c', 'x'] {tmp_path} environ({{'ONLY': 'this'}})\n"


@pytest.mark.grid
def test_a_process_does_not_influence_the_next():
    assert run_python(["-c", "import torch; torch.left = 1"]).returncode == 0
    assert run_python(["-c", "import torch; print(hasattr(torch, 'left'))"]).stdout == "False\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [("raise SystemExit(3)", 3), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", -9), ("pass", 0)],
)
def test_the_exit_status_matches_a_new_process(code, status):
    done = run_python(["-c", code])
    assert done.returncode == status and ("ZeroDivisionError" in done.stderr) == (code == "1 / 0")


@pytest.mark.grid
def test_a_process_that_takes_too_long_is_killed(tmp_path):
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    run_python(["-c", "pass"])  # so that the libraries are imported before the clock starts
    with pytest.raises(subprocess.TimeoutExpired):
        run_python(["-c", code], tmp_path, timeout=10)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
