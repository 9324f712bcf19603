"""A job forked from a preloaded process behaves as a new process: exit status, output and environment."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sweep.jobs import LIMIT, text_of, until
from tests.sweep.test_supervisor import of_session, wait_until_gone
from tfm_blocks.sweep.preloaded import start_supervised

STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["bash", "-c", "trap '' TERM; sleep 1000 & while true; do sleep 0.1; done"])
print("ready")
time.sleep(1000)
"""
PARENT = """
import os, sys, time
from pathlib import Path
from tfm_blocks.sweep.preloaded import start_supervised
print(start_supervised(["-c", sys.argv[1]], Path(sys.argv[2]), os.environ).pid, flush=True)
time.sleep(1000)
"""


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Return the exit status and log of a job."""
    log = folder / "job.log"
    supervisor = start_supervised(arguments, log, {**os.environ, **environment})
    supervisor.join(LIMIT)
    assert supervisor.exitcode is not None
    return supervisor.exitcode, log.read_text()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(75)", 75),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 11)", 139),
    ],
)
def test_the_exit_status_is_the_jobs(tmp_path, code, status):
    assert run(tmp_path, "-c", code)[0] == status


def test_a_job_has_its_environment_arguments_threads_and_folder_and_imports_no_library(tmp_path, monkeypatch):
    script = tmp_path / "job.py"
    shows = "sys.argv[1:], os.environ['KEY'], 'HOME' in os.environ, torch.get_num_threads(), os.getcwd()"
    script.write_text(
        "import sys\nassert {'torch', 'lightning.pytorch', 'torch._dynamo'} <= set(sys.modules)\n"
        f"import os, torch, beside\nprint({shows}, sys.stdin.read(), __name__)"
    )
    (tmp_path / "beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    status, log = run(tmp_path, "job.py", "a=1", "b", KEY="value", OMP_NUM_THREADS="3")
    assert (status, log) == (0, f"['a=1', 'b'] value False 3 {tmp_path}  __main__\n")


def threads_with(folder: Path, variable: str) -> int:
    """Return the number of threads of a job with this OMP_NUM_THREADS."""
    folder.mkdir()
    status, log = run(folder, "-c", "import torch; print(torch.get_num_threads())", OMP_NUM_THREADS=variable)
    assert status == 0, log
    return int(log)


def test_a_job_uses_the_first_number_of_omp_num_threads_and_ignores_other_texts(tmp_path):
    assert [threads_with(tmp_path / name, name) for name in ("3,1", " 3")] == [3, 3]
    default = threads_with(tmp_path / "empty", "")
    assert [threads_with(tmp_path / name, name) for name in ("0", "x", "9" * 30)] == [default] * 3


def test_output_is_appended_line_by_line_with_the_traceback_of_an_error(tmp_path):
    (tmp_path / "job.log").write_text("before\n")
    code = "import os, sys; print('out'); print('error', file=sys.stderr); os.system('echo child'); 1 / 0"
    status, log = run(tmp_path, "-c", code)
    assert status == 1
    assert log.index("before\nout\nerror\nchild\n") == 0 and "ZeroDivisionError" in log


def test_a_stopped_job_may_finish_and_runs_its_exit_functions(tmp_path):
    code = """
import atexit, signal, sys, time
atexit.register(print, "last")
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(75)))
print("ready")
time.sleep(1000)
"""
    supervisor = start_supervised(["-c", code], tmp_path / "job.log", os.environ)
    until(lambda: "ready" in text_of(tmp_path / "job.log"))
    supervisor.terminate()
    supervisor.join(LIMIT)
    assert (supervisor.exitcode, (tmp_path / "job.log").read_text()) == (75, "ready\nlast\n")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_ending_a_job_at_once_ends_its_children(tmp_path):
    supervisor = start_supervised(["-c", STUBBORN], tmp_path / "job.log", os.environ)
    until(lambda: "ready" in text_of(tmp_path / "job.log"))
    assert len(of_session(supervisor.pid)) >= 3
    os.kill(supervisor.pid, signal.SIGUSR1)
    supervisor.join(LIMIT)
    assert supervisor.exitcode == 137
    wait_until_gone(supervisor.pid)


@pytest.mark.grid
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_killing_the_sweep_ends_a_job_that_ignores_signals(tmp_path):
    command = [sys.executable, "-c", PARENT, STUBBORN, str(tmp_path / "job.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sweep:
        session = int(sweep.stdout.readline())
        until(lambda: "ready" in text_of(tmp_path / "job.log"))
        assert len(of_session(session)) >= 3
        sweep.kill()
        wait_until_gone(session)
