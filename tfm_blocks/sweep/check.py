"""Every job of a sweep is checked before the first of them starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.network.build import check_model, network_without_values
from tfm_blocks.training.settings import RunSettings


@dataclass(frozen=True)
class CheckedJob:
    """A job by its overrides, with config, settings and number of parameters, or with the problems of its config."""

    overrides: Sequence[str]
    composed: Composed | None = None
    settings: RunSettings | None = None
    parameters: int = 0
    problems: Sequence[Problem] = ()


def check_jobs(
    jobs: Sequence[Sequence[str]],
    compose: Callable[[list[str]], Composed],
    check: Callable[[Composed], RunSettings | None],
) -> list[CheckedJob]:
    """Each job composed and checked. What `compose` and `check` raise as ConfigError is told, nothing is raised."""
    return [_checked(overrides, compose, check) for overrides in jobs]


def _checked(
    overrides: Sequence[str], compose: Callable[[list[str]], Composed], check: Callable[[Composed], RunSettings | None]
) -> CheckedJob:
    try:
        composed = compose(list(overrides))
        settings = check(composed)
        network = network_without_values(check_model(composed.model, composed.sources))
        parameters = sum(parameter.numel() for parameter in network.parameters())
        return CheckedJob(overrides, composed, settings, parameters)
    except ConfigError as error:
        return CheckedJob(overrides, problems=error.problems)


def refuse_wrong(jobs: Sequence[CheckedJob]) -> None:
    """Raises ConfigError where a job cannot start, with the values that make it so."""
    wrong = [job for job in jobs if job.problems]
    if not wrong:
        return
    right = {text for job in jobs if not job.problems for text in job.overrides}
    culprits = [text for text in dict.fromkeys(text for job in wrong for text in job.overrides) if text not in right]
    first = wrong[0].problems[0]
    rule = f"{len(wrong)} of {len(jobs)} jobs cannot start, so none was started"
    leave_out = f"leave out {' and '.join(culprits)}" if culprits and right else first.help
    raise ConfigError([Problem("sweep", rule, help=leave_out), *dict.fromkeys(job.problems[0] for job in wrong)])
