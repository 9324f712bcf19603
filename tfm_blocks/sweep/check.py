"""Check every job of a sweep before the first one starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.launch.check import CheckedModel, CheckedRun
from tfm_blocks.network.build import count_parameters


@dataclass(frozen=True)
class CheckedJob:
    """A job with its overrides: the check's result and the number of parameters, or the problems of its config.

    `match` describes the solved budget, whose vocabulary the number of parameters has; it is empty for a sweep without
    `match.like`.
    """

    overrides: Sequence[str]
    checked: CheckedModel | None = None
    parameters: int = 0
    problems: Sequence[Problem] = ()
    match: Mapping[str, Any] = field(default_factory=dict)


Match = Callable[[Sequence[str]], tuple[list[str], dict[str, Any]]]


def keep(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the overrides of a job that no budget changes."""
    return list(overrides), {}


def check_jobs(
    jobs: Sequence[Sequence[str]],
    compose: Callable[[list[str]], Composed],
    check: Callable[[Composed], CheckedModel],
    match: Match = keep,
) -> list[CheckedJob]:
    """Match each job to its budget, compose and check it. A ConfigError becomes the problems of its job."""
    checked_jobs = []
    for overrides in jobs:
        try:
            overrides, record = match(overrides)
            checked = check(compose(list(overrides)))
            sized = checked.with_vocab(record["vocab"]) if record and isinstance(checked, CheckedRun) else checked
            checked_jobs.append(CheckedJob(overrides, checked, count_parameters(sized.spec), match=record))
        except ConfigError as error:
            checked_jobs.append(CheckedJob(overrides, problems=error.problems))
    return checked_jobs


def refuse_wrong(jobs: Sequence[CheckedJob]) -> None:
    """Raise ConfigError if any job cannot start; the error names the values that only such jobs have."""
    wrong = [job for job in jobs if job.problems]
    if not wrong:
        return
    right = {text for job in jobs if not job.problems for text in job.overrides}
    culprits = [text for text in dict.fromkeys(text for job in wrong for text in job.overrides) if text not in right]
    first = wrong[0].problems[0]
    rule = f"{len(wrong)} of {len(jobs)} jobs cannot start, so none was started"
    leave_out = f"leave out {' and '.join(culprits)}" if culprits and right else first.help
    raise ConfigError([Problem("sweep", rule, help=leave_out), *dict.fromkeys(job.problems[0] for job in wrong)])
