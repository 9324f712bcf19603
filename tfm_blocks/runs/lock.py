"""Lock of a folder, and the heartbeat that shows its holder to other processes and hosts.

A holder locks `lock.json`, writes into it who it is, and touches it every BEAT seconds. A reader takes no lock: it
reads the file (docs/decisions/22-a-lock-has-a-heartbeat.md).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tfm_blocks.errors import Problem, RunError, cut, printable
from tfm_blocks.runs.files import JsonFile, json_bytes

LOCK = "lock.json"
BEAT = 15.0  # seconds between two touches of the file
LIMIT = 120.0  # seconds without a touch after which a holder on another host counts as dead
POLL_INTERVAL = 0.1  # seconds between two attempts to lock
WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})  # file systems where the heartbeat decides
_held: set[int] = set()  # descriptors of this process


@dataclass(frozen=True)
class Holder(JsonFile):
    """The process that holds a folder. `start` is its start time, and `namespace` the namespace of its pid.

    `boot` identifies the start of the host, because hosts may have equal names, and their first namespaces are equal.
    """

    FILE = LOCK

    host: str = ""
    boot: str = ""
    namespace: str = ""
    pid: int = 0
    start: str = ""
    since: str = ""

    def __str__(self) -> str:
        return printable(f"{self.pid} on {cut(self.host)}")

    @property
    def is_local(self) -> bool:
        """Return True if its pid means the same process here."""
        return bool(self.start) and (self.host, self.boot, self.namespace) == _here()


def holder_of(folder: Path) -> Holder | None:
    """Return the live process that holds the folder, or None.

    A process of this host is live if it exists, and one of another host if its heartbeat is younger than LIMIT.
    """
    holder = Holder.read_or_empty(folder)
    if not holder.pid or not holder.host:
        return None
    is_live = holder.start == _start_of(holder.pid) if holder.is_local else _age(folder / LOCK) < LIMIT
    return holder if is_live else None


def expect_free(folder: Path) -> None:
    """Raise RunError if a live process holds the folder."""
    if holder_of(folder):
        raise _refusal(folder)


@contextmanager
def hold(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the folder; the OS releases the lock when the process exits.

    If another process holds it, wait for that process, or raise RunError. Raises OSError.
    """
    descriptor = _acquire(folder, wait)
    _held.add(descriptor)
    stop = threading.Event()
    thread = threading.Thread(target=_beat, args=(descriptor, stop), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with suppress(OSError):
            if _is_file_at(folder / LOCK, descriptor):
                (folder / LOCK).unlink()
        _held.discard(descriptor)
        os.close(descriptor)


def _acquire(folder: Path, wait: bool) -> int:
    descriptor = _try(folder)
    if descriptor is None and wait:
        holder = holder_of(folder) or "unknown"
        print(printable(f"waiting for another process ({holder}) to leave {folder}"), file=sys.stderr)
    while descriptor is None:
        if not wait:
            raise _refusal(folder)
        time.sleep(POLL_INTERVAL)
        descriptor = _try(folder)
    return descriptor


def _try(folder: Path) -> int | None:
    """Return the descriptor of the locked file, or None if another process holds the folder."""
    while True:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        locked = False
        try:
            if not try_lock(descriptor):
                return None
            if not _is_file_at(folder / LOCK, descriptor):  # its holder removed it after it was opened
                continue
            if holder_of(folder):
                return None
            since = datetime.now().astimezone().isoformat(timespec="seconds")
            holder = Holder(*_here(), os.getpid(), _start_of(os.getpid()), since)
            with suppress(OSError):  # a full disk does not affect the lock
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json_bytes(holder.to_json()), 0)
                os.fsync(descriptor)  # else NFS shows the content to other hosts only after the file is closed
            locked = True
            return descriptor
        finally:
            if not locked:
                os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder, and return False if another process holds it. Raises OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    return True


def _beat(descriptor: int, stop: threading.Event) -> None:
    while not stop.wait(BEAT):
        with suppress(OSError):
            os.utime(descriptor)  # needs no disk space; NFS uses the server's time


def _is_file_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _close_inherited() -> None:
    """Close the descriptors of the parent, which a forked child, such as a loader worker, would keep locked."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited)


def _refusal(folder: Path) -> RunError:
    holder = holder_of(folder)
    rule = "is being trained by another process"
    if holder:
        rule += f": {holder}, since {cut(holder.since)}"
    help = "wait until it exits, or stop it"
    if holder is None or not holder.is_local:
        help += f"; if its host crashed, wait {LIMIT:.0f} s, then delete {folder / LOCK} if it still counts as running"
    return RunError(Problem(str(folder), rule, help=help))


def _start_of(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; "" if it does not exist, or without /proc."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2].split()
        return fields[19] if fields[0] not in ("Z", "X") else ""  # a zombie has ended
    return ""


def _here() -> tuple[str, str, str]:
    """Return the name of this host, the random id of its start, and the namespace of pids; "" without /proc.

    The namespace differs between a container and its host.
    """
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return socket.gethostname(), boot, namespace


def _age(path: Path) -> float:
    """Return the seconds since the last touch, by the clock of the file system, or of this host if it is read-only."""
    try:
        with suppress(OSError), tempfile.TemporaryFile(dir=path.parent) as new:
            return os.fstat(new.fileno()).st_mtime - path.stat().st_mtime
        return time.time() - path.stat().st_mtime
    except OSError:
        return LIMIT
