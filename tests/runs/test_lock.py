"""A folder has one holder, which every process on every host can see without taking the lock."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from tfm_blocks.errors import RunError
from tfm_blocks.runs import lock
from tfm_blocks.runs.lock import LIMIT, LOCK, Holder, hold, holder_of

SINCE = "2026-11-23T13:15:30+00:00"
HOLDS = """
import os, sys, time
from pathlib import Path
from tfm_blocks.runs.lock import hold
with hold(Path(sys.argv[1])):
    if len(sys.argv) == 2 or not os.fork():
        print(os.getpid(), flush=True)
    time.sleep(600)
"""
READS = """
import sys
from pathlib import Path
from tfm_blocks.runs.lock import holder_of
print("ready", flush=True)
while True:
    holder_of(Path(sys.argv[1]))
"""


def leave_heartbeat(folder, age, **changes):
    """Write the heartbeat of a process on another host, touched `age` seconds ago."""
    record = {"host": "node7", "namespace": "pid:[1]", "pid": 4711, "start": "1", "since": SINCE} | changes
    (folder / LOCK).write_text(json.dumps(record))
    os.utime(folder / LOCK, (time.time() - age,) * 2)


@contextmanager
def holder_process(folder, *arguments):
    """Hold the folder by another process; yield the process and the pid that it prints, its own or its child's."""
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(folder), *arguments], stdout=subprocess.PIPE) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_the_error_of_a_locked_folder_names_the_process(tmp_path):
    assert holder_of(tmp_path) is None and holder_of(tmp_path / "missing") is None
    with holder_process(tmp_path) as (process, _):
        assert str(holder_of(tmp_path)) == f"{process.pid} on {socket.gethostname()}"
        with (
            pytest.raises(RunError, match=rf"trained by another process: {process.pid} on .*, since 2"),
            hold(tmp_path),
        ):
            pass


def test_a_lock_cannot_be_taken_twice_and_leaves_no_file(tmp_path):
    with hold(tmp_path):
        assert holder_of(tmp_path).pid == os.getpid()
        with pytest.raises(RunError, match="is being trained by another process"), hold(tmp_path):
            pass
        assert holder_of(tmp_path).pid == os.getpid(), "the second try changed nothing"
    assert holder_of(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_killing_the_process_releases_the_lock(tmp_path):
    with holder_process(tmp_path) as (process, _):
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert holder_of(tmp_path) is None and (tmp_path / LOCK).exists()
        with hold(tmp_path):
            assert holder_of(tmp_path).pid == os.getpid()


def test_a_child_that_was_forked_by_a_killed_process_does_not_keep_the_lock(tmp_path):
    with holder_process(tmp_path, "fork") as (process, child):
        process.kill()
        process.wait()
        try:
            os.kill(child, 0)  # it lives
            with hold(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_constant_reading_does_not_prevent_locking(tmp_path):
    with subprocess.Popen([sys.executable, "-c", READS, tmp_path], stdout=subprocess.PIPE) as reader:
        reader.stdout.readline()
        try:
            for _ in range(300):
                with hold(tmp_path):
                    pass
        finally:
            reader.kill()


@pytest.mark.parametrize(("age", "is_held"), [(0, True), (LIMIT - 20, True), (LIMIT + 1, False), (-3600, True)])
def test_a_process_of_another_host_is_live_while_its_heartbeat_is_fresh(tmp_path, age, is_held):
    leave_heartbeat(tmp_path, age)
    if not is_held:
        assert holder_of(tmp_path) is None
        with hold(tmp_path):
            pass
        return
    holder = holder_of(tmp_path)
    assert isinstance(holder, Holder) and not holder.is_local
    assert (holder.pid, holder.host, holder.since) == (4711, "node7", SINCE)
    with pytest.raises(RunError) as caught, hold(tmp_path):
        pass
    for text in ("4711 on node7", SINCE, f"wait {LIMIT:.0f} s", str(tmp_path / LOCK)):
        assert text in str(caught.value)
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "node7", "the refusal changed nothing"


def test_a_reused_pid_holds_no_lock(tmp_path):
    with hold(tmp_path):
        own = json.loads((tmp_path / LOCK).read_text())
    leave_heartbeat(tmp_path, 0, **own)
    assert holder_of(tmp_path)
    leave_heartbeat(tmp_path, 0, **own | {"start": str(int(own["start"]) - 1)})
    assert holder_of(tmp_path) is None
    leave_heartbeat(tmp_path, 0, **own | {"start": "1", "namespace": "pid:[1]"})
    assert holder_of(tmp_path), "the pid of another container says nothing here"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x", "host": 3}', '{"pid": 1}', '{"pid": 1e30, "host": "a"}'])
def test_a_damaged_heartbeat_counts_as_unlocked_and_is_replaced(tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    assert holder_of(tmp_path) is None
    with hold(tmp_path):
        assert holder_of(tmp_path).pid == os.getpid()


def test_a_new_lock_is_not_released_by_the_crashed_holder(tmp_path):
    with hold(tmp_path):
        (tmp_path / LOCK).unlink()
        with hold(tmp_path):
            kept = (tmp_path / LOCK).read_text()
    assert json.loads(kept)["pid"] == os.getpid() and not (tmp_path / LOCK).exists()


def test_the_heartbeat_is_touched_while_the_folder_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.01)
    with hold(tmp_path):
        os.utime(tmp_path / LOCK, (0, 0))
        while not (tmp_path / LOCK).stat().st_mtime:
            time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_a_waiting_process_gets_the_lock_when_it_is_released(tmp_path, capsys):
    with holder_process(tmp_path) as (process, _):
        threading.Timer(0.5, process.kill).start()
        with hold(tmp_path, wait=True):
            assert holder_of(tmp_path).pid == os.getpid()
        assert f"waiting for another process ({process.pid} on " in capsys.readouterr().err


def test_without_file_system_locks_the_heartbeat_locks(tmp_path, monkeypatch):
    """NFS without its lock daemon and Lustre without `-o flock` give this error; file systems of tests do not."""

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with hold(tmp_path):
        with pytest.raises(RunError, match="is being trained by another process"), hold(tmp_path):
            pass
        assert holder_of(tmp_path).pid == os.getpid()


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "other").write_text("kept")
    (tmp_path / LOCK).symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"), hold(tmp_path):
        pass
    assert (tmp_path / "other").read_text() == "kept"


def test_another_host_with_the_same_name_is_another_host(tmp_path):
    """The first namespaces of all hosts have the same number, so only the start of the host tells them apart."""
    with hold(tmp_path):
        record = json.loads((tmp_path / LOCK).read_text())
    leave_heartbeat(tmp_path, 0, **record | {"pid": 2**22 + 1, "boot": "93f1b2b6-0000-0000-0000-000000000000"})
    assert holder_of(tmp_path)
    leave_heartbeat(tmp_path, 0, **record | {"pid": 2**22 + 1})
    assert holder_of(tmp_path) is None


def test_the_clock_of_the_reader_does_not_count(tmp_path, monkeypatch):
    """The file server sets the times of the heartbeat, and the reader's clock is an hour ahead."""
    leave_heartbeat(tmp_path, 0)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    assert holder_of(tmp_path)
