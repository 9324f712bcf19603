"""No process of a job outlives its sweep, and a job forked from a preloaded process behaves as a new process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.sweep.jobs import LIMIT, Small, text_of, until
from tfm_blocks.sweep.launcher import SUPERVISOR
from tfm_blocks.sweep.launchers.local import LocalLauncher
from tfm_blocks.sweep.preloaded import start_supervised
from tfm_blocks.training.settings import TrainerSettings

STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["bash", "-c", "trap '' TERM; sleep 1000 & while true; do sleep 0.1; done"])
print("ready", flush=True)
time.sleep(1000)
"""
STOPPED = """
import atexit, signal, sys, time
atexit.register(print, "last")
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(75)))
print("ready", flush=True)
time.sleep(1000)
"""
SWEEP = """
import os, subprocess, sys, time
from pathlib import Path
code, log, supervisor = sys.argv[1:]
{start}
print(job.pid, flush=True)
time.sleep(1000)
"""
NEW_PROCESS = """
command = [sys.executable, "-IS", supervisor, sys.executable, "-c", code]
job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=open(log, "w"), start_new_session=True)
"""
FORK = """
from tfm_blocks.sweep.preloaded import start_supervised
job = start_supervised(["-c", code], Path(log), os.environ)
"""
reads_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")


def of_session(session: int) -> list[str]:
    """Return the live processes of a session."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                pids.append(path.parent.name)
    return pids


@pytest.fixture(params=[[], ["env"]], ids=["fork", "new process"])
def start(request: pytest.FixtureRequest, small: Small, tmp_path: Path) -> Iterator[Callable[[str], object]]:
    """Yield a function that starts Python code as a job of this machine; a command of Python itself is forked."""
    launcher, trainer = LocalLauncher(1), TrainerSettings.model_validate(small().mapping["trainer"])
    workers = []

    def start(code: str) -> object:
        command = [*request.param, sys.executable, "-c", code]
        workers.append(launcher.start("job", command, tmp_path / "job.log", trainer))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(75)", 75),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 11)", 139),
    ],
)
def test_the_exit_status_is_the_jobs(start, code, status):
    assert until(start(code).ended) == status


def test_a_stopped_job_may_finish_and_runs_its_exit_functions(start, tmp_path):
    worker = start(STOPPED)
    until(lambda: "ready" in text_of(tmp_path / "job.log"))
    worker.stop()
    assert (until(worker.ended), text_of(tmp_path / "job.log")) == (75, "ready\nlast\n")


@reads_proc
def test_ending_a_job_at_once_ends_its_children(start, tmp_path):
    worker = start(STUBBORN)
    until(lambda: "ready" in text_of(tmp_path / "job.log"))
    assert len(of_session(worker.supervisor.pid)) >= 3
    worker.kill()
    assert until(worker.ended) == 137
    until(lambda: not of_session(worker.supervisor.pid))


def test_children_end_when_their_job_ends(start, tmp_path):
    worker = start("import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)")
    assert until(worker.ended) == 0
    with pytest.raises(ProcessLookupError):
        for _ in range(3000):
            os.kill(int(text_of(tmp_path / "job.log")), 0)
            time.sleep(0.1)


@pytest.mark.grid
@reads_proc
@pytest.mark.parametrize("started", [NEW_PROCESS, FORK])
def test_killing_the_sweep_ends_a_job_that_ignores_signals(started, tmp_path):
    command = [sys.executable, "-c", SWEEP.format(start=started), STUBBORN, str(tmp_path / "job.log"), str(SUPERVISOR)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sweep:
        session = int(sweep.stdout.readline())
        until(lambda: "ready" in text_of(tmp_path / "job.log"))
        assert len(of_session(session)) >= 3
        sweep.kill()
        until(lambda: not of_session(session))


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Return the exit status and log of a forked job."""
    supervisor = start_supervised(arguments, folder / "job.log", {**os.environ, **environment})
    supervisor.join(LIMIT)
    assert supervisor.exitcode is not None
    return supervisor.exitcode, text_of(folder / "job.log")


def test_a_fork_has_its_environment_arguments_threads_and_folder_and_imports_no_library(tmp_path, monkeypatch):
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
    """Return the number of threads of a fork with this OMP_NUM_THREADS."""
    folder.mkdir()
    status, log = run(folder, "-c", "import torch; print(torch.get_num_threads())", OMP_NUM_THREADS=variable)
    assert status == 0, log
    return int(log)


def test_a_fork_uses_the_first_number_of_omp_num_threads_and_ignores_other_texts(tmp_path):
    assert [threads_with(tmp_path / name, name) for name in ("3,1", " 3")] == [3, 3]
    default = threads_with(tmp_path / "empty", "")
    assert [threads_with(tmp_path / name, name) for name in ("0", "x", "9" * 30)] == [default] * 3


def test_output_is_appended_line_by_line_with_the_traceback_of_an_error(start, tmp_path):
    (tmp_path / "job.log").write_text("before\n")
    worker = start("import os, sys; print('out'); print('error', file=sys.stderr); os.system('echo child'); 1 / 0")
    assert until(worker.ended) == 1 and worker.begin == len("before\n")
    log = text_of(tmp_path / "job.log")
    assert log.index("before\nout\nerror\nchild\n") == 0 and "ZeroDivisionError" in log
