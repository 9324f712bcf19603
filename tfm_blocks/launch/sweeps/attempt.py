"""One start of a job: its processes, its log, and how they are ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfm_blocks.launch.sweeps.ending import Ending, ending_of
from tfm_blocks.launch.sweeps.job import DONE, SweepJob
from tfm_blocks.launch.sweeps.progress import Progress

KEEPER = Path(__file__).with_name("keeper.py")
PATIENCE = 60.0  # seconds that a job which was asked to stop has for the end of its step and a checkpoint


@dataclass
class Attempt:
    """`begin` is where its part of the log begins, `deadline` when it is asked to stop, `until` when it is killed.

    `asked` is why it was asked to stop.
    """

    job: SweepJob
    run: Path
    log: Path
    begin: int
    keeper: subprocess.Popen[bytes]
    progress: Progress
    devices: Sequence[str]
    deadline: float = float("inf")
    until: float = float("inf")
    asked: Ending | None = None

    def ask(self, why: Ending) -> None:
        """To end with a checkpoint; only the first time counts."""
        if self.asked is None:
            self.asked, self.until = why, time.monotonic() + PATIENCE
            self.keeper.terminate()

    def kill(self) -> None:
        """Ends all of its processes at once."""
        self.keeper.send_signal(signal.SIGUSR1)
        self.until = float("inf")

    def ending(self) -> Ending | None:
        """What became of it; None while it lives."""
        status = self.keeper.poll()
        if status is None:
            return None
        assert self.keeper.stdin is not None
        self.keeper.stdin.close()
        found = ending_of(status, self.run, self.log, self.begin)
        return self.asked if self.asked and found.state != DONE else found


def start(
    job: SweepJob,
    command: Sequence[str],
    run: Path,
    *,
    environment: Mapping[str, str],
    devices: Sequence[str],
    progress: Progress,
    timeout: float | None,
) -> Attempt:
    """Starts the job in a session of its own, whose end the keeper makes sure of."""
    log = run.with_name(job.log)
    with log.open("ab") as file:
        begin = file.tell()
        keeper = subprocess.Popen(
            [sys.executable, "-IS", str(KEEPER), *command],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    return Attempt(job, run, log, begin, keeper, progress, devices, deadline)
