"""status.json: the state of a run, and the scores of a finished run."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tfm_blocks.errors import Problem, RunError, cut, printable
from tfm_blocks.runs.files import json_bytes
from tfm_blocks.runs.folder import CHECKPOINTS, STATUS, WEIGHTS, step_files, step_of
from tfm_blocks.runs.json_file import JsonFile
from tfm_blocks.runs.lock import holder_of
from tfm_blocks.runs.metrics import Best

UNFINISHED = {
    "running": "its training is still running",
    "interrupted": "its training was killed",
    "stopped": "its training was stopped early",
    "preempted": "its training was stopped early, and can be resumed",
    "failed": "its training failed",
    "diverged": "its training diverged",
    "done": "the training has finished, but the file is lost",
    "averaged": "the average was made, but the file is lost",
    "saved": "the model was saved from Python, but the file is lost",
}
RESUMABLE = ("preempted", "stopped", "failed", "interrupted")  # a diverged run would diverge again


@dataclass(frozen=True)
class Score:
    """A corpus score with the half width of its 95 % interval over bootstrap resamples (Koehn 2004).

    `signature` is sacreBLEU's description of the settings. `p` is the two-sided p-value of the difference to another
    system, and `p_sacrebleu` the p-value of sacreBLEU's paired bootstrap. `difference_interval` is the 95 % interval of
    `difference`.
    """

    name: str
    value: float = math.nan
    interval: float = math.nan
    signature: str = ""
    p: float | None = None
    p_sacrebleu: float | None = None
    difference: float | None = None
    difference_interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class ScoredSet:
    """The number of rows of the scored split, and its hash."""

    rows: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Status(JsonFile):
    """The content of status.json.

    resume: the command that resumes the run. of: the averaged files. scored_on: the split of the scores. translation:
    scores of the translations by sacreBLEU.
    """

    FILE = STATUS

    state: str = ""
    reason: str = ""
    resume: str = ""
    of: tuple[str, ...] = ()
    steps: int | None = None
    seconds: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    scored_on: str = ""
    exact_match_by_group: Mapping[str, float] = field(default_factory=dict)
    translation: tuple[Score, ...] = ()
    test_set: ScoredSet = ScoredSet()
    parameters: int | None = None
    multiply_adds: int | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)
    tokens_seen: float | None = None
    tokens_per_second: float | None = None
    best: Mapping[str, Best] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file; a finished run has all measurements."""
        content = super().to_json()
        if self.state != "done":
            return content
        omitted = {"reason", "resume", "of"} - content.keys()
        return {name: value for name, value in asdict(self).items() if name not in omitted}

    def write_end(self, run: Path) -> None:
        """Write the file; on a full disk, overwrite it in the space of its old content. Raises OSError."""
        try:
            self.write(run)
        except OSError:
            with (run / STATUS).open("r+b") as file:
                file.write(json_bytes(self.to_json()))
                file.truncate()


def state_of(run: Path) -> tuple[str, str]:
    """Return the state of a run and its reason from status.json, or empty texts.

    A run that is "running" but held by no live process is "interrupted".
    """
    status = Status.read_or_empty(run)
    state = "interrupted" if status.state == "running" and not holder_of(run) else status.state
    return state, status.reason


def expect_finished(run: Path) -> None:
    """Raise RunError if a run has no final weights, with the reason and a fix.

    A finished run that is being trained for longer has weights. For such a run, print a warning that they are old.
    """
    state, reason = state_of(run)
    cause = UNFINISHED.get(state, "the training did not finish") + (f" ({cut(reason)})" if reason else "")
    if not (run / WEIGHTS).is_file():
        raise RunError(Problem(str(run), f"has no {WEIGHTS}: {cause}", help=_fix(run, state)))
    if state in UNFINISHED and state not in ("done", "averaged", "saved"):
        print(printable(f"warning: {run}: {cause}; its weights are from before that"), file=sys.stderr)


def _fix(run: Path, state: str) -> str:
    kept = step_files(run / CHECKPOINTS)
    fixes = {"running": "wait until it ends", "done": "restore it"}
    if state in RESUMABLE:
        fixes[state] = f"{Status.read_or_empty(run).resume or f'tfm train resume={run}'} resumes it"
    if kept:
        command = f"tfm translate {run} --checkpoint last uses its weights after step {step_of(kept[-1]):,}"
        return f"{fixes[state]}, or: {command}" if state in fixes else command
    return fixes.get(state, "no weights were kept before that: train it again")
