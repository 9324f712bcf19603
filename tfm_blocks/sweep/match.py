"""Give every job of a sweep the budget of its reference, before the first job starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfm_blocks.compose.command_line import override_key
from tfm_blocks.compose.job import JobComposer
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.launch.check import with_vocab_of_data
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.sweep.settings import MatchSettings
from tfm_blocks.sweep.solve import BUDGETS, Solution, measure_cost, solve


@dataclass
class Matcher:
    """Solves the knobs `match.by` of jobs, with the vocabulary that the data of each job has.

    Jobs with the same model and reference, such as seeds, are solved once. `ignored` maps jobs to overrides that only
    other models use; a reference may use them.
    """

    settings: MatchSettings
    composer: JobComposer
    ignored: Mapping[tuple[str, ...], Sequence[str]] = field(default_factory=dict)
    costs: dict[str, int] = field(default_factory=dict)
    solutions: dict[tuple[str, int], Solution] = field(default_factory=dict)
    vocabularies: dict[str, int] = field(default_factory=dict)

    def match(self, overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """Return the overrides of a job with solved knobs, and the record for run.json.

        Raises ConfigError if no values meet the budget.
        """
        if not self.settings.like:
            return list(overrides), {}
        job = self._compose(overrides)
        reference = self._compose(self._overrides_of_reference(overrides))
        requested = self._cost(reference)
        same = job.model == reference.model
        solution = Solution({}, requested, requested) if same else self._solve(job, requested)
        values = {knob: f"{knob}={value}" for knob, value in solution.values.items()}
        kept = [text for text in overrides if override_key(text) not in values]
        return [*kept, *values.values()], self._record(solution) | {"vocab": job.mapping.get("vocab")}

    def _overrides_of_reference(self, overrides: Sequence[str]) -> list[str]:
        """Return the overrides of a job with those of `match.like`, without knobs that the reference does not use."""
        like = [f"{key}={value}" for key, value in self.settings.like.items()]
        of_job = [*self.ignored.get(tuple(overrides), ()), *overrides]
        kept = [text for text in of_job if override_key(text) not in self.settings.like]
        unused = self.composer.unused([*kept, *like])
        return [*(text for text in kept if text not in unused), *like]

    def _compose(self, overrides: Sequence[str]) -> Composed:
        composed = self.composer.compose(overrides)
        load_plugins(composed.mapping["plugins"])
        key = json.dumps([composed.mapping["data"], composed.mapping.get("vocab")])
        if key in self.vocabularies:
            return composed.with_vocab(self.vocabularies[key])
        composed = with_vocab_of_data(composed)
        if type(size := composed.mapping.get("vocab")) is int:
            self.vocabularies[key] = size
        return composed

    def _cost(self, reference: Composed) -> int:
        key = json.dumps(reference.model)
        if key not in self.costs:
            self.costs[key] = measure_cost(reference, BUDGETS[self.settings.budget])
        return self.costs[key]

    def _solve(self, job: Composed, requested: int) -> Solution:
        budget = BUDGETS[self.settings.budget]
        key = json.dumps(job.model), requested
        if key not in self.solutions:
            within = self.settings.within or budget.within
            self.solutions[key] = solve(job, self.settings.by, budget, requested, within)
        return self.solutions[key]

    def _record(self, solution: Solution) -> dict[str, Any]:
        like, budget = dict(self.settings.like), self.settings.budget
        sizes = {"requested": solution.requested, "reached": solution.reached}
        return {"like": like, "budget": budget, "values": dict(solution.values), **sizes}
