"""Check every job of a sweep before the first one starts, and give it the budget of its reference."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tfm_blocks.compose.composition import Composer
from tfm_blocks.compose.folders import list_options
from tfm_blocks.compose.overrides import override_key, override_text
from tfm_blocks.compose.resolve import SOURCE_VOCAB, Composed
from tfm_blocks.compose.run import compose_job
from tfm_blocks.errors import ConfigError, Problem, config_error, cut, print_line, unknown_option
from tfm_blocks.language.spec import Spec
from tfm_blocks.launch.check import CheckedRun, load_listed, with_locations, with_vocab_of_data
from tfm_blocks.metric_schema import OBJECTIVE
from tfm_blocks.network.build import count_parameters
from tfm_blocks.sweep.job import WRONG, SweepJob
from tfm_blocks.sweep.settings import MatchSettings
from tfm_blocks.sweep.solve import BUDGETS, Solution, expect_knobs, measure_cost, solve
from tfm_blocks.training.settings import RunSettings, why_unmeasured

Check = Callable[[Composed], CheckedRun | Spec]  # of a run, or of a model alone


@dataclass
class JobChecker:
    """Composes and checks jobs, after it solved the knobs of `budget` with the vocabulary of the job's data.

    Jobs with the same model and reference, such as seeds, are solved once. `used` are the keys that the model of any
    job uses: a job whose model does not use such an override runs without it.
    """

    composer: Composer
    check: Check
    budget: MatchSettings | None = None
    used: Collection[str] = ()
    costs: dict[str, int] = field(default_factory=dict)
    solutions: dict[tuple[str, int], Solution] = field(default_factory=dict)
    vocabularies: dict[str, tuple[int, int | None]] = field(default_factory=dict)

    def check_job(self, overrides: Sequence[str]) -> SweepJob:
        """Match the job to its budget, compose and check it. A ConfigError becomes the problems of the job."""
        job = SweepJob("", overrides)
        try:
            unused = self.composer.unused(overrides) if self.used else []
            ignored = [text for text in unused if override_key(text) in self.used]
            job.overrides = [text for text in overrides if text not in ignored]
            job.overrides, job.match = self.match(job.overrides, ignored)
            job.composed = compose_job(job.overrides, self.composer)
            checked = self.check(job.composed)
            if isinstance(checked, CheckedRun):
                job.composed, job.settings = checked.composed, checked.settings
                checked = (checked.with_vocab(*job.vocabulary) if job.match else checked).spec
            job.parameters = count_parameters(checked)
        except ConfigError as error:
            job.problems, first = error.problems, error.problems[0]
            job.state, job.reason = WRONG, f"{first.address}: {first.rule}"
        return job

    def match(self, overrides: Sequence[str], ignored: Sequence[str] = ()) -> tuple[Sequence[str], Mapping[str, Any]]:
        """Return the overrides of a job with solved knobs, and the record for run.json.

        The reference may use the `ignored` overrides, which the model of the job does not use. Raises ConfigError if no
        values meet the budget.
        """
        if self.budget is None or not (like := self.budget.like):
            return overrides, {}
        job = self.compose(overrides)
        kept = [text for text in (*ignored, *overrides) if override_key(text) not in like]
        changes = [override_text(key, value) for key, value in like.items()]
        with below("match.like", like):
            for group, name in like.items():
                known = list_options(group, self.composer.folders)
                if known and isinstance(name, str) and name not in known:
                    raise ConfigError(unknown_option(group, name, known))
            unused = self.composer.unused([*kept, *changes])
            reference = self.compose([*(text for text in kept if text not in unused), *changes])
        solution = self._solve(job, reference, self.budget)
        values = {knob: f"{knob}={value}" for knob, value in solution.values.items()}
        record = {
            "like": dict(like),
            "budget": self.budget.budget,
            "values": dict(solution.values),
            "requested": solution.requested,
            "reached": solution.reached,
            "vocab": job.mapping.get("vocab"),
        }
        if (source := job.vocabulary[1]) is not None:
            record[SOURCE_VOCAB] = source
        return [*(text for text in overrides if override_key(text) not in values), *values.values()], record

    def compose(self, overrides: Sequence[str]) -> Composed:
        """Return the config of a job with the vocabulary that its data has. Raises ConfigError and DataError."""
        composed = compose_job(overrides, self.composer)
        with with_locations(composed):
            load_listed(composed.mapping["plugins"])
        key = json.dumps([composed.mapping["data"], composed.vocabulary])
        if key in self.vocabularies:
            return composed.with_vocab(*self.vocabularies[key])
        composed = with_vocab_of_data(composed)
        if type(composed.vocabulary[0]) is int:
            self.vocabularies[key] = composed.vocabulary
        return composed

    def _solve(self, job: Composed, reference: Composed, match: MatchSettings) -> Solution:
        budget = BUDGETS[match.budget]
        key = json.dumps(reference.model)
        if key not in self.costs:
            self.costs[key] = measure_cost(reference, budget)
        requested = self.costs[key]
        if job.model == reference.model:
            return Solution({}, requested, requested)
        problem = json.dumps(job.model), requested
        if problem not in self.solutions:
            with below("match.by", match.by):
                expect_knobs(job, match.by)
            self.solutions[problem] = solve(job, match.by, budget, requested, match.within or budget.within)
        return self.solutions[problem]


@contextmanager
def below(parent: str, keys: Collection[str]) -> Iterator[None]:
    """Put `parent` before the address of each problem of one of its keys."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            [
                replace(problem, address=f"{parent}.{problem.address}") if problem.address in keys else problem
                for problem in error.problems
            ]
        ) from None


