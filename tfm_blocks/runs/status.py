"""Read and write status.json: the state of a run, and the scores of a finished run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tfm_blocks.errors import Problem, RunError, cut, printable
from tfm_blocks.runs.files import read_json
from tfm_blocks.runs.folder import (
    CHECKPOINTS,
    STATUS,
    WEIGHTS,
    finite_or_null,
    overwrite_json,
    step_files,
    step_of,
    write_json,
)
from tfm_blocks.runs.lock import holder_of
from tfm_blocks.runs.metrics import Best
from tfm_blocks.runs.values import count_at, list_at, mapping_at, number_at, text_at, texts_at

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
class Status:
    """The content of status.json; a field that the file lacks is None or empty.

    resume: the command that resumes the run. of: the averaged files. scored_on: the split of the scores. translation:
    scores of the translations by sacreBLEU. test_set: its `rows` and `sha256`.
    """

    state: str = ""
    reason: str = ""
    resume: str = ""
    of: Sequence[str] = ()
    steps: int | None = None
    seconds: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    scored_on: str = ""
    exact_match_by_group: Mapping[str, float] = field(default_factory=dict)
    translation: Sequence[Mapping[str, Any]] = ()
    test_set: Mapping[str, Any] = field(default_factory=dict)
    parameters: int | None = None
    multiply_adds: int | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)
    tokens_seen: float | None = None
    tokens_per_second: float | None = None
    best: Mapping[str, Best] | None = None


def read_status(run: Path) -> Status:
    """Read status.json. Values of another type count as missing. Raises RunError if it is not a JSON object."""
    values = read_json(run / STATUS)
    return Status(
        state=text_at(values, "state"),
        reason=text_at(values, "reason"),
        resume=text_at(values, "resume"),
        of=texts_at(values, "of"),
        steps=count_at(values, "steps"),
        seconds=number_at(values, "seconds"),
        scores=_numbers(mapping_at(values, "scores")),
        scored_on=text_at(values, "scored_on"),
        exact_match_by_group=_numbers(mapping_at(values, "exact_match_by_group")),
        translation=tuple(score for score in list_at(values, "translation") if isinstance(score, dict)),
        test_set=mapping_at(values, "test_set"),
        parameters=count_at(values, "parameters"),
        multiply_adds=count_at(values, "multiply_adds"),
        lengths=mapping_at(values, "lengths"),
        tokens_seen=number_at(values, "tokens_seen"),
        tokens_per_second=number_at(values, "tokens_per_second"),
        best=_best(mapping_at(values, "best")) if "best" in values else None,
    )


def read_status_or_empty(run: Path) -> Status:
    """Return an empty status if the file cannot be read: one damaged run must not hide the others."""
    with suppress(RunError):
        return read_status(run)
    return Status()


def write_status(run: Path, status: Status) -> None:
    """Write status.json atomically. Raises OSError."""
    write_json(run / STATUS, _record(status))


def write_end(run: Path, status: Status) -> None:
    """Write status.json; on a full disk, overwrite the existing file. Raises OSError."""
    try:
        write_status(run, status)
    except OSError:
        overwrite_json(run / STATUS, _record(status))


def _record(status: Status) -> dict[str, Any]:
    """Return the JSON object, without empty fields; a finished run has all measurements."""
    kept = asdict(status).keys() - {"reason", "resume", "of"} if status.state == "done" else set()
    return {name: finite_or_null(value) for name, value in asdict(status).items() if value or name in kept}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: number for name in values if (number := number_at(values, name)) is not None}


def _best(listed: Mapping[str, Any]) -> dict[str, Best]:
    pairs = {
        name: (number_at(one, "value"), count_at(one, "step")) for name, one in listed.items() if isinstance(one, dict)
    }
    return {name: Best(value, step) for name, (value, step) in pairs.items() if value is not None and step is not None}


def state_of(run: Path) -> tuple[str, str]:
    """Return the state of a run and its reason from status.json, or empty texts.

    A run that is "running" but held by no live process is "interrupted".
    """
    status = read_status_or_empty(run)
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
        fixes[state] = f"{read_status_or_empty(run).resume or f'python train.py resume={run}'} resumes it"
    if kept:
        command = f"tfm translate {run} --checkpoint last uses its weights after step {step_of(kept[-1]):,}"
        return f"{fixes[state]}, or: {command}" if state in fixes else command
    return fixes.get(state, "no weights were kept before that: train it again")