def refuse_wrong(jobs: Sequence[SweepJob]) -> None:
    """Raise ConfigError if any job cannot start; the error names the values that only such jobs have."""
    wrong = [job for job in jobs if job.problems]
    if not wrong:
        return
    right = {text for job in jobs if not job.problems for text in job.overrides}
    culprits = [text for text in dict.fromkeys(text for job in wrong for text in job.overrides) if text not in right]
    rule = f"{len(wrong)} of {len(jobs)} jobs cannot start, so none was started"
    first = wrong[0].problems[0]
    misnamed = first.address.startswith("match.")  # only the reference itself is right
    leave_out = f"leave out {' and '.join(culprits)}" if culprits and right and not misnamed else first.help
    raise ConfigError([Problem("sweep", rule, help=leave_out), *dict.fromkeys(job.problems[0] for job in wrong)])


def expect_measured(metric: str, settings: RunSettings, option: str = "sweep.metric") -> None:
    """Raise ConfigError for the option if runs with these settings do not measure the metric of a search."""
    if reason := why_unmeasured(metric, settings.data, settings.objective, settings.trainer):
        raise config_error(option, f"is {metric}, {reason}", f"write {option}={OBJECTIVE}")


def find_used(jobs: Sequence[Sequence[str]], composer: Composer) -> set[str]:
    """Return the keys that the model of any job uses, and print each override that only some of the models use.

    The other models run without it. Raises ConfigError if jobs would be equal without their unused overrides.
    """
    unused = [composer.unused(job) for job in jobs]
    used = {override_key(text) for job, texts in zip(jobs, unused, strict=True) for text in job if text not in texts}
    ignored = [[text for text in texts if override_key(text) in used] for texts in unused]
    jobs_without: defaultdict[tuple[str, ...], list[Sequence[str]]] = defaultdict(list)
    models: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for job, texts in zip(jobs, ignored, strict=True):
        kept = tuple(text for text in job if text not in texts)
        jobs_without[kept].append(job)
        chosen = [text for text in kept if text.startswith(("model=", "experiment="))] or [" ".join(kept)]
        for text in texts:
            models[text] |= dict.fromkeys(chosen)
    for equal in jobs_without.values():
        for text in equal[0]:
            if any(text not in job for job in equal):
                rule = f"is not used by {', '.join(models[text])}, whose jobs with other values would be equal: "
                help = "pair it with the model, as in sweep.together=[model,KEY], or sweep the models separately"
                raise config_error(override_key(text), rule + cut(text), help)
    for text, names in models.items():
        print_line(f"{text}: not used by {', '.join(names)}, whose jobs run without it")
    return used
